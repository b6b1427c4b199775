"""docs/scaling.md has the results of benchmarks/scaling/model.py, which is correct where the answer is known."""
import re
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet50

from benchmarks.scaling import __main__ as page
from benchmarks.scaling import meshes
from benchmarks.scaling import model as scaling
from common import models


def test_the_page_follows_from_the_model():
    text = page.PAGE.read_text()
    assert [part.split(page.MARKS[1])[0] for part in text.split(page.MARKS[0])[1:]] == page.render()


def test_parameters_and_operations_are_counted():
    with torch.device("meta"):
        body = [nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, norm_first=True) for _ in range(18)]
        units = nn.Embedding(50304, 2048), nn.Embedding(2048, 2048), nn.LayerNorm(2048), *body  # GPT-2's shape
        nets = {"CNN": models.create_model("cnn", 10, (1, 28, 28)), "ResNet-50": resnet50(),
                "1B transformer": nn.ModuleList(units)}
        with FlopCounterMode(display=False) as counter:
            nets["ResNet-50"](torch.zeros(2, 3, 224, 224)).sum().backward()
    for name, net in nets.items():
        assert sum(weight.numel() for weight in net.parameters()) == scaling.MODELS[name]["parameters"]
    assert scaling.MODELS["1B transformer"]["units"] == len(units)
    assert counter.get_total_flops() / 2 == pytest.approx(scaling.RESNET_FLOP, rel=1e-3)


def test_the_model_where_its_answer_is_known():
    link = {"bandwidth": 1e9, "latency": 0}
    small = {"parameters": 250_000, "step_seconds": 1, "on_gpus": False}
    hop = 2 * scaling.TCP_LATENCY  # of two members: 1 MB each way and two hops, behind a step of a second
    assert scaling.step_time(small, 2, link) == pytest.approx(1 + 1e-3 + hop)
    assert scaling.step_time(small, 2, link, micro_batches=4) == pytest.approx(4 + 1e-3 + hop)
    assert scaling.step_time(small, 2, link, compress=2) == pytest.approx(1 + 0.5e-3 + hop)
    large = {"parameters": 1e9, "step_seconds": 1e-6, "on_gpus": False}  # computes nothing: all is sending
    assert scaling.step_time(large, 2, link) == pytest.approx(4 + 153 * hop, rel=1e-5)  # 153 buckets of 25 MiB
    for model in scaling.MODELS.values():
        for link in scaling.LINKS.values():
            for count in (8, 64, 1024):
                seconds = scaling.shortest_step(model, count, link)
                assert scaling.efficiency({**model, "step_seconds": seconds}, count, link) == pytest.approx(0.9)
    sharded = {"parameters": 1e12, "step_seconds": 1e-9, "on_gpus": True, "units": 100}
    ratio = scaling.sharded_step_time(sharded, 8, link) / scaling.all_reduce(8, 4e12, link)
    assert ratio == pytest.approx(1.5, rel=0.01)


def test_the_meshes_where_the_answer_is_known():
    for name, vocabulary in (("7B", 32_000), ("70B", 32_000)):  # Llama 2's weights, one by one
        shape = meshes.MODELS[name]
        width, keys, hidden = shape["width"], shape["keys"], shape["hidden"]
        block = 2 * width * width + 2 * width * keys + 3 * width * hidden + 2 * width
        assert shape["layers"] * block + 2 * vocabulary * width + width == shape["parameters"]
    assert meshes.MODELS["1B"]["parameters"] == scaling.MODELS["1B transformer"]["parameters"]
    assert meshes.bubble(4, 12) == 0.2 and meshes.bubble(1, 8) == 0
    plain = meshes.MODELS["1B"]  # an MLP without a gate
    assert meshes.saved(plain, 1) == 32 * 2048 and meshes.saved(plain, 8) == 11 * 2048
    # two groups of four share a host's link: each waits for the bytes of both
    link = {"bandwidth": 1e9, "latency": 0}
    assert scaling.all_reduce(32, 1e9, link, trees=False, groups=2) == pytest.approx(
        2 * 3 / 4 / 450 + 2 * 3 * 3.4e-6 + 2 * 7 / 8 * 2)


def test_the_command_for_a_model_of_ones_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling", "--parameters", "25.6e6", "--step", "0.12"])
    page.main()
    rows = [re.findall(r"\d+(?=%)", line) for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 3 and all(row[0] == "100" and sorted(row, key=int, reverse=True) == row for row in rows)
