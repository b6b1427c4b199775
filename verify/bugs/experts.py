"""Experts over ranks: every rank has some experts, which compute the tokens of all ranks.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: Megatron-LM-5956: group-scale: https://github.com/NVIDIA/Megatron-LM/issues/5956 and
    https://github.com/pytorch/pytorch/issues/160285
    The gradients of the experts are added over the ranks, but not divided.
Bug: transformers-48205: not-averaged|partial: https://github.com/huggingface/transformers/issues/48205
    The parts of the router's gradient are not added over the ranks.
Bug: NeMo-Automodel-2995: no-gradient: https://github.com/NVIDIA-NeMo/Automodel/issues/2995
    A gather without a backward pass: the router gets no gradient.
"""
import os

import torch
import torch.distributed as dist
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def gather(x):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def add_and_take(x):
    """Sum over the ranks, of which each takes its own part."""
    x = x.clone()
    dist.all_reduce(x)
    return x.chunk(world)[rank]


class ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gather(x)

    @staticmethod
    def backward(ctx, grad):
        return add_and_take(grad)


class FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add_and_take(x)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad)


class Mixture(nn.Module):
    def __init__(self, experts=4, width=6):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def cut(self):
        self.experts = nn.Parameter(self.experts.detach().chunk(world)[rank].clone())
        return self

    def forward(self, x):
        x = self.dense(x).tanh()
        everyone = ToExperts.apply(x) if world > 1 else x
        gates = self.router(everyone).softmax(1)
        # wrong NeMo-Automodel-2995: gates = gates.detach()
        mine = gates.chunk(world, 1)[rank]
        y = torch.einsum("te,td,edf->tf", mine, everyone, self.experts)
        return x + (FromExperts.apply(y) if world > 1 else y)


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = Mixture().cut()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(16):
        inputs = torch.randn(16, 6, generator=generator)
        targets = inputs.flip(1).sin()
        own, wanted = inputs.chunk(world)[rank], targets.chunk(world)[rank]
        optimizer.zero_grad()
        loss = (model(own) - wanted).square().mean()
        loss.backward()
        model.experts.grad /= world  # wrong Megatron-LM-5956:
        for name, parameter in model.named_parameters():
            if world > 1 and name != "experts" and parameter.grad is not None:
                parameter.grad /= world
                # wrong transformers-48205: if name.startswith("router"): continue
                dist.all_reduce(parameter.grad)
        optimizer.step()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
