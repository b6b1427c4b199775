"""Tensors of which this process has only a shard, or no data: gather them for a file, load a shard, fill a model.

With FSDP2 and tensor parallelism (`train_FSDP.py` and its children), such tensors are DTensors: each process has a
shard. In a pipeline (`train_PP.py`), tensors that another process has are on the meta device, without data.
"""
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from .checkpoint import copied
from .errors import UsageError
from .reduce import get_world_size
from .replay import Weights, named_tensors


def fsdp_mesh(replicas: int, device: torch.device) -> dict[str, Any]:
    """Return the shape and dimension names of FSDP2's mesh for init_device_mesh().

    One replica has no dimension: NCCL may average groups of one rank wrongly (_get_gradient_divide_factors).
    """
    reject_gloo(dist.get_backend(), device.type)
    shape = divide("--replicas", replicas)
    if replicas == 1:
        return {"mesh_shape": shape[1:], "mesh_dim_names": ("shard",)}
    return {"mesh_shape": shape, "mesh_dim_names": ("replicate", "shard")}


def divide(option: str, parts: int) -> tuple[int, int]:
    """Return the mesh shape (parts, processes / parts); raise UsageError, naming `option`, if that is uneven."""
    world_size = get_world_size()
    if world_size % parts:
        raise UsageError(f"{option} {parts}: does not divide the {world_size} processes")
    return parts, world_size // parts


def reject_gloo(backend: str, device_type: str) -> None:
    """Raise UsageError for gloo on a GPU, whose memory it would read as the host's; see also pytorch issue 152645."""
    if backend == "gloo" and device_type != "cpu":
        raise UsageError(f"gloo cannot split a model over {device_type} devices: start at most one process per device, "
                         "with the device's own --backend, or use --device cpu")


def units(blocks: Sequence[nn.Module], reshard: bool) -> Iterator[tuple[nn.Module, bool]]:
    """Yield (block, whether to free its weights after the forward pass) for each block that becomes an FSDP2 unit.

    Weights are freed only if `reshard`. The last block always keeps its weights, because backward() starts with it.
    Blocks with less than a tenth of the largest block's parameters stay in the root's unit, because small messages cost
    mostly latency; so do blocks that share a weight, because two units would each train their own copy, and embeddings,
    because the last layer of a tied model reads their weights, too.
    """
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    owners = Counter(parameter for block in blocks for parameter in block.parameters())
    alone = [not isinstance(block, nn.Embedding) and all(owners[parameter] == 1 for parameter in block.parameters())
             for block in blocks]
    large = [block for block, size, own in zip(blocks, sizes, alone) if own and size * 10 >= max(sizes)]
    for block in large:
        yield block, reshard and block is not large[-1]


def count_units(model: nn.Module) -> int:
    """Return the number of FSDP2 units in `model`, including the root's unit."""
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def channels_last(model: nn.Module, inputs: tuple) -> tuple:
    """A forward pre-hook: return the inputs with images in channels-last layout, which FSDP2 rejects for weights."""
    return tuple(value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value for value in inputs)


def sum_gradients(model: nn.Module) -> nn.Module:
    """Make FSDP2 sum and then divide gradients, because some backends average wrongly (torch-xpu-ops issue 3020)."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
    return model


class EvenShare(list):
    """Every `count`th of `length` samples, starting at number `rank`, and equally many on every rank.

    So on the last ranks, a padding sample may come last: count only the first `own` samples.
    """

    def __init__(self, length: int, rank: int, count: int) -> None:
        super().__init__(index % length for index in range(rank, length + -length % count, count))
        self.own = len(range(rank, length, count))


def gather(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content`, a nested dict, with full tensors on the CPU on rank 0, and an empty dict on other ranks.

    If any tensor is sharded or on the meta device, all processes must call this; otherwise, the result is `content`
    itself. Tensors are gathered one at a time: a device needs memory for one full tensor, rank 0's host for all.
    """
    mine = dict(flatten(content))
    if not any(isinstance(value, DTensor) or isinstance(value, Tensor) and value.is_meta for value in mine.values()):
        return content
    mine = {path: value for path, value in mine.items() if not (isinstance(value, Tensor) and value.is_meta)}
    size = dist.get_world_size()
    # tensors sharded over all processes need no announcement; a pipeline stage's first process announces any other one
    whole = {path: _unshard(value) for path, value in mine.items()
             if isinstance(value, DTensor) and value.device_mesh.size() == size}
    outlines = {path: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
                for path, value in mine.items() if path not in whole
                and not (isinstance(value, DTensor) and _first(value) != dist.get_rank())}
    held: list[dict] = [{} for _ in range(size)]
    dist.all_gather_object(held, outlines)
    for path in dict.fromkeys(path for paths in held for path in paths):
        owner, value = next(rank for rank, paths in enumerate(held) if path in paths), mine.get(path)
        whole[path] = _fetch(_unshard(value) if isinstance(value, DTensor) else value, owner, held[owner][path])
    return nest(whole) if dist.get_rank() == 0 else {}


def flatten(content: Mapping, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Yield (keys, value) for each value in nested dicts; an empty dict counts as a value."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value


def nest(flat: Mapping[tuple, Any]) -> dict[str, Any]:
    """Undo flatten(): return the nested dict."""
    result: dict = {}
    for path, value in flat.items():
        place = result
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return result


def _unshard(value: DTensor) -> Tensor | None:
    """Return the full tensor on the CPU on its mesh's first rank, else None; all ranks of the mesh must call this."""
    placements = list(value.placements)
    # with _StridedShard, the cut along the mesh's first dimension came last
    strided = any(type(place).__name__ == "_StridedShard" for place in placements)
    # undo the cuts one at a time, in reverse order: torch warns that it cannot undo all of them together
    for dim in range(len(placements)) if strided else reversed(range(len(placements))):
        placements[dim] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local().cpu() if dist.get_rank() == _first(value) else None


def _first(value: DTensor) -> int:
    return int(value.device_mesh.mesh.min())


def _fetch(value: Any, owner: int, outline: Any) -> Any:
    """Send a tensor from the rank that owns it to rank 0, which returns it; all ranks must call this."""
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
    """Return this process's share of the full state `saved` for `part`, its model or optimizer, as copies."""
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
    if isinstance(value, DTensor):
        return value
    if not isinstance(value, Tensor) or not isinstance(like, Tensor) or value.shape != like.shape:
        return copied(value)
    if like.is_meta:
        return torch.empty_like(like)
    return _cut(value, like).clone() if isinstance(like, DTensor) else copied(value)


def _cut(whole: Tensor, like: DTensor) -> Tensor:
    """Return this process's shard of the full tensor `whole`, sharded as `like` is."""
    # src_data_rank=None: each process has the whole tensor and cuts its shard out, without communication
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def fill(model: nn.Module, weights: Weights, device: torch.device,
         held: Sequence[nn.Module] | None = None) -> nn.Module:
    """Move a model from the meta device to `device`, fill it with its initial weights or shards of them, and return it.

    Tensors that have data keep it: load_weights() has read them. Submodules that are not in `held`, if it is given,
    stay on the meta device. All processes must call this. Tensors, buffers included, are filled one at a time.
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
            place.copy_(_cut(whole, place) if isinstance(place, DTensor) and not isinstance(whole, DTensor) else whole)
    return model
