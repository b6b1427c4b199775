"""Tensors that this process does not hold whole: gather them for a file, take the own part of one, fill a model.

Such a tensor is a DTensor, of which each process holds a shard (FSDP2, tensor parallelism), or it is on the meta
device, without data, because another process holds it (pipelines).
"""
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from .errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_sharded(value: Any) -> "TypeGuard[DTensor]":
    """Return whether `value` is a DTensor, without importing the class: that takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def gather(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content`, a nested dict, with whole tensors on the CPU: in rank 0; to the others, an empty dict.

    If this process holds only parts, all processes must call this. The tensors travel one at a time: a device holds at
    most one of them whole, and rank 0's host memory holds all. Without such tensors, the result is `content` itself.
    """
    mine = dict(flatten(content))
    if not any(is_sharded(value) or isinstance(value, Tensor) and value.is_meta for value in mine.values()):
        return content
    mine = {path: value for path, value in mine.items() if not (isinstance(value, Tensor) and value.is_meta)}
    held: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(held, {path: _outline(value) for path, value in mine.items()})
    whole = {}
    for path in dict.fromkeys(path for paths in held for path in paths):
        owner = next(rank for rank, paths in enumerate(held) if path in paths)
        value = _fetch(mine.get(path), owner, held[owner][path])
        if dist.get_rank() == 0:
            whole[path] = value
    return nest(whole)


def flatten(content: Mapping, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Yield (keys, value) for each value in nested dicts; an empty dict is a value."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value


def nest(flat: Mapping[tuple, Any]) -> dict[str, Any]:
    """Return the nested dict that flatten() took apart."""
    result: dict = {}
    for path, value in flat.items():
        place = result
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return result


def _outline(value: Any) -> Any:
    """Return a tensor's shape and type, as a tensor without data, or else the value."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _fetch(value: Any, owner: int, outline: Any) -> Any:
    """Return the whole tensor to rank 0, from all shards or from the rank that owns it; all ranks must call this."""
    if is_sharded(value):
        from torch.distributed.tensor import Replicate

        placements = list(value.placements)
        for dim in range(len(placements)):  # one dimension at a time: torch warns that it can't merge all of them
            placements[dim] = Replicate()
            value = value.redistribute(placements=placements)
        return value.to_local().cpu() if dist.get_rank() == 0 else None
    if not isinstance(outline, Tensor) or owner == 0:
        return value.cpu() if isinstance(value, Tensor) else outline
    device = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    if dist.get_rank() == owner:
        dist.send(value.to(device).contiguous(), 0)
    if dist.get_rank() == 0:
        value = torch.empty_like(outline, device=device)
        dist.recv(value, owner)
    return value.cpu() if isinstance(value, Tensor) else None


def take(part: Any, saved: Any) -> Any:
    """Return the state `saved` of a model or an optimizer with only what this process's `part` of it holds.

    Every tensor is a copy: `saved` may be a file that is mapped into memory.
    """
    if isinstance(part, nn.Module):
        own = part.state_dict()
        return {name: _share(tensor, own.get(name)) for name, tensor in saved.items()}
    if isinstance(part, torch.optim.Optimizer):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        if len(parameters) > max(saved["state"], default=-1):
            state = {index: {name: _share(value, parameters[index]) for name, value in values.items()}
                     for index, values in saved["state"].items() if not parameters[index].is_meta}
            return copied({**saved, "state": {}}) | {"state": state}
    return copied(saved)


def _share(value: Any, like: Any) -> Any:
    """Return a copy of what this process holds of a whole tensor `value` that is spread as `like` is."""
    if is_sharded(value):
        return value
    if not isinstance(value, Tensor) or not isinstance(like, Tensor) or value.shape != like.shape:
        return copied(value)
    if like.is_meta:
        return torch.empty_like(value, device="meta")
    if not is_sharded(like):
        return copied(value)
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: each process has the whole tensor and cuts its shard out, without communication
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None).clone()


def copied(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tensors, on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    return type(value)(map(copied, value)) if isinstance(value, (list, tuple)) else value


def detach_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Move a model's parameters and buffers to the meta device and return those that it had: {name: tensor}."""
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    model.to("meta")
    return tensors


def split_batch(batch_size: int, micro_batches: int | None, processes: int, chunks: int) -> int:
    """Return the number of micro-batches of a pipeline with `chunks` stages per process; by default, two per stage.

    One stage per process gets a power of two, which divides most batches. Raises UsageError if the micro-batches do
    not divide the batch evenly, or do not suit the schedule.
    """
    number = micro_batches or (2 * processes * chunks if chunks > 1 else 2 ** math.ceil(math.log2(2 * processes)))
    if batch_size % number:
        raise UsageError(f"--batch-size {batch_size}: not a multiple of the {number} micro-batches of --micro-batches")
    if chunks == 1 and number < processes:
        raise UsageError(f"--micro-batches {number}: fewer than the {processes} pipeline stages, which would wait")
    if chunks > 1 and number % processes:
        raise UsageError(f"--micro-batches {number}: not a multiple of the {processes} processes of interleaved stages")
    return number


def check_plan(model: nn.Module, plan: dict[str, Any], grid: "DeviceMesh") -> dict[str, Any]:
    """Return the part of a tensor plan that names layers of `model`, to split over the "tensor" side of a mesh.

    Raises UsageError if there is none, if a planned layer or the heads of an attention do not divide evenly, or if this
    torch saves the wrong momentum: 2.9.1 does, for several groups, whose shards are strided; 2.14.1 does not.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel

    size, found = grid["tensor"].size(), {}
    if 1 < size < grid.size() and TorchVersion(torch.__version__) < "2.14":
        raise UsageError(f"--tensor-parallel {size}: several groups need torch 2.14 or newer; this is "
                         f"{torch.__version__}, which could save the momentum in the wrong order")
    for name, module in model.named_modules():
        if getattr(module, "heads", 0) % size:
            raise UsageError(f"--tensor-parallel {size}: does not divide the {module.heads} heads of {name}")
        for pattern in (pattern for pattern in plan if fnmatch(name, pattern)):
            found[pattern] = plan[pattern]
            split = module.weight.shape[0 if isinstance(plan[pattern], ColwiseParallel) else 1]
            if split % size:
                raise UsageError(f"--tensor-parallel {size}: does not divide the width of {name}, {split}")
    if not found:
        raise UsageError("--model: its layers are in no tensor plan; add them at '# new # TP: yours'")
    return found


@torch.no_grad()
def fill(model: nn.Module, tensors: dict[str, Tensor], device: torch.device,
         held: Sequence[nn.Module] | None = None) -> None:
    """Move a model from the meta device to `device`, with rank 0's `tensors` in it, or the shards of them.

    With `held`, only these parts of the model move. All processes must call this. The tensors travel one at a time, and
    leave `tensors`, which frees them. Buffers that a `state_dict` omits are filled, too.
    """
    for part in [model] if held is None else held:
        part.to_empty(device=device)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        whole = tensors.pop(name).to(device) if dist.get_rank() == 0 else torch.empty(
            tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(whole, 0)
        if not tensor.is_meta:
            tensor.copy_(_share(whole, tensor) if is_sharded(tensor) else whole)


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Scale the gradients of all `parameters` down to the norm `max_norm`, if theirs is greater; return theirs.

    The norm is that of the whole gradients. torch's clip_grad_norm_ rejects parameters on different meshes, and in
    torch 2.9 returns the norm of one shard. With `group`, whose processes have different parameters (the stages of a
    pipeline), the norm is over those of all. All processes must call this.
    """
    held = [parameter for parameter in parameters if not parameter.is_meta]
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    squares: dict[tuple, Tensor] = {}  # by the groups over which the shards add up
    local = []
    for gradient in gradients:
        groups: tuple = ()
        if is_sharded(gradient):
            mesh, placements = gradient.device_mesh, gradient.placements
            groups = tuple(mesh.get_group(i) for i, place in enumerate(placements) if not place.is_replicate())
            gradient = gradient.to_local()
        local.append(gradient)
        squares[groups] = squares.get(groups, 0) + torch.linalg.vector_norm(gradient).square()
    for groups, square in squares.items():
        for part in groups:
            dist.all_reduce(square, group=part)
    # a pipeline stage may have only frozen layers
    total = torch.stack([*squares.values()]).sum() if squares else held[0].new_zeros(())
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    if local:
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm
