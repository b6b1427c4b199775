"""docs/scaling.md has the results of benchmarks/scaling, and 1,024 ranks divide the work of one process."""
import json
import os
import re

import pytest
from conftest import PYTHON, TORCHRUN, copy_out, distance, epochs, good, run

from benchmarks.scaling import meshes
from benchmarks.scaling.page import PAGE
from benchmarks.tables import RESULTS

ranks = pytest.importorskip("benchmarks.scaling.ranks", reason="no psutil: pip install -r requirements-bench.txt",
                            exc_type=ModuleNotFoundError)

pytestmark = pytest.mark.long
RESULT = json.loads((RESULTS / "scaling.json").read_text())


@pytest.fixture(scope="module")
def world():
    """Let a new process act as some of 1,024 ranks; return what each of them read, sent and kept."""
    return json.loads(good(run(PYTHON, "-m", "benchmarks.scaling.ranks")).out)


def test_the_ranks_of_1024_read_what_one_process_reads(world):
    assert [one["rank"] for one in world["ranks"]] == [0, 1, 511, 1023]
    assert ranks.check(world) == RESULT["world"]  # all 1,024, batch by batch


def test_a_share_that_came_twice_would_be_noticed(world):
    for key in ("train", "val"):
        broken = [{**one, key: world["ranks"][0][key]} for one in world["ranks"]]
        with pytest.raises(AssertionError):
            ranks.check({**world, "ranks": broken})


def test_batches_that_do_not_fit_1024_ranks_are_refused(world):
    assert world["refused"] == ["--batch-size 8200: not a multiple of the 1024 processes that share it",
                                "--batch-size 65536: there are only 50000 samples"]


def test_memory_is_twelve_bytes_a_parameter(world):
    """They are weights, momentum, and gradients, which are views into DDP's buckets."""
    size = RESULT["inputs"]["models"]["CNN"]["parameters"]
    assert size == 120_100
    kept = RESULT["world"]["bytes"]  # of each rank: test above
    assert kept["weights"] == kept["gradients"] == kept["momentum"] == kept["buckets"] == 4 * size
    assert kept["together"] == 12 * size == RESULT["tables"]["memory"]["CNN"]["ddp_sgd"]
    assert RESULT["world"]["buckets"] == [4 * size]  # one bucket: nothing travels during the backward pass
    even = RESULT["inputs"]["models"]["1B transformer"]["parameters"] / 1024
    assert 0.8 * even < world["shards"]["1023"] < even < world["shards"]["0"] < 1.1 * even


def test_a_rank_of_a_mesh_holds_sends_and_saves_what_is_predicted():
    """The mesh has 128 shards x 8 tensor ranks. Only norms, some biases and padding are not split evenly."""
    found = json.loads(good(run(PYTHON, "-m", "benchmarks.scaling.placement")).out)
    assert found == RESULT["placed"]
    assert found["held"] == pytest.approx(16 * found["parameters"] / 1024, rel=0.02)
    assert found["saved"] == pytest.approx(meshes.saved(meshes.CHECKED, found["tensor"]), rel=0.001)
    assert found["block"] == {"all_reduce": sum(meshes.SUMS), "allgather_base": 2, "reduce_scatter_base": 1}


def test_the_command_for_a_model_of_ones_own():
    out = good(run(PYTHON, "-m", "benchmarks.scaling", "--parameters", "25.6e6", "--step", "0.12")).out
    rows = [re.findall(r"\d+(?=%)", line) for line in out.splitlines()[2:]]
    assert len(rows) == 3 and all(row[0] == "100" and sorted(row, key=int, reverse=True) == row for row in rows)


def test_the_two_lines_of_the_page_switch_bf16_gradients_on(tmp_path):
    block = re.search(r"```python\n(from .*)\n(    parallel_model.*)\n```", PAGE.read_text())
    accuracies = []
    for name, lines in (("plain", ("", "")), ("hook", block.groups())):
        script = copy_out("train_DDP.py", tmp_path / name)
        source = script.read_text()
        for place, line in zip((r"from torch\.nn\.parallel import .*\n", r"    parallel_model = [^)]*\)\n"), lines):
            source, count = re.subn(place, lambda match, line=line: f"{match[0]}{line}\n", source)
            assert count == 1
        script.write_text(source)
        out = good(run(*TORCHRUN, "--nproc-per-node=2", script, "--epochs", "3", "--workers", "0",
                       cwd=script.parent, env={"CUDA_VISIBLE_DEVICES": ""})).out
        accuracies.append(epochs(out)[-1]["accuracy"])
    assert 0 < distance(tmp_path / "plain/runs/last.pt", tmp_path / "hook/runs/last.pt") < 0.2
    assert abs(accuracies[0] - accuracies[1]) < 0.05 and os.path.exists(tmp_path / "hook/runs/best.pt")
