"""Fit a sine curve with a Trainer class.

    python trainer.py
    torchrun --nproc-per-node=2 trainer.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
GLOBAL_RANK = int(os.environ.get("RANK", 0))


class SineDataset(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.rand(size, 1, generator=generator) * 6 - 3
        self.y = torch.sin(self.x) + 0.1 * torch.randn(size, 1, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.model = DDP(model) if WORLD_SIZE > 1 else model
        self.train_data = train_data
        self.optimizer = optimizer

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        losses = [self._run_batch(source, targets) for source, targets in self.train_data]
        print(f"[rank {GLOBAL_RANK}] epoch {epoch} | steps {len(losses)} | loss {sum(losses) / len(losses):.4f}")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def prepare_dataloader(dataset, batch_size):
    sampler = DistributedSampler(dataset, num_replicas=WORLD_SIZE, rank=GLOBAL_RANK)
    return DataLoader(dataset, batch_size=batch_size // WORLD_SIZE, sampler=sampler)


def main(total_epochs=3, batch_size=32):
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = Trainer(model, prepare_dataloader(SineDataset(256), batch_size), optimizer)
    trainer.train(total_epochs)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
