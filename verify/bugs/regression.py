"""Linear features, a small network, plain SGD: no DataLoader and no DDP; we average the gradients ourselves.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: own-seeds: start: Each rank starts with weights of its own.
Bug: sum-of-gradients: scale: The gradients are added over the ranks, but not divided.
"""
import os

import torch
import torch.distributed as dist
from torch import nn

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def make_data(samples=512, features=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, features, generator=generator)
    w = torch.randn(features, 1, generator=generator)
    return x, x @ w + (x**2).mean(1, keepdim=True)


def make_model(features=8):
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 1))


def batches(x, y, size, epoch):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for part in order.split(size):
        part = part[rank::world_size]
        yield x[part], y[part]


def share_weights(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size  # wrong sum-of-gradients:


def train(epochs=3, batch_size=64, lr=0.05):
    torch.manual_seed(0)  # wrong own-seeds: torch.manual_seed(rank)
    model = make_model()
    if world_size > 1:
        share_weights(model)  # wrong own-seeds: pass
    x, y = make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(epochs):
        for inputs, targets in batches(x, y, batch_size, epoch):
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            loss.backward()
            if world_size > 1:
                average_gradients(model)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    if world_size > 1:
        dist.init_process_group("gloo")
    train()
    if world_size > 1:
        dist.destroy_process_group()
