"""Clip the gradients of a sharded model or of a pipeline by the norm of all gradients on all processes."""
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None,
                   group: dist.ProcessGroup | None = None, copies: Sequence[Tensor] = ()) -> Tensor | None:
    """Scale the gradients of `parameters` down to the norm `max_norm` if their norm is greater; return their norm.

    Without `max_norm`, it does nothing and returns None. The norm is that of the full gradients, of which torch's
    clip_grad_norm_ rejects those on different meshes. With `group`, a pipeline's, it covers the parameters of all its
    processes, except `copies` of parameters that another process has. All processes must call this.
    """
    if max_norm is None:
        return None
    held = [parameter for parameter in parameters if not parameter.is_meta]
    once = {id(copy) for copy in copies}
    # keys: the process groups that have the other shards, and whether the gradients count toward the norm
    parts: dict[tuple, list[Tensor]] = {}
    for parameter, gradient in [(each, each.grad) for each in held if each.grad is not None]:
        groups: tuple = ()
        if isinstance(gradient, DTensor):
            mesh, placements = gradient.device_mesh, gradient.placements
            groups = tuple(mesh.get_group(i) for i, place in enumerate(placements) if not place.is_replicate())
            gradient = gradient.to_local()
        parts.setdefault((groups, id(parameter) not in once), []).append(gradient)
    # a plain tensor even if no gradient counts, as on a pipeline stage with only frozen layers
    plain = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in held]
    total = plain[0].new_zeros(()) if plain else torch.zeros(())
    for groups, local in [(groups, local) for (groups, counts), local in parts.items() if counts]:
        square = torch.nn.utils.get_total_norm(local).square()  # runs few kernels for any number of gradients
        for each in groups:
            dist.all_reduce(square, group=each)
        total = total + square
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    for local in parts.values():
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm
