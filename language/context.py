"""How context parallelism divides a sequence over the processes of a group; for `train_CP.py` and `train_4D.py`."""
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.errors import UsageError

from . import gpt

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def divide(grid: "DeviceMesh", size: int | None, length: int) -> dict[str, Any]:
    """Return the shape and the dimension names of a mesh for init_device_mesh().

    The mesh is `grid`, with "data" divided into "data" and "context". A context group has `size` processes: by default
    2, or 1 if "data" has an odd size. Raises UsageError if `size` does not divide the size of "data", or if a sequence
    of `length` tokens cannot be divided evenly.
    """
    names, shape = [*(grid.mesh_dim_names or ())], [*grid.shape]
    at = names.index("data")
    size = size or 2 - shape[at] % 2
    if shape[at] % size:
        raise UsageError(f"--context-parallel {size}: does not divide the {shape[at]} processes of the data dimension")
    pieces = 2 * size * grid["tensor"].size()
    if length % pieces:
        raise UsageError(f"--length {length}: not a multiple of {pieces}, twice the number of processes per sequence")
    return {"mesh_shape": (*shape[:at], shape[at] // size, size, *shape[at + 1:]),
            "mesh_dim_names": (*names[:at], "data", "context", *names[at + 1:])}


def order(length: int, size: int, device: torch.device) -> Tensor:
    """Return the positions (size, P) that each process of a group computes: two of 2 x `size` pieces of a sequence.

    Process r has pieces r and 2 x `size` - 1 - r, so that all processes have equal work under a causal mask, as in
    Llama 3 (arXiv:2407.21783, section 3.3.2).
    """
    pieces = torch.arange(length, device=device).view(2, size, -1)
    return torch.cat([pieces[0], pieces[1].flip(0)], 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rank: int, size: int) -> Tensor:
    """Return the attention of process `rank`'s queries, (N, heads, P, width), to the keys and values of all positions.

    Each of the process's two pieces attends to the positions up to the end of that piece. See gpt.attend().
    """
    half, results = q.shape[2] // 2, []
    for number, end in enumerate([(rank + 1) * half, (2 * size - rank) * half]):
        rows = slice(number * half, (number + 1) * half)
        results.append(gpt.attend(q[:, :, rows], k[:, :, :end], v[:, :, :end],
                                  None if mask is None else mask[:, :, rows, :end]))
    return torch.cat(results, 2)
