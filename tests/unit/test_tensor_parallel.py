"""train_TP.py's plan on two simulated ranks, in torch's fake group, which completes every collective at once."""
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import train_TP
from common import models, tensor_parallel
from common.errors import UsageError


@pytest.fixture
def grid():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", **tensor_parallel.grid(2, torch.device("cpu")))
    dist.destroy_process_group()


def test_a_block_needs_two_sums_in_forward_and_two_in_backward(grid):
    """The gradients of queries, keys and values are added before the all-reduce; each block counts."""
    model = models.create_model("vit", 10, (1, 28, 28))
    parallelize_module(model, grid["tensor"], tensor_parallel.check_plan(model, train_TP.PLAN, grid))
    with CommDebugMode() as counted:
        outputs = model(torch.rand(2, 1, 28, 28))
    assert counted.get_total_counts() == 2 * len(model.blocks)
    with CommDebugMode() as counted:
        outputs.sum().backward()
    assert counted.get_total_counts() == 2 * len(model.blocks)


def test_a_layer_that_cannot_be_split_evenly_is_named(grid):
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(2, 3)})
    with pytest.raises(UsageError, match="does not divide the width of up, 3"):
        tensor_parallel.check_plan(model, {"up": ColwiseParallel()}, grid)


@pytest.mark.parametrize("plan", [{"down.linear": ColwiseParallel()}, {"down.conv": ColwiseParallel()}])
def test_that_convolutions_cannot_be_split_is_said(grid, plan):
    """torch would raise NotImplementedError."""
    model = torch.nn.ModuleDict({"down": torch.nn.ModuleDict({"conv": torch.nn.Conv2d(2, 2, 1)})})
    with pytest.raises(UsageError, match="^--model: .*, not convolutions: train_FSDP.py"):
        tensor_parallel.check_plan(model, plan, grid)
