"""minimal/: both scripts, as users launch them, train the same model, and measure, stop and save alike."""
import re
import runpy

import markers
import pytest
import torch
from conftest import LAUNCH, PYTHON, ROOT, TORCHRUN, good, load, run
from torch import nn

BASELINE, DDP = ROOT / "minimal/train.py", ROOT / "minimal/train_DDP.py"
COMMANDS = {"train.py": [PYTHON, BASELINE], "on 2": [*TORCHRUN, "--nproc-per-node=2", DDP],
            "on 3": [*LAUNCH, "--nproc_per_node=3", DDP], "on 1": [PYTHON, DDP]}
FEW = ["train.py", "on 2", pytest.param("on 3", marks=pytest.mark.drill)]
ROWS, VAL_ROWS, BATCH, PATIENCE, EPOCHS = 1000, 499, 60, 6, 100  # the defaults
EPOCH = re.compile(r"epoch +(\d+)  loss ([\d.]+)  val_loss ([\d.]+)  lr ([\d.e-]+)")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return an environment in which Python computes in float64, and in one thread."""
    folder = tmp_path_factory.mktemp("float64")
    (folder / "sitecustomize.py").write_text("import torch\ntorch.set_default_dtype(torch.float64)\n")
    return {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, environment):
    """Return a function that runs a command of COMMANDS once: name to (folder, its lines of epochs)."""
    done = {}

    def get(name):
        if name not in done:
            folder = tmp_path_factory.mktemp("minimal")
            out = good(run(*COMMANDS[name], cwd=folder, env=environment)).out
            done[name] = folder, [line for line in out.splitlines() if line.startswith("epoch")]
        return done[name]

    return get


def weights_differ(left, right):
    left, right = load(left)["model"], load(right)["model"]
    assert left.keys() == right.keys() and all(tensor.dtype == torch.float64 for tensor in left.values())
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.mark.parametrize("name", ["on 2", *(pytest.param(name, marks=pytest.mark.drill) for name in ("on 1", "on 3"))])
def test_any_number_of_processes_trains_the_same_model(trained, name):
    """Neither the batches nor the validation set fit evenly, and the last batch is incomplete."""
    assert ROWS % BATCH and VAL_ROWS % 2 and VAL_ROWS % 3 and VAL_ROWS % BATCH
    (baseline, lines), (folder, same_lines) = trained("train.py"), trained(name)
    assert weights_differ(baseline / "best.pt", folder / "best.pt") < 1e-11
    assert same_lines == lines  # one process prints; losses, learning rates and the last epoch are the same


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
    """The loss is that of the whole validation set at once, without a loader or a sampler."""
    folder, _ = trained(name)
    assert [path.name for path in folder.iterdir()] == ["best.pt"]
    state = torch.load(folder / "best.pt", weights_only=True)
    table = runpy.run_path(str(BASELINE))["Table"]
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1)).double()
    model.load_state_dict(state["model"])
    torch.set_default_dtype(torch.float64)
    try:
        rows = table(VAL_ROWS, seed=2)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        loss = ((model(rows.features) - rows.targets) ** 2).mean().item()
    assert state["val_loss"] == pytest.approx(loss, rel=1e-12)


def test_a_batch_that_the_processes_cannot_share_evenly_is_refused(tmp_path, environment):
    result = run(*COMMANDS["on 2"], "--batch-size", "61", cwd=tmp_path, env=environment)
    said = [line for line in result.err.splitlines() if "--batch-size" in line]
    assert result.code != 0 and 'train_DDP.py", line' not in result.err  # no traceback of the script
    assert set(said) == {"error: --batch-size 61: not a multiple of 2 processes"} and len(said) <= 2
    assert list(tmp_path.iterdir()) == []


def test_the_pair_is_short():
    for path in (BASELINE, DDP):
        _, _, body = path.read_text().split('"""', 2)
        assert sum(bool(markers.CODE.match(line)) for line in body.splitlines()) < 90
    assert len(BASELINE.read_text().splitlines()) < 90
    assert sum(block.changed for block in markers.compare(DDP)) <= 24
    assert not re.search(r"^(import|from) (?!torch|argparse|os)", BASELINE.read_text() + DDP.read_text(), re.M)
