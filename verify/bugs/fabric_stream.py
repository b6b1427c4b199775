"""A stream of records (an iterable dataset) under Lightning Fabric.

A: python {}
B: torchrun --nproc-per-node=2 {}
Needs: lightning_fabric
Bug: datasets-5360: samples: https://github.com/huggingface/datasets/issues/5360
    The ranks read the same records: no sampler splits an iterable dataset, and the dataset does not look at the rank.
"""
import os

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Records(IterableDataset):
    """Reads "shards" one after the other, and shuffles in a small buffer."""

    def __init__(self, rank, world, shards=3, length=32):
        self.rank, self.world, self.shards, self.length, self.epoch = rank, world, shards, length, 0

    def shuffled(self):
        chance, buffer = torch.Generator().manual_seed(self.epoch), []
        for shard in range(self.shards):
            rows = torch.randn(self.length, 7, generator=torch.Generator().manual_seed(shard))
            for row in rows:
                buffer.append(row)
                if len(buffer) == 16:
                    yield buffer.pop(int(torch.randint(16, (), generator=chance)))
        yield from buffer

    def __iter__(self):
        for number, row in enumerate(self.shuffled()):
            if number % self.world == self.rank:  # wrong datasets-5360: if True:
                yield row[:6], row[6:]


def main():
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    records = Records(fabric.global_rank, fabric.world_size)
    loader = fabric.setup_dataloaders(DataLoader(records, batch_size=8 // fabric.world_size))
    for epoch in range(2):
        records.epoch = epoch
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
