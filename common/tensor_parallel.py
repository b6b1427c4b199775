"""Tensor parallelism: its mesh, and a check of which layers can be split."""
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from . import shards
from .errors import UsageError

SPLIT = "only linear layers and embeddings can be split, not convolutions: train_FSDP.py shards all layers"

# For a module whose column-split layers share one input: backward() adds up the gradients that the layers compute for
# this input, and reduces the sum once
ONE_INPUT = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())


def tp_mesh(size: int | None, device: torch.device) -> dict[str, Any]:
    """Return the shape and the dimension names, ("data", "tensor"), of a mesh of tensor groups for init_device_mesh().

    A group has `size` processes (by default 2, or 1 if the world size is odd). Raises UsageError for uneven groups.
    """
    shards.reject_gloo(dist.get_backend(), device.type)
    size, groups = shards.divide("--tensor-parallel", size or 2 - dist.get_world_size() % 2)
    return {"mesh_shape": (groups, size), "mesh_dim_names": ("data", "tensor")}


def check_plan(model: nn.Module, plan: dict[str, Any], grid: DeviceMesh) -> dict[str, Any]:
    """Return the `plan`'s entries that match layers; raise UsageError if none does, or if `grid` cannot divide one."""
    size, found = grid["tensor"].size(), {}
    for name, module in model.named_modules():
        if hasattr(module, "experts") and not any(fnmatch(f"{name}.experts", pattern) for pattern in plan):
            raise UsageError(f"--model: {name} is a mixture of experts, which language/train_EP.py can split")
        heads = getattr(module, "heads", 0)
        if isinstance(heads, int) and heads % size:
            raise UsageError(f"--tensor-parallel {size}: does not divide the {heads} heads of {name}")
        for pattern in (pattern for pattern in plan if fnmatch(name, pattern)):
            found[pattern] = plan[pattern]
            if not isinstance(plan[pattern], (ColwiseParallel, RowwiseParallel)):
                continue
            if not isinstance(module, (nn.Linear, nn.Embedding)):
                raise UsageError(f"--model: {name} is a {type(module).__name__}, which cannot be split; {SPLIT}")
            split = module.weight.shape[0 if isinstance(plan[pattern], ColwiseParallel) else 1]
            if split % size:
                raise UsageError(f"--tensor-parallel {size}: does not divide the width of {name}, {split}")
    if not found:
        raise UsageError(f"--model: its layers are in no tensor plan; add them at '# new # TP: yours'; {SPLIT}")
    return found


@torch.no_grad()
def equalize(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """In each tensor group, copy the unsplit weights and optimizer state from the first process to the others.

    A device may sum in a different order each time. `mesh` is `grid["tensor"]`. All processes must call this.
    """
    name, = mesh.mesh_dim_names or ("",)
    values: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    for value in [*model.parameters(), *values]:
        if not isinstance(value, DTensor) or value.is_meta:  # unsplit, or on another stage
            continue
        if value.device_mesh.size() == dist.get_world_size() and all(place.is_shard() for place in value.placements):
            continue  # each process has a different part
        places = dict(zip(value.device_mesh.mesh_dim_names or (), value.placements))
        if name not in places or places[name].is_replicate():
            dist.broadcast(value.to_local(), group=mesh.get_group(), group_src=0)
