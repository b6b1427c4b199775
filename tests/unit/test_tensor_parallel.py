"""Plans and meshes on two simulated ranks, in torch's fake group, which completes every collective at once."""
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import train_TP
from common import clipping, models, tensor_parallel
from common.errors import UsageError
from language import context, gpt, sequence, stages
from language import train_TP as language_TP


@pytest.fixture
def grid():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", **tensor_parallel.tp_mesh(2, torch.device("cpu")))
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
    model.heads = 3
    with pytest.raises(UsageError, match="^--tensor-parallel 2: does not divide the 3 heads of "):
        tensor_parallel.check_plan(model, {}, grid)


@pytest.fixture
def parts(grid):
    """Return parameters that every process of a tensor group has, alone or as shards over "data", and a split one."""
    both = (grid, [Shard(0), Replicate()]), (grid["data"], [Shard(0)]), (grid, [Shard(0), Shard(1)])
    return torch.nn.ParameterList([DTensor.from_local(torch.ones(2, 2), *each) for each in both])


def test_copies_come_from_the_first_process_of_a_tensor_group_with_their_states(grid, parts):
    optimizer = torch.optim.SGD(parts, 0.1, momentum=0.9)
    for parameter in parts:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with CommDebugMode() as counted:
        tensor_parallel.equalize(parts, optimizer, grid["tensor"])
    assert counted.get_total_counts() == 2 * 2


def test_the_norm_of_gradients_is_summed_over_the_processes_that_have_other_shards(grid, parts):
    sums = []
    for pipeline in (None, dist.group.WORLD):
        for parameter in parts:
            parameter.grad = torch.ones_like(parameter)
            with CommDebugMode() as counted:
                clipping.clip_grad_norm([parameter], 1.0, pipeline)
            sums.append(counted.get_total_counts())
    assert sums == [1, 1, 2, 2, 2, 3]


def test_a_plan_without_experts_names_the_script_that_has_one(grid):
    model = gpt.GPT(gpt.SIZES["moe_tiny"], 256)
    with pytest.raises(UsageError, match="layers.0.mlp is a mixture of experts, which language/train_EP.py can split"):
        tensor_parallel.check_plan(model, language_TP.PLAN, grid)


def test_a_frozen_layer_that_divides_the_tokens_stays_frozen(grid):
    model = gpt.GPT(gpt.SIZES["gpt_tiny"], 256)
    models.freeze_layers(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parallelize_module(model, grid["tensor"], tensor_parallel.check_plan(model, language_TP.PLAN, grid))
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_each_matrix_of_the_language_model_is_split(grid):
    model = gpt.GPT(gpt.SIZES["gpt_tiny"]._replace(tied=False), 256)
    parallelize_module(model, grid["tensor"], tensor_parallel.check_plan(model, language_TP.PLAN, grid))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    assert len(matrices) > 9 and all(matrix.placements[0].is_shard() for matrix in matrices)


def test_a_loss_is_summed_over_the_parts_of_the_vocabulary(grid):
    outputs, targets = DTensor.from_local(torch.ones(2, 3, 4), grid["tensor"], [Shard(2)]), torch.ones(2, 3)
    with CommDebugMode() as counted:
        loss = sequence.whole(lambda outputs, targets: outputs.sum())(outputs, targets)
    assert not isinstance(loss, DTensor) and counted.get_total_counts() == 1


@pytest.mark.parametrize("plan", [{"down.linear": ColwiseParallel()}, {"down.conv": ColwiseParallel()}])
def test_that_convolutions_cannot_be_split_is_said(grid, plan):
    """torch would raise NotImplementedError."""
    model = torch.nn.ModuleDict({"down": torch.nn.ModuleDict({"conv": torch.nn.Conv2d(2, 2, 1)})})
    with pytest.raises(UsageError, match="^--model: .*, not convolutions: train_FSDP.py"):
        tensor_parallel.check_plan(model, plan, grid)


@pytest.mark.parametrize(("stages_", "tensor", "context_", "length", "message"), [
    (3, 1, 1, 8, "^--pipeline-parallel 3: does not divide the 2 processes"),
    (2, 2, 1, 8, "^--tensor-parallel 2: does not divide the 1 processes of a pipeline stage"),
    (1, 1, 4, 8, "^--context-parallel 4: does not divide the 2 processes"),
    (1, 1, 2, 6, "^--length 6: not a multiple of 4"), (1, 2, None, 7, "^--length 7: not a multiple of 4")])
def test_a_mesh_that_does_not_fit_is_explained(grid, stages_, tensor, context_, length, message):
    with pytest.raises(UsageError, match=message):
        arguments = stages.pp_mesh(stages_, tensor, torch.device("cpu"))
        context.divide(init_device_mesh("cpu", **arguments), context_, length)


def test_every_block_is_in_one_stage(grid):
    model = gpt.GPT(gpt.Size(16, 5, 4, 2, 24), 64)
    for count in range(1, 6):
        parts = stages.cut(model, count, 5)
        assert [block for part in parts for block in part.blocks] == [*model.model.layers]
        assert all(len(part.blocks) for part in parts)
        assert [part.embed_tokens is not None for part in parts] == [True] + [False] * (count - 1)
        assert [part.last for part in parts] == [False] * (count - 1) + [True]
    with pytest.raises(UsageError, match="^6 pipeline stages: the model has only 5 blocks"):
        stages.cut(model, 6, 2)
    with pytest.raises(UsageError, match="^--chunks 2: a pipeline of one process has one stage"):
        stages.cut(model, 2, 1)


def test_a_sequence_has_two_processes_by_default(grid):
    cube = init_device_mesh("cpu", **stages.pp_mesh(1, 1, torch.device("cpu")))
    assert context.divide(cube, None, 8) == {"mesh_shape": (1, 1, 2, 1),
                                             "mesh_dim_names": ("pipeline", "data", "context", "tensor")}


def test_only_the_last_stage_has_a_copy_of_the_embedding(grid):
    """This is rank 0, the first stage: its weight is the original, which counts in the norm of the gradients."""
    assert stages.tied(gpt.GPT(gpt.SIZES["gpt_tiny"], 256), dist.group.WORLD) == []


def test_two_processes_have_the_peak_of_two_devices(grid):
    assert gpt.find_peak("NVIDIA A100-SXM4-80GB") == 2 * 312e12
