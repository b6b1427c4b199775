"""Forecast waves with a Trainer class and a recurrent network, on NumPy arrays, with explicit float32 everywhere.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: same-samples: samples: Every rank reads the same samples.
Bug: no-set-epoch: set-epoch: Each epoch has the same order.
Bug: module-called: not-averaged: The module is called instead of DDP.
Bug: a-batch-each: batch-size: Each process reads a whole batch.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
GLOBAL_RANK = int(os.environ.get("RANK", 0))


class Waves(Dataset):
    """Ten points of a wave; the target is the eleventh."""

    def __init__(self, size):
        rng = np.random.RandomState(0)
        start, speed = rng.rand(2, size, 1) * [[[6.0]], [[1.0]]]
        wave = np.sin(start + speed * np.arange(11)) + 0.05 * rng.randn(size, 11)
        self.data = wave.astype(np.float32)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        source, target = self.data[index, :10, None], self.data[index, 10:]
        return torch.from_numpy(source).float(), torch.tensor(target, dtype=torch.float32)


class Forecaster(nn.Module):
    def __init__(self, hidden_size=16):
        super().__init__()
        self.rnn = nn.GRU(1, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, 1)

    def forward(self, x):
        h0 = torch.zeros(1, len(x), self.rnn.hidden_size, dtype=torch.float32)
        states, _ = self.rnn(x, h0)
        return self.out(states[:, -1])


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.model = DDP(model) if WORLD_SIZE > 1 else model
        self.train_data = train_data
        self.optimizer = optimizer

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)  # wrong module-called: output = self.model.module(source)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)  # wrong no-set-epoch:
        losses = [self._run_batch(source, targets) for source, targets in self.train_data]
        print(f"[rank {GLOBAL_RANK}] epoch {epoch} | steps {len(losses)} | loss {sum(losses) / len(losses):.4f}")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def prepare_dataloader(dataset, batch_size):
    sampler = DistributedSampler(dataset, num_replicas=WORLD_SIZE, rank=GLOBAL_RANK)
    # wrong same-samples: sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    # wrong a-batch-each: batch_size *= WORLD_SIZE
    return DataLoader(dataset, batch_size=batch_size // WORLD_SIZE, sampler=sampler)


def main(total_epochs=3, batch_size=32):
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Forecaster().to(dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    trainer = Trainer(model, prepare_dataloader(Waves(256), batch_size), optimizer)
    trainer.train(total_epochs)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
