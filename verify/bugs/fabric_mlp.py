"""Classify points on two rings with Lightning Fabric, which starts the processes itself.

A: python {} --devices 1
B: python {} --devices 2
Needs: lightning_fabric
Bug: model-before-setup: not-averaged: The model is called instead of what setup() returned.
"""
import argparse

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MLP(torch.nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.ReLU(),
            torch.nn.Linear(hidden, 2))

    def forward(self, x):
        return self.layers(x)


def rings(n):
    generator = torch.Generator().manual_seed(3)
    label = torch.arange(n) % 2
    angle = 6.2832 * torch.rand(n, generator=generator)
    radius = 1 + label + 0.1 * torch.randn(n, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), label)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=3)
    hparams = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=hparams.devices, strategy="ddp" if hparams.devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(42)

    dataset = rings(384)
    sampler = DistributedSampler(dataset, fabric.world_size, fabric.global_rank)
    loader = DataLoader(dataset, hparams.batch_size // fabric.world_size, sampler=sampler)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    mlp = MLP()
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(mlp, optimizer)

    for epoch in range(hparams.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)  # wrong model-before-setup: loss = F.cross_entropy(mlp(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        fabric.print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
