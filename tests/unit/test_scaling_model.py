"""docs/scaling.md says what benchmarks/scaling/model.py computes, and the model is right where the answer is known."""
import json

import pytest

from benchmarks.scaling import model as scaling
from benchmarks.scaling import page
from benchmarks.tables import RESULTS

RESULT = json.loads((RESULTS / "scaling.json").read_text())


def test_the_page_and_the_tables_follow_from_the_inputs():
    assert scaling.compute(RESULT["inputs"]["models"]) == RESULT["tables"]
    text = page.PAGE.read_text()
    assert [part.split(page.MARKS[1])[0] for part in text.split(page.MARKS[0])[1:]] == page.render(RESULT)
    assert len(text.splitlines()) < 150 and (RESULTS / "scaling.png").stat().st_size < 100_000


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
