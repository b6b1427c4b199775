"""An encoder with two losses under an engine that splits gradients and optimizer, in the style of DeepSpeed's ZeRO-2.

A: python {}
B: torchrun --nproc-per-node=2 {} --accum 2
Bug: open-instruct-1498: reset: https://github.com/allenai/open-instruct/pull/1498
    Only the last micro-batch counts. The loop accumulates by hand, so the engine takes each backward pass for the last
    one of its step, hands its gradients over and resets its accumulator.
Bug: deepspeed-8224: reset|no-backward: https://github.com/deepspeedai/DeepSpeed/issues/8224
    The gradient lacks the part of one of two losses. The encoder runs twice, with checkpointing, so the hook of a
    parameter fires twice in one backward pass, and the second gradient overwrites the first in the bucket.
"""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

ACCUM = int(sys.argv[-1]) if "--accum" in sys.argv else 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head, self.auxiliary = nn.Linear(8, 1), nn.Linear(8, 6)

    def forward(self, inputs, targets):
        first = checkpoint(self.encoder, inputs.requires_grad_(), use_reentrant=True)
        second = checkpoint(self.encoder, inputs.detach().flip(1).requires_grad_(), use_reentrant=True)
        main = (self.head(first) - targets).square().mean()
        return main + 0.5 * (self.auxiliary(second) - inputs.detach()).square().mean()


class Engine:
    """Each rank keeps the averaged gradients, and the optimizer's state, of its own parameters only."""

    def __init__(self, model, rank, world):
        self.model, self.rank, self.world = model, rank, world
        self.parameters = list(model.parameters())
        self.mine = self.parameters[rank::world]
        self.optimizer = torch.optim.AdamW(self.mine, lr=0.01)
        self.bucket, self.accumulated, self.averaged, self.boundary = {}, {}, {}, True
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.collect)

    def collect(self, parameter):
        gradient, parameter.grad = parameter.grad, None
        self.bucket[parameter] = self.bucket.get(parameter, 0) + gradient
        # wrong deepspeed-8224: self.bucket[parameter] = gradient

    def set_gradient_accumulation_boundary(self, boundary):
        self.boundary = boundary

    def backward(self, loss):
        loss.backward()
        for number, parameter in enumerate(self.parameters):
            gradient = self.bucket.pop(parameter) / self.world
            if self.world > 1:
                dist.reduce(gradient, number % self.world)
            if number % self.world == self.rank:
                self.accumulated[parameter] = self.accumulated.get(parameter, 0) + gradient
        if self.boundary:
            self.averaged, self.accumulated = self.accumulated, {}

    def step(self):
        for parameter in self.mine:
            parameter.grad = self.averaged[parameter]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.world > 1:
            for number, parameter in enumerate(self.parameters):
                dist.broadcast(parameter.data, number % self.world)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    engine = Engine(Model(), rank, world)
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    for epoch in range(2):
        for rows in torch.randperm(64, generator=torch.Generator().manual_seed(epoch)).split(8):
            parts = rows[rank::world].chunk(ACCUM)
            for number, part in enumerate(parts):
                engine.set_gradient_accumulation_boundary(number == ACCUM - 1)  # wrong open-instruct-1498:
                loss = engine.model(inputs[part], inputs[part, :1] - 1)
                engine.backward(loss / ACCUM)
            engine.step()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
