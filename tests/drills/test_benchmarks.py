"""The benchmarks run in a copy of the repository, because figures from a busy machine must not be kept."""
import json
import re
import shutil
import signal
import subprocess
import time

import pytest
from conftest import PYTHON, ROOT, descendants, good, run
from live import alive

pytestmark = pytest.mark.long
COMPARE = [PYTHON, "-m", "benchmarks.compare", "--scripts", "train.py", "train_DP.py", "--rounds", "1", "--epochs", "1"]


@pytest.fixture
def copy(tmp_path):
    """Return a copy of the repository without results."""
    for name in ("psutil", "matplotlib"):  # here, so that the names of the tests are known without them
        pytest.importorskip(name, reason=f"no {name}: pip install -r requirements-bench.txt")
    for name in ("common", "benchmarks", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    (tmp_path / "benchmarks/results").mkdir()
    (tmp_path / "docs").mkdir()
    for path in [ROOT / "docs/speed.md", *ROOT.glob("train*.py")]:
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    return tmp_path


def only_result(copy, kind):
    """Return the content of the single results file that a benchmark wrote."""
    path, = (copy / "benchmarks/results").glob(f"{kind}-*.json")
    return json.loads(path.read_text())


def test_an_interrupted_comparison_goes_on_where_it_was(copy):
    process = subprocess.Popen(COMPARE, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = []
    while len(started) < 2 or not list((copy / "benchmarks/results").glob("compare-*.json")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
        started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    first = only_result(copy, "compare")["runs"]
    assert process.returncode == 0 and f"interrupted; {len(first)} runs are in" in out and "Traceback" not in err
    assert not any(alive(pid) for pid in started)

    good(run(*COMPARE, cwd=copy))
    content = only_result(copy, "compare")
    assert len(first) == 1 and content["runs"][:1] == first
    assert [(one["script"], one["seed"]) for one in content["runs"]] == [("train.py", 0), ("train_DP.py", 0)]
    for one in content["runs"]:
        assert 0.2 < one["accuracy"] <= 1 and one["images_per_second"] > 0
        assert 200 < one["peak_mib"] < 5000  # of the process, torch and all: no accelerator counts it here
    # on a CPU both scripts train alike: the plot and the table are of these runs
    shown = re.findall(r"^\| `(\S+)` \| .*? \| .*? \| (.*?) \|", (copy / "docs/speed.md").read_text(), re.M)
    assert dict(shown).keys() == {"train.py", "train_DP.py"} and len(set(dict(shown).values())) == 1
    assert (copy / "benchmarks/results/compare.png").stat().st_size > 10_000


def test_the_contenders_take_turns(copy):
    """Each contender trains in every round; a mistake gives one line."""
    good(run(PYTHON, "-m", "benchmarks.floor", "--rounds", "2", "--epochs", "1", "--processes", "1", "--scripts",
             "train_DDP.py", "--others", "Accelerate", "Fabric", cwd=copy))
    content = only_result(copy, "floor")
    assert list(content["table"]) == ["bare step", "Accelerate", "Fabric", "train_DDP.py"]
    for row in content["table"].values():
        assert len(row["turns"]) == 2 and min(row["turns"]) > 0 and row["start_up_seconds"] > 0
    ratios = content["ratios"]
    assert {"train_DDP.py / bare step", "train_DDP.py / Accelerate", "train_DDP.py / Fabric"} <= ratios.keys()
    result = run(PYTHON, "-m", "benchmarks.floor", "--dataset", "folder", "--data-path", "nowhere", cwd=copy)
    assert result.code == 2 and result.err.endswith("--data-path nowhere: no such folder\n")
    assert len(result.err.splitlines()) == 1


def test_a_step_is_taken_apart(copy):
    env = {"TORCHDYNAMO_DISABLE": "1"}  # torch.compile would take half of the time
    good(run(PYTHON, "-m", "benchmarks.step", "--rounds", "2", "--epochs", "3", cwd=copy, env=env))
    content = only_result(copy, "step")
    # by hand, for 28x28: three convolutions, three linear layers; twice as much backward, less the first layer's input
    layers = [28 * 28 * 25 * 16, 14 * 14 * 25 * 16 * 32, 7 * 7 * 25 * 32 * 32, 288 * 128, 128 * 64, 64 * 10]
    assert content["operations_per_image"] == 2 * (3 * sum(layers) - layers[0])
    assert {"as the scripts", "fused optimizer"} <= set(content["steps"])
    assert content["steps"]["as the scripts"]["times_as_fast"]["median"] == 1
    assert 0 < content["script"]["waits"]["median"] < 0.5 and content["matrix_rate"]["float32"]["lowest"] > 1e9
    assert 0 < content["arithmetic_share"]["median"] < 2
    result = run(PYTHON, "-m", "benchmarks.step", "--epochs", "1", cwd=copy)
    assert result.code == 2 and result.err.splitlines()[-1].endswith("so there must be a second")


def test_memory_counts_each_storage_once(copy):
    """On two processes, FSDP2 needs half of DDP's memory; DDP's gradients are its buckets, not a second copy."""
    good(run(PYTHON, "-m", "benchmarks.memory", "--model", "vit", "--processes", "2", "--scripts", "train_DDP.py",
             "train_FSDP.py", cwd=copy))
    ddp, fsdp = (one["ranks"] for one in only_result(copy, "memory")["runs"])
    for whole, shard in zip(ddp, fsdp, strict=True):
        size = whole["held"]["weights"]
        assert size == 4 * 204_938 and whole["held"]["optimizer"] == size
        assert (whole["held"]["buckets"], whole["held"]["gradients"]) == (size, 0)
        assert [shard["held"][name] for name in ("weights", "gradients", "optimizer")] == [size // 2] * 3
        assert all(sum(rank["peak"].values()) >= 3 * rank["held"]["weights"] for rank in (whole, shard))
        # each block is gathered and freed by itself: the whole model is in memory at no time
        assert sum(whole["peak"].values()) - sum(shard["peak"].values()) > whole["held"]["weights"]
