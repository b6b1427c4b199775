"""minimal/: all scripts train the same model, and evaluate, stop and save in the same way."""
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    LAUNCH,
    PROGRAMS,
    PYTHON,
    ROOT,
    SITE,
    STRICT,
    TORCHRUN,
    distance,
    good,
    load,
    replace_lines,
    run,
    same,
)
from torch import nn

BASELINE, DDP = ROOT / "minimal/train.py", ROOT / "minimal/train_DDP.py"
CHILD = f"{ROOT}/minimal/train_{{}}.py"
SCRIPTS = sorted(ROOT.glob("minimal/*.py"))
TWO = [*TORCHRUN, "--nproc-per-node=2"]
COMMANDS = {"train.py": [PYTHON, BASELINE], "train_DDP.py": [*TWO, DDP],
            "on 3": [*LAUNCH, "--nproc_per_node=3", DDP], "on 1": [PYTHON, DDP],
            "short": [PYTHON, BASELINE, "--epochs", "5"],
            "train_grad_accum.py": [*TWO, CHILD.format("grad_accum"), "--epochs", "5", "--accum-steps", "5"],
            "train_amp.py": [*TWO, CHILD.format("amp"), "--epochs", "2"],
            "train_FSDP.py": [*TWO, CHILD.format("FSDP"), "--epochs", "5"],
            "train_resume.py": [*TWO, "--max-restarts=3", CHILD.format("resume"), "--epochs", "2"]}
FEW = ["train.py", "train_DDP.py", pytest.param("train_FSDP.py", marks=pytest.mark.drill),
       pytest.param("on 3", marks=pytest.mark.nightly)]
ROWS, VAL_ROWS, BATCH, PATIENCE, EPOCHS = 1000, 499, 48, 6, 100  # the defaults
EPOCH = re.compile(r"epoch +(\d+)  loss ([\d.]+)  val_loss ([\d.]+)  lr ([\d.e-]+)")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return an environment in which Python computes in float64, and in one thread."""
    folder = tmp_path_factory.mktemp("float64")
    (folder / "sitecustomize.py").write_text(
        (PROGRAMS / "site/sitecustomize.py").read_text() + "import torch\ntorch.set_default_dtype(torch.float64)\n")
    return {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def launched(once, environment):
    """Return a function that runs a command of COMMANDS once: name to (folder, result)."""
    own = {"PYTHONPATH": SITE}  # float64 fails in autocast's loss up to torch 2.11
    env = environment | STRICT
    return lambda name: once(f"minimal {name}", lambda folder: run(
        *COMMANDS[name], cwd=folder, env=env | own if name == "train_amp.py" else env))


@pytest.fixture(scope="module")
def trained(launched):
    """Return a function that runs a command of COMMANDS once: name to (folder, its lines of epochs)."""
    def get(name):
        folder, said = launched(name)
        return folder, [line for line in said.out.splitlines() if line.startswith("epoch")]

    return get


@pytest.mark.parametrize("name", [
    "train_DDP.py", *(pytest.param(name, marks=pytest.mark.nightly) for name in (
        "train_grad_accum.py", "train_FSDP.py", "on 1", "on 3"))])
def test_any_number_of_processes_trains_the_same_model(trained, name):
    """The batches, the micro-batches and the validation set do not divide evenly."""
    assert ROWS % BATCH and VAL_ROWS % 2 and VAL_ROWS % 3 and VAL_ROWS % BATCH and BATCH // 2 % 5
    whole = "short" if "--epochs" in COMMANDS[name] else "train.py"
    (baseline, lines), (folder, same_lines) = trained(whole), trained(name)
    assert distance(baseline / "best.pt", folder / "best.pt") < 1e-11
    assert same_lines == lines  # one process prints; losses, learning rates and the last epoch are the same


def test_mixed_precision_on_two_processes_learns(trained):
    first, second = (EPOCH.fullmatch(line) for line in trained("train_amp.py")[1])
    assert float(second[2]) < float(first[2]) and float(second[3]) < float(first[3])


@pytest.mark.parametrize("name", ["train_FSDP.py", "train_grad_accum.py", "train_resume.py"])
def test_a_short_run_on_two_processes_shows_the_first_epochs_of_one(trained, name):
    lines = trained(name)[1]
    assert len(lines) > 1 and lines == trained("train.py")[1][:len(lines)]


@pytest.mark.drill
def test_no_thread_of_gloo_is_left_when_python_ends(tmp_path):
    """One that still holds a tensor would abort the process, once in some launches."""
    said = good(run(*TWO, PROGRAMS / "around.py", "last_threads", DDP, "--epochs", "1", "--device", "cpu",
                    cwd=tmp_path)).out
    assert said.count("threads:") == 2 and "gloo" not in said


def test_the_run_lowers_the_learning_rate_and_stops_early(trained):
    folder, lines = trained("train.py")
    rows = [tuple(map(float, EPOCH.fullmatch(line).groups())) for line in lines]
    epochs, losses, val_losses, rates = zip(*rows)
    assert list(epochs) == [*range(1, len(rows) + 1)] and len(rows) < EPOCHS
    best = val_losses.index(min(val_losses)) + 1
    assert len(rows) == best + PATIENCE and load(folder / "best.pt")["epoch"] == best
    assert rates[0] == 0.02 and rates[-1] < 0.02 and sorted(rates, reverse=True) == list(rates)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", FEW)
def test_the_checkpoint_is_one_file_for_the_plain_model_and_its_loss_counts_each_row_once(trained, name):
    """The expected loss is computed over the whole validation set at once, without a loader or a sampler."""
    folder, _ = trained(name)
    assert [path.name for path in folder.iterdir()] == ["best.pt"]
    state = torch.load(folder / "best.pt", weights_only=True)
    create_table = runpy.run_path(str(BASELINE))["create_table"]
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1)).double()
    model.load_state_dict(state["model"])
    torch.set_default_dtype(torch.float64)
    try:
        features, targets = create_table(VAL_ROWS, seed=2).tensors
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        loss = ((model(features) - targets) ** 2).mean().item()
    assert state["val_loss"] == pytest.approx(loss, rel=1e-12)


KILL = """
import os, signal
replace, left = os.replace, {epochs}
def kill(source, target):
    global left
    left -= str(target).endswith(".last")
    if not left and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = kill
"""


@pytest.mark.nightly
def test_a_killed_run_resumes_and_trains_the_same_bits(trained, environment, tmp_path):
    """SIGKILL comes while rank 0 saves an epoch after the best one, between writing and renaming the file."""
    uninterrupted, lines = trained("train_DDP.py")
    rates = [EPOCH.fullmatch(line)[4] for line in lines]
    epoch = max(number for number in range(1, len(rates)) if rates[number - 1] != rates[number])
    assert load(uninterrupted / "best.pt")["epoch"] < epoch - 1  # the scheduler and early stopping count epochs
    site = tmp_path / "site"
    site.mkdir()
    site.joinpath("sitecustomize.py").write_text(
        Path(environment["PYTHONPATH"], "sitecustomize.py").read_text() + KILL.format(epochs=epoch))
    env = environment | {"PYTHONPATH": str(site), "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    out = good(run(*COMMANDS["train_resume.py"], "--epochs", EPOCHS, cwd=tmp_path, env=env, quiet=False)).out
    assert [line for line in out.splitlines() if line.startswith("epoch")] == lines[:epoch] + lines[epoch - 1:]
    assert same(load(tmp_path / "best.pt"), load(uninterrupted / "best.pt"))
    assert {path.name for path in tmp_path.iterdir()} == {"best.pt", "best.pt.last", "site"}


@pytest.fixture
def here(alone, monkeypatch, tmp_path, capsys):
    """Return a function that runs a script in this process, on one device: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def start(path, *options):
        monkeypatch.setattr(sys, "argv", [str(path), "--device", "cpu", *options])
        code = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return start


def test_bf16_trains_like_float32_where_float16_would_overflow(here, tmp_path):
    """Adam ignores the scale of the loss. With 2**20, gradients exceed 65504, the greatest number of float16."""
    code, out, _ = here(BASELINE, "--epochs", "2", "--output", "float32.pt")
    large = Path(shutil.copy(CHILD.format("amp"), tmp_path))
    replace_lines(large, {"loss.backward()": "(loss * 2**20).backward()"})
    assert (code, here(large, "--epochs", "2")[::2]) == (0, (0, ""))
    left, right = load(tmp_path / "float32.pt"), load(tmp_path / "best.pt")
    assert left["val_loss"] == pytest.approx(right["val_loss"], rel=0.02)
    assert all(tensor.dtype == torch.float32 for tensor in right["model"].values())
    assert 1e-4 < distance(tmp_path / "float32.pt", tmp_path / "best.pt") < 0.1  # float32 would differ by 1e-6


@pytest.mark.parametrize("path", [path for path in SCRIPTS[1:] if path.name != "train_amp.py"],
                         ids=lambda path: path.name)
def test_each_script_trains_the_same_model_as_one_process(here, tmp_path, path):
    """Here in float64; for train_amp.py, see above."""
    torch.set_default_dtype(torch.float64)
    try:
        one = here(BASELINE, "--epochs", "3", "--output", "one.pt")
        other = here(path, "--epochs", "3", *["--accum-steps", "5"] * ("accum" in path.name))
    finally:
        torch.set_default_dtype(torch.float32)
    assert one == other and one[1].count("epoch") == 3
    assert distance(tmp_path / "one.pt", tmp_path / "best.pt") < 1e-11


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_loss_that_is_nan_ends_the_run(here, tmp_path, path):
    code, out, err = here(path, "--lr", "1e30", "--epochs", "2")
    assert (code, out) == (1, "") and err == "error: val_loss is nan in epoch 1: lower --lr, or check the data\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", SCRIPTS[1:], ids=lambda path: path.name)
def test_a_batch_that_the_processes_cannot_share_evenly_is_refused(here, tmp_path, monkeypatch, path):
    for name, value in [("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")]:
        monkeypatch.setenv(name, value)
    assert here(path, "--batch-size", "49") == (2, "", "error: --batch-size 49: not a multiple of 2 processes\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_batch_larger_than_the_table_or_empty_is_refused(here, tmp_path, path):
    for batch_size in ("1001", "0"):
        assert here(path, "--batch-size", batch_size) == (
            2, "", f"error: --batch-size {batch_size}: the table has 1000 rows\n")
    assert list(tmp_path.iterdir()) == []


def test_all_scripts_are_short_and_need_only_torch():
    assert BATCH % 8 == 0  # machines with 8 GPUs
    for path in SCRIPTS:
        text = path.read_text()
        assert len(text.splitlines()) <= 152
        assert {*re.findall(r"^(?:import|from) (\w+)", text, re.M)} <= {"torch", "argparse", "contextlib", "math", "os"}
