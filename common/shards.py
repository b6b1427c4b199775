"""Tensors that this process holds in part or not at all: gather them for a file, take its shard, fill a model.

Some are DTensors: each process holds a shard (FSDP2 and tensor parallelism: `train_FSDP.py` and its children). Others
are on the meta device, without data, because another process holds them (pipelines: `train_PP.py`).
"""
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Sampler

from .checkpoint import copied
from .endings import end_at_once
from .errors import UsageError
from .initial import Weights, named_tensors
from .reduce import get_world_size

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def grid(replicas: int, device: torch.device) -> dict[str, Any]:
    """Return the shape and the names of FSDP2's mesh for init_device_mesh(); raise UsageError if it is uneven.

    One replica has one dimension: with two, each unit would also all-reduce its gradients within groups of one rank,
    and torch warns that NCCL's average may be wrong there (_get_gradient_divide_factors in _fsdp_collectives.py).
    """
    reject_gloo(dist.get_backend(), device.type)
    shape = divide("--replicas", replicas)
    one = replicas == 1
    return {"mesh_shape": shape[one:], "mesh_dim_names": ("replicate", "shard")[one:]}


def divide(option: str, parts: int) -> tuple[int, int]:
    """Return a mesh shape (parts, processes / parts); raise UsageError, naming `option`, if `parts` is no divisor."""
    end_at_once()
    world_size = get_world_size()
    if world_size % parts:
        raise UsageError(f"{option} {parts}: does not divide the {world_size} processes")
    return parts, world_size // parts


def reject_gloo(backend: str, device_type: str) -> None:
    """Raise UsageError for the `backend` gloo and any device but a CPU.

    gloo would read a GPU's memory as if it were the host's to send it (ProcessGroupGloo.cpp: send and recv pass the
    tensor's own address), and has no all-gather into one tensor on CUDA (github.com/pytorch/pytorch/issues/152645).
    """
    if backend == "gloo" and device_type != "cpu":
        raise UsageError(f"gloo cannot split a model over {device_type} devices: start at most one process per device, "
                         "with the device's own --backend, or use --device cpu")


def units(blocks: Sequence[nn.Module], reshard: bool) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the blocks for FSDP2 to shard, and whether to free their weights after the forward pass if `reshard`.

    A block with less than a tenth of the largest block's parameters, such as a stem or a classifier, stays in the
    root's unit: small messages cost mostly latency. The last block keeps its weights, because backward starts with it.
    """
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    large = [block for block, size in zip(blocks, sizes) if size * 10 >= max(sizes)]
    for block in large:
        yield block, reshard and block is not large[-1]


def channels_last(model: nn.Module, inputs: tuple) -> tuple:
    """Return a model's inputs with images in channels-last layout, the fastest for convolutions: a forward pre-hook.

    The weights stay contiguous: FSDP2 rejects others.
    """
    return tuple(value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value for value in inputs)


def sum_gradients(model: nn.Module) -> nn.Module:
    """Let each of FSDP2's units in `model` sum gradients and divide the sums, and return `model`.

    Otherwise, the backend averages, which some do wrongly (github.com/intel/torch-xpu-ops/issues/3020). Older versions
    of torch cannot change this.
    """
    for unit in model.modules():
        if hasattr(unit, "set_force_sum_reduction_for_comms"):
            unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return model


class EvenShare(Sampler):
    """Every `count`th of `length` samples, starting at number `rank`; every rank gets the same number of samples.

    A forward pass that communicates needs the same number of batches on every rank. So on the last ranks, a padding
    sample may come last: count only the first `own` samples.
    """

    def __init__(self, length: int, rank: int, count: int) -> None:
        self.own = len(range(rank, length, count))
        self.indices = [index % length for index in range(rank, length + -length % count, count)]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


def is_sharded(value: Any) -> "TypeGuard[DTensor]":
    """Return whether `value` is a DTensor, without importing the class: that takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def gather(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content`, a nested dict, with full tensors on the CPU on rank 0, and an empty dict on other ranks.

    If any tensor is sharded or on the meta device, all processes must call this. It gathers one tensor at a time: a
    device holds at most one full tensor, and rank 0's host memory holds all of them. Without such tensors, the result
    is `content` itself.
    """
    mine = dict(flatten(content))
    if not any(is_sharded(value) or isinstance(value, Tensor) and value.is_meta for value in mine.values()):
        return content
    mine = {path: value for path, value in mine.items() if not (isinstance(value, Tensor) and value.is_meta)}
    whole = {path: _unshard(value) for path, value in mine.items() if is_sharded(value)}  # the same on all processes
    held: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(held, {path: _outline(value) for path, value in mine.items() if path not in whole})
    for path in dict.fromkeys(path for paths in held for path in paths):
        owner = next(rank for rank, paths in enumerate(held) if path in paths)
        whole[path] = _fetch(mine.get(path), owner, held[owner][path])
    return nest(whole) if dist.get_rank() == 0 else {}


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
    """Return a tensor of the same shape and type without data; return a value that is not a tensor unchanged."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _unshard(value: "DTensor") -> Tensor | None:
    """Return the full tensor to rank 0, on the CPU; all ranks must call this."""
    from torch.distributed.tensor import Replicate

    placements = list(value.placements)
    for dim in range(len(placements)):  # one dimension at a time: torch warns that it can't merge all of them
        placements[dim] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local().cpu() if dist.get_rank() == 0 else None


def _fetch(value: Any, owner: int, outline: Any) -> Any:
    """Return a tensor to rank 0, from the rank that owns it; all ranks must call this."""
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
    """Return what `part`, this process's model or optimizer, holds of the full state `saved`.

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
    """Return a copy of this process's part of the full tensor `value`, sharded as `like` is."""
    if is_sharded(value):
        return value
    if not isinstance(value, Tensor) or not isinstance(like, Tensor) or value.shape != like.shape:
        return copied(value)
    if like.is_meta:
        return torch.empty_like(value, device="meta")
    return _cut(value, like).clone() if is_sharded(like) else copied(value)


def _cut(whole: Tensor, like: "DTensor") -> Tensor:
    """Return this process's shard of the full tensor `whole`, sharded as `like` is."""
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: each process has the whole tensor and cuts its shard out, without communication
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def fill(model: nn.Module, weights: Weights, device: torch.device, held: Sequence[nn.Module] | None = None) -> None:
    """Move a model from the meta device to `device` and fill it with its initial weights, or with shards of them.

    Tensors that have data keep it: load_weights() has read them. With `held`, only these parts of the model move. All
    processes must call this. It handles one tensor at a time, and also buffers that a `state_dict` omits.
    """
    loaded = {name: tensor.detach() for name, tensor in named_tensors(model) if not tensor.is_meta}
    if loaded:
        model.to("meta")
    for part in [model] if held is None else held:
        part.to_empty(device=device)
    places = dict(named_tensors(model))
    for name, whole in chain(loaded.items(), weights.draw([name for name in places if name not in loaded], device)):
        place = places[name]
        if not place.is_meta:
            place.copy_(_cut(whole, place) if is_sharded(place) and not is_sharded(whole) else whole)


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None,
                   group: dist.ProcessGroup | None = None) -> Tensor | None:
    """Scale the gradients of `parameters` down to the norm `max_norm` if their norm is greater; return their norm.

    Without `max_norm`, it does nothing. The norm is that of the full gradients. torch's clip_grad_norm_ rejects
    parameters on different meshes, and in torch 2.9 returns the norm of one shard. With `group`, whose processes have
    different parameters (the stages of a pipeline), the norm covers the parameters of all of them. All processes must
    call this.
    """
    if max_norm is None:
        return None
    held = [parameter for parameter in parameters if not parameter.is_meta]
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    parts: dict[tuple, list[Tensor]] = {}  # keys: the process groups that hold the other shards
    for gradient in gradients:
        groups: tuple = ()
        if is_sharded(gradient):
            mesh, placements = gradient.device_mesh, gradient.placements
            groups = tuple(mesh.get_group(i) for i, place in enumerate(placements) if not place.is_replicate())
            gradient = gradient.to_local()
        parts.setdefault(groups, []).append(gradient)
    squares = []
    for groups, local in parts.items():
        squares.append(torch.nn.utils.get_total_norm(local).square())  # few kernels, however many gradients
        for each in groups:
            dist.all_reduce(squares[-1], group=each)
    # a pipeline stage may have only frozen layers
    total = torch.stack(squares).sum() if squares else held[0].new_zeros(())
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    for local in parts.values():
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm
