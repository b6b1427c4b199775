"""How a pipeline divides a GPT into stages; for `train_4D.py`."""
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import pipeline, shards
from common.errors import UsageError

from .gpt import GPT

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def pp_mesh(stages: int | None, tensor: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of init_device_mesh() for a mesh ("pipeline", "data", "tensor").

    It has `stages` pipeline stages: by default 2, or 1 if the world size is odd. A tensor group has `tensor` processes.
    Raises UsageError if the groups would be uneven.
    """
    shards.reject_gloo(dist.get_backend(), device.type)
    stages, rest = shards.divide("--pipeline-parallel", stages or 2 - dist.get_world_size() % 2)
    if rest % tensor:
        raise UsageError(f"--tensor-parallel {tensor}: does not divide the {rest} processes of a pipeline stage")
    backend = pipeline.peer_backend(dist.get_backend(), dist.Backend.backend_list)
    return {"mesh_shape": (stages, rest // tensor, tensor), "mesh_dim_names": ("pipeline", "data", "tensor"),
            "backend_override": {"pipeline": backend} if backend else None}


class Stage(nn.Module):
    """Consecutive blocks of a GPT. The first stage also embeds the tokens, and the last one computes the logits.

    `x` (N, P, width) is the output of the previous stage; the first stage ignores it. Every stage gets the `tokens`
    (N, T), and computes P of their positions.
    """

    def __init__(self, model: GPT, blocks: Sequence[nn.Module], first: bool, last: bool) -> None:
        super().__init__()
        self.whole = model,  # in a tuple, so that it is not a submodule
        self.blocks, head = nn.ModuleList(blocks), model.lm_head or model.model.embed_tokens
        self.embed_tokens = model.model.embed_tokens if first else None
        self.last = last
        if last:
            self.norm, self.head, self.logits = model.model.norm, head, model.logits

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        model, = self.whole
        around = model.around(tokens)
        if self.embed_tokens is not None:
            x = self.embed_tokens(model.part(tokens))
        for block in self.blocks:
            x = block(x, *around)
        return self.logits(self.norm(x), self.head.weight) if self.last else x


def cut(model: GPT, count: int, processes: int) -> list[Stage]:
    """Divide a model into `count` stages with about the same number of blocks; the stages use the model's own blocks.

    Raises UsageError if the model has fewer than `count` blocks, or if there are several stages but only one process.
    """
    blocks = [*model.model.layers]
    if count > len(blocks):
        raise UsageError(f"{count} pipeline stages: the model has only {len(blocks)} blocks")
    if count > processes == 1:
        raise UsageError(f"--chunks {count}: a pipeline of one process has one stage")
    ends = [len(blocks) * number // count for number in range(count + 1)]
    return [Stage(model, blocks[start:end], start == 0, end == len(blocks)) for start, end in zip(ends, ends[1:])]


def tied(model: GPT, group: dist.ProcessGroup) -> list[Tensor]:
    """On the last of several stages, return [the embedding's weight] if it is a copy of the first stage's; else []."""
    last = group.size() > 1 and group.rank() == group.size() - 1
    return [model.model.embed_tokens.weight] if last and model.size.tied else []


@torch.no_grad()
def sum_tied(model: GPT, group: dist.ProcessGroup) -> None:
    """Add up the two gradients of a tied embedding: the first and the last stage each have a copy of its weight.

    Both copies then get the same gradient, so they stay equal. `group` has the processes of one pipeline; all
    of them must call this.
    """
    first, last = 0, group.size() - 1
    weight = model.model.embed_tokens.weight
    if not model.size.tied or not weight.requires_grad or first == last or group.rank() not in (first, last):
        return
    gradient: DTensor = weight.grad  # type: ignore[assignment]
    own = gradient.to_local()
    other, peer = torch.empty_like(own), first + last - group.rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, group=group, group_peer=peer),
                                        dist.P2POp(dist.irecv, other, group=group, group_peer=peer)]):
        work.wait()
    own += other
