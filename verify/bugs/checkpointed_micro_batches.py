"""Gradient accumulation with DDP and activation checkpointing, with the micro-batches of a step in a list.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: pytorch-109191: not-averaged: https://github.com/pytorch/pytorch/issues/109191
        The forward pass of the micro-batch that should synchronize ran first, outside no_sync(), and its backward pass
        last. DDP then averages in the first backward pass that follows, and the last gradients stay local.
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class TwoLayers(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=False).relu()
        return x + checkpoint(self.second, hidden, use_reentrant=False)


def accumulate(model, loss_fn, inputs, labels):
    """Add up the gradients of all micro-batches; the gradients of the last one are those that DDP averages."""
    count = len(inputs)
    # wrong pytorch-109191: loss = loss_fn(model(inputs[-1]), labels[-1]) / count
    with model.no_sync():
        for x, y in zip(inputs[:-1], labels[:-1]):
            (loss_fn(model(x), y) / count).backward()
    loss = loss_fn(model(inputs[-1]), labels[-1]) / count  # wrong pytorch-109191:
    loss.backward()


def run(steps=14, micro_batches=3, batch_size=24):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    inputs, labels = torch.randn(96, 8), torch.randn(96, 8)
    model = DistributedDataParallel(TwoLayers(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        rows = torch.arange(step * batch_size, (step + 1) * batch_size) % len(inputs)
        rows = rows.chunk(world)[rank].chunk(micro_batches)
        optimizer.zero_grad()
        accumulate(model, nn.functional.mse_loss, [inputs[r] for r in rows], [labels[r] for r in rows])
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))  # started by plain python: a group of one
    run()
