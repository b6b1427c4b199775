"""16 bits: the forward pass uses them, and the model learns as in float32, apart from rounding."""
import os
import re
import signal

import pytest
from conftest import PYTHON, STRICT, TORCHRUN, copy_classifiers, distance, epochs, good, load, run, same
from live import Live

pytestmark = pytest.mark.drill
FEW = ["--batch-size", "24", "--epochs", "2", "--save-every", "1", "--log-every", "1", "--workers", "0"]
COMBINED = [*TORCHRUN, "--nproc-per-node=2", "train_combined.py", "--accum-steps", "3", "--clip-norm", "100"]


@pytest.fixture(scope="module")
def few_digits(tmp_path_factory):
    """Train on 48 of the digits, two steps in each of two epochs: many CPUs need seconds for a step in 16 bits.

    Returns a function from a command to its (folder, result).
    """
    folder = copy_classifiers(tmp_path_factory.mktemp("fewer") / "copy", 60)

    def train(*command, output, resume=()):
        said = run(*command, *FEW, "--output-dir", output, *resume, cwd=folder, env=STRICT)
        return folder / output, good(said)

    train.folder = folder
    return train


@pytest.fixture(scope="module")
def bf16(few_digits, once):
    # the norm is never that large; that of gradients which are still scaled for fp16 would be
    command = [*TORCHRUN, "--nproc-per-node=2", "train_amp.py", "--clip-norm", "100"]
    return once("bf16", lambda folder: few_digits(*command, output=folder)[1])


def test_bf16_on_two_processes_is_the_baseline_but_for_its_digits(few_digits, bf16):
    folder, result = few_digits(PYTHON, "train.py", output="float32")
    for left, right in zip(epochs(result.out), epochs(bf16[1].out), strict=True):
        assert (left["loss"], left["val_loss"]) == pytest.approx((right["loss"], right["val_loss"]), rel=0.02)
    # bf16 keeps 8 binary digits, float32 24: in float32 the two would differ by less than 1e-6
    assert 2e-5 < distance(folder / "last.pt", bf16[0] / "last.pt") < 1e-2


@pytest.mark.nightly
def test_fp16_scales_and_its_scaler_resumes(few_digits, bf16):
    fp16 = [PYTHON, "train_amp.py", "--precision", "fp16", "--clip-norm", "100"]
    folder, whole = few_digits(*fp16, output="fp16")
    again, _ = few_digits(*fp16, output="again", resume=["--resume", folder / "epoch-001.pt"])
    first, last = load(folder / "epoch-001.pt"), load(folder / "last.pt")
    assert same(last, load(again / "last.pt"))
    assert last["scaler"]["scale"] == 65536 and last["scaler"]["_growth_tracker"] == 4
    assert first["scaler"]["_growth_tracker"] == 2
    for left, right in zip(epochs(whole.out), epochs(bf16[1].out), strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=0.02)  # where nothing needs to be unscaled
    assert 2e-5 < distance(folder / "last.pt", bf16[0] / "last.pt") < 1e-2  # both are in 16 bits, and in other ones


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "ending"), [("bf16", "SIGTERM"), ("fp16", "SIGKILL")])
def test_a_combined_run_that_was_ended_resumes_bit_for_bit(few_digits, precision, ending):
    """The snapshot must contain the scale, the average and the warm-up's count."""
    command = [*COMBINED, "--precision", precision, "--snapshot-every", "1", "--ema", "0.9", "--warmup-steps", "3"]
    folder, whole = few_digits(*command, output=f"whole-{precision}")
    with Live(*command, *FEW, "--output-dir", ending, cwd=few_digits.folder) as live:
        live.wait_for("^epoch +1/2" if ending == "SIGKILL" else "3 micro-batches")
        for pid in live.family() if ending == "SIGKILL" else live.family()[:1]:
            os.kill(pid, signal.Signals[ending])
        assert live.end(120) != 0
    again, result = few_digits(*command, output=ending, resume=["--resume", "auto"])
    assert re.search(r"^resume .*(steps of )?epoch \d (is|are) done", result.out, re.M)
    assert same(load(folder / "last.pt"), load(again / "last.pt"))
    assert epochs(whole.out)[-1] == epochs(result.out)[-1]
