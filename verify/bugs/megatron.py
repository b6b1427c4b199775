"""A block as Megatron-LM splits it over all ranks: columns, then rows. Embedding, norm and head are copies.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: NeMo-Automodel-1260: partial: https://github.com/NVIDIA-NeMo/Automodel/issues/1260
    The backward pass does not add the gradients of the inputs over the ranks.
Bug: DeepSpeed-1801: clip: https://github.com/deepspeedai/DeepSpeed/issues/1801
    Each rank clips by the norm of its own shards, so the copies drift apart.
Bug: Megatron-LM-7452: clip: https://github.com/NVIDIA/Megatron-LM/issues/7452
    The norm counts the copies on every rank.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def add(tensor):
    if world > 1:
        dist.all_reduce(tensor)
    return tensor


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return add(grad.contiguous().clone())  # wrong NeMo-Automodel-1260: return grad


class ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8, bias=False)
        self.head = nn.Linear(8, 16)

    def cut(self):
        """Keep this rank's columns of the first layer and rows of the second."""
        for layer, parameter, axis in ((self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1)):
            part = getattr(layer, parameter).detach().chunk(world, axis)[rank].clone()
            setattr(layer, parameter, nn.Parameter(part))
        return [self.up.weight, self.up.bias, self.down.weight]

    def forward(self, tokens):
        x = self.embedding(tokens)
        hidden = F.gelu(self.up(CopyToRanks.apply(self.norm(x))))
        return self.head(x + ReduceFromRanks.apply(self.down(hidden)))


def clip(parameters, split, max_norm):
    """Scale the gradients so that the norm of the whole gradient is at most max_norm."""
    squares = [parameter.grad.square().sum() for parameter in parameters]
    own = sum(square for square, parameter in zip(squares, parameters) if any(parameter is each for each in split))
    copies = sum(squares) - own
    # wrong DeepSpeed-1801: add = torch.clone
    # wrong Megatron-LM-7452: own, copies = own + copies, 0
    norm = (add(own.clone()) + copies).sqrt()
    for parameter in parameters:
        parameter.grad *= (max_norm / norm).clamp(max=1)


if __name__ == "__main__":
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = Model()
    split = model.cut()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(16):
        tokens = torch.randint(16, (12, 9), generator=generator)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        clip(list(model.parameters()), split, 0.1)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()
