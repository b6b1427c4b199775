"""A recurrent network on NumPy arrays, with explicit float32 everywhere.

    python float32.py
    torchrun --nproc-per-node=2 float32.py
"""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Waves(Dataset):
    """Ten points of a wave; the target is the eleventh."""

    def __init__(self, n=256):
        rng = np.random.RandomState(0)
        start, speed = rng.rand(2, n, 1) * [[[6.0]], [[1.0]]]
        wave = np.sin(start + speed * np.arange(11)) + 0.05 * rng.randn(n, 11)
        self.data = wave.astype(np.float32)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return torch.from_numpy(self.data[i, :10, None]).float(), torch.tensor(self.data[i, 10:], dtype=torch.float32)


class Forecaster(nn.Module):
    def __init__(self, hidden_size=16):
        super().__init__()
        self.rnn = nn.GRU(1, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, 1)

    def forward(self, x):
        h0 = torch.zeros(1, len(x), self.rnn.hidden_size, dtype=torch.float32)
        states, _ = self.rnn(x, h0)
        return self.out(states[:, -1])


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Forecaster().to(dtype=torch.float32)
    if WORLD > 1:
        model = nn.parallel.DistributedDataParallel(model)
    data = Waves()
    sampler = DistributedSampler(data, num_replicas=WORLD, rank=RANK, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=32 // WORLD, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        running = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            running += loss.item()
        if RANK == 0:
            print(f"Epoch {epoch + 1}: mse {running / len(loader):.5f}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
