"""The benchmarks run in a copy of the repository, because figures from a busy machine must not be kept."""
import json
import re
import shutil

import pytest
from conftest import PYTHON, ROOT, good, run

pytestmark = pytest.mark.long
COMPARE = [PYTHON, "-m", "benchmarks.compare", "--scripts", "train.py", "train_DP.py", "--rounds", "1", "--epochs", "1"]


@pytest.fixture
def copy(tmp_path):
    """Return a copy of the repository that has no results yet."""
    pytest.importorskip("psutil", reason="no psutil: pip install -r requirements/bench.txt")
    for name in ("common", "benchmarks", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    (tmp_path / "benchmarks/results").mkdir()
    (tmp_path / "docs").mkdir()
    for path in [ROOT / "docs/speed.md", ROOT / "docs/scaling.md", *ROOT.glob("train*.py"), *ROOT.glob("loader*.py")]:
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    return tmp_path


def only_result(copy, kind):
    """Return the content of the single results file that a benchmark wrote."""
    path, = (copy / "benchmarks/results").glob(f"{kind}-*.json")
    return json.loads(path.read_text())


def test_scripts_are_compared(copy):
    good(run(*COMPARE, cwd=copy))
    content = only_result(copy, "compare")
    assert [(one["script"], one["seed"]) for one in content["runs"]] == [("train.py", 0), ("train_DP.py", 0)]
    for one in content["runs"]:
        assert 0.2 < one["accuracy"] <= 1 and one["images_per_second"] > 0
        assert 200 < one["peak_mib"] < 5000  # of the process, torch and all: no accelerator counts it here
    # on a CPU both scripts train alike: the table is of these runs
    shown = re.findall(r"^\| `(\S+)` \| .*? \| .*? \| (.*?) \|", (copy / "docs/speed.md").read_text(), re.M)
    assert dict(shown).keys() == {"train.py", "train_DP.py"} and len(set(dict(shown).values())) == 1


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


def test_the_loaders_take_turns_and_end_within_their_time(copy):
    """A task that outlasts its share ends with all its processes; `run` looks for those that are left."""
    loaders = [PYTHON, "-m", "benchmarks.loaders", "--device", "cpu"]
    result = run(*loaders, "--minutes", "0.2", cwd=copy, seconds=60)
    assert result.code == 1 and len(re.findall(r"stopped after \d s and 0 rounds", result.out)) == 3
    assert result.err == "--minutes 0.2: no round was completed; nothing is saved\n"
    assert not [*(copy / "benchmarks/results").iterdir()]
    good(run(*loaders, "--pairs", "24", "--rounds", "2", "--minutes", "4", cwd=copy))
    content = json.loads((copy / "benchmarks/results/loaders.json").read_text())
    found = [(one["task"], one["round"], one["contender"]) for one in content["runs"]]
    assert len(found) == len(set(found)) and len(found) % 6 == 0  # three tasks, two rounds
    assert min(one["pairs"] for one in content["runs"]) > 0
