"""An IterableDataset: split across processes and workers, with the same number of steps on every process.

    python docs/examples/stream.py
    torchrun --nproc-per-node=2 docs/examples/stream.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SEED, EPOCHS, BATCH_SIZE, FILES = 0, 3, 32, 12


def read(file):
    """Yield the samples of a file; here they are computed. The files have different lengths."""
    generator = torch.Generator().manual_seed(file)
    for _ in range(20 + 7 * file):
        x = torch.randn(8, generator=generator)
        yield x, x.sin().sum(0, keepdim=True)


class Stream(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def samples(self):
        generator = torch.Generator().manual_seed(1000 * SEED + self.epoch)
        for file in torch.randperm(FILES, generator=generator).tolist():
            yield from read(file)

    def __iter__(self):
        worker = get_worker_info()
        worker_id, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        batch, step = [], 0
        for sample in self.samples():
            batch.append(sample)
            if len(batch) < BATCH_SIZE:
                continue

            # The batch is complete: one worker of each process yields that process's share
            if step % workers == worker_id:
                yield from batch[self.rank::self.world_size]
            batch, step = [], step + 1


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    train_set = Stream(rank, world_size)
    loader = DataLoader(train_set, BATCH_SIZE // world_size, num_workers=2)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    parallel_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        train_set.epoch = epoch  # each epoch starts new workers, which get this value
        sums = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(parallel_model(x), y)
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach(), torch.ones(())])

        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}  {sums[1] / world_size:.0f} steps  loss {sums[0] / sums[1]:.6f}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
