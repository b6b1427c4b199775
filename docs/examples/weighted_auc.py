"""Rare positives: draw them more often (WeightedRandomSampler), and measure the AUC, which is not a sum over samples.

    python docs/examples/weighted_auc.py
    torchrun --nproc-per-node=2 docs/examples/weighted_auc.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

SEED, EPOCHS, BATCH_SIZE = 0, 4, 64


class Share(Sampler):
    """This process's share of the indices of another sampler, which must draw the same ones on every process."""

    def __init__(self, sampler, rank, world_size):
        self.sampler, self.rank, self.world_size = sampler, rank, world_size

    def __iter__(self):
        indices = list(self.sampler)[:len(self) * self.world_size]
        return iter(indices[self.rank::self.world_size])

    def __len__(self):
        return len(self.sampler) // self.world_size


def gather(values):
    """Return the values of all processes, on every process; their number may differ between processes."""
    counts = [values.new_zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, values.new_tensor([len(values)], dtype=torch.long))
    padded = F.pad(values, (0, int(max(counts)) - len(values)))
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])


@torch.inference_mode()
def evaluate(model, loader):
    outputs = torch.cat([torch.stack([model(x).squeeze(1), y]) for x, y in loader], dim=1)
    scores, labels = gather(outputs[0]), gather(outputs[1])
    differences = scores[labels == 1][:, None] - scores[labels == 0]
    return ((differences > 0).double() + (differences == 0) / 2).mean().item()


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    x = torch.randn(1003, 8)
    y = (x[:, :4].sum(1) + torch.randn(1003) > 4).to(x.dtype)  # about 4 % are positive
    train_set, val_set = TensorDataset(x[:800], y[:800]), TensorDataset(x[800:], y[800:])

    # All processes draw the same indices from a generator seeded with (seed, epoch) alone
    generator = torch.Generator()
    drawn = WeightedRandomSampler(torch.where(y[:800] == 1, 10.0, 1.0), len(train_set), generator=generator)
    sampler = Share(drawn, rank, world_size)
    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)

    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=range(rank, len(val_set), world_size))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    parallel_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        generator.manual_seed(1000 * SEED + epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(parallel_model(x).squeeze(1), y).backward()
            optimizer.step()

        model.eval()
        auc = evaluate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}  AUC {auc:.6f}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
