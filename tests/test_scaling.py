"""docs/scaling.md says what benchmarks/scaling.py finds, and 1,024 ranks divide the work as one process has it."""
import json
import os
import re
import sys

import pytest
from conftest import PYTHON, ROOT, TORCHRUN, copy_out, distance, epochs, good, run

sys.path.insert(0, str(ROOT))
from benchmarks import scaling  # noqa: E402

pytestmark = pytest.mark.drill
RESULT = json.loads(scaling.RESULT.read_text())


@pytest.fixture(scope="module")
def world():
    """Let a fresh process be some of 1,024 ranks, and return what each of them read, sent and kept."""
    env = {"OMP_NUM_THREADS": "1"}  # more threads are slower for work this small, and the tests have neighbours
    return json.loads(good(run(PYTHON, "benchmarks/scaling.py", "--simulate", env=env)).out)


def test_the_ranks_of_1024_read_what_one_process_reads(world):
    import torch
    from torch.utils.data import RandomSampler

    torch.set_num_threads(1)
    order = list(RandomSampler(range(50_000), generator=torch.Generator().manual_seed(1)))
    assert [one["rank"] for one in world["ranks"]] == [0, 1, 511, 1023]
    for one in world["ranks"]:
        assert one["train"] == order[one["rank"]:48 * 1024:1024]  # not by DistributedSampler's own arithmetic
        assert one["share"] == 8 and one["steps"] == 6
    assert scaling.check_world(world) == RESULT["world"]  # all 1,024, batch by batch


def test_a_share_that_came_twice_would_be_noticed(world):
    for key in ("train", "val"):
        broken = [{**one, key: world["ranks"][0][key]} for one in world["ranks"]]
        with pytest.raises(AssertionError):
            scaling.check_world({**world, "ranks": broken})


def test_batches_that_do_not_fit_1024_ranks_are_refused(world):
    assert world["refused"] == ["--batch-size 8200: not a multiple of the 1024 processes that share it",
                                "--batch-size 65536: there are only 50000 samples"]


def test_memory_is_sixteen_bytes_a_parameter(world):
    """Weights, gradients, momentum, and DDP's buckets, a second copy of the gradients."""
    size = RESULT["inputs"]["models"]["CNN"]["parameters"]
    assert size == 120_100
    for one in world["ranks"]:
        kept = one["bytes"]
        assert kept["weights"] == kept["gradients"] == kept["momentum"] == kept["buckets"] == 4 * size
        assert kept["together"] == 16 * size == RESULT["tables"]["memory"]["CNN"]["ddp_sgd"]
        assert one["buckets"] == [4 * size]  # one bucket: nothing of it travels during the backward pass
    even = RESULT["inputs"]["models"]["1B transformer"]["parameters"] / 1024
    assert 0.8 * even < world["shards"]["1023"] < even < world["shards"]["0"] < 1.1 * even


def test_the_page_and_the_tables_follow_from_the_inputs():
    assert scaling.compute(RESULT["inputs"]) == RESULT["tables"]
    page = scaling.PAGE.read_text()
    assert scaling.fill(page, scaling.render(RESULT)) == page
    assert len(page.splitlines()) < 150 and scaling.RESULT.with_suffix(".png").stat().st_size < 100_000


def test_the_model_where_its_answer_is_known():
    link = {"bandwidth": 1e9, "latency": 0}
    small = {"parameters": 250_000, "step_seconds": 1, "on_gpus": False}
    hop = 2 * scaling.TCP_LATENCY  # of two members: 1 MB each way and two hops, behind a step of a second
    assert scaling.step_time(small, 2, link) == pytest.approx(1 + 1e-3 + hop)
    assert scaling.step_time(small, 2, link, micro_batches=4) == pytest.approx(4 + 1e-3 + hop)
    assert scaling.step_time(small, 2, link, compress=2) == pytest.approx(1 + 0.5e-3 + hop)
    large = {"parameters": 1e9, "step_seconds": 1e-6, "on_gpus": False}  # computes nothing: all is sending
    assert scaling.step_time(large, 2, link) == pytest.approx(4 + 153 * hop, rel=1e-5)  # 153 buckets of 25 MiB
    for model in RESULT["inputs"]["models"].values():
        for link in scaling.LINKS.values():
            for count in (8, 64, 1024):
                seconds = scaling.shortest_step(model, count, link)
                assert scaling.efficiency({**model, "step_seconds": seconds}, count, link) == pytest.approx(0.9)
    sharded = {"parameters": 1e12, "step_seconds": 1e-9, "on_gpus": True, "units": 100}
    ratio = scaling.sharded_step_time(sharded, 8, link) / scaling.all_reduce(8, 4e12, link)
    assert ratio == pytest.approx(1.5, rel=0.01)


def test_the_command_for_a_model_of_ones_own():
    out = good(run(PYTHON, "benchmarks/scaling.py", "--parameters", "25.6e6", "--step", "0.12")).out
    rows = [re.findall(r"\d+(?=%)", line) for line in out.splitlines()[2:]]
    assert len(rows) == 3 and all(row[0] == "100" and sorted(row, key=int, reverse=True) == row for row in rows)


def test_the_two_lines_of_the_page_switch_bf16_gradients_on(tmp_path):
    block = re.search(r"```python\n(from .*)\n(    parallel_model.*)\n```", scaling.PAGE.read_text())
    accuracies = []
    for name, lines in (("plain", ("", "")), ("hook", block.groups())):
        script = copy_out("train_DDP.py", tmp_path / name)
        source = script.read_text()
        for place, line in zip((r"from torch\.nn\.parallel import .*\n", r"    parallel_model = .*\n"), lines):
            source, count = re.subn(place, lambda match, line=line: f"{match[0]}{line}\n", source)
            assert count == 1
        script.write_text(source)
        out = good(run(*TORCHRUN, "--nproc-per-node=2", script, "--epochs", "3", "--workers", "0",
                       cwd=script.parent, env={"CUDA_VISIBLE_DEVICES": ""})).out
        accuracies.append(epochs(out)[-1]["accuracy"])
    assert 0 < distance(tmp_path / "plain/runs/last.pt", tmp_path / "hook/runs/last.pt") < 0.2
    assert abs(accuracies[0] - accuracies[1]) < 0.05 and os.path.exists(tmp_path / "hook/runs/best.pt")
