"""Sixteen bits: train_amp.py's forward pass computes in them, and learns what float32 learns but for their digits."""
import shutil

import pytest
from conftest import PYTHON, TORCHRUN, copy_out, distance, epochs, good, load, run, same


@pytest.fixture(scope="module")
def few_digits(tmp_path_factory):
    """Train on 48 of the digits, two steps in each of two epochs: many CPUs need seconds for a step in 16 bits.

    Returns a function from a command to its (folder, result).
    """
    import numpy as np

    script = copy_out("train.py", tmp_path_factory.mktemp("few") / "copy")
    shutil.copy("train_amp.py", script.parent)
    file = script.parent / "common/digits.npz"
    with np.load(file) as digits:
        few = {name: values[:60] for name, values in digits.items()}
    np.savez(file, **few)

    def train(*command, output, resume=()):
        steps = ["--batch-size", "24", "--epochs", "2", "--save-every", "1", "--log-every", "1", "--workers", "0"]
        folder = script.parent / output
        return folder, good(run(*command, *steps, "--output-dir", folder, *resume, cwd=script.parent))

    return train


@pytest.fixture(scope="module")
def bf16(few_digits):
    # the norm is never that large; that of gradients which are still scaled for fp16 would be
    return few_digits(*TORCHRUN, "--nproc-per-node=2", "train_amp.py", "--clip-norm", "100", output="bf16")


def test_bf16_on_two_processes_is_the_baseline_but_for_its_digits(few_digits, bf16):
    folder, result = few_digits(PYTHON, "train.py", output="float32")
    for left, right in zip(epochs(result.out), epochs(bf16[1].out), strict=True):
        assert (left["loss"], left["val_loss"]) == pytest.approx((right["loss"], right["val_loss"]), rel=0.02)
    # bf16 keeps 8 binary digits, float32 24: in float32 the two would differ by less than 1e-6
    assert 2e-5 < distance(folder / "last.pt", bf16[0] / "last.pt") < 1e-2


@pytest.mark.drill
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
