"""Adam, ReduceLROnPlateau and early stopping.

    python plateau.py
    torchrun --nproc-per-node=2 plateau.py
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

rank, n_ranks = int(os.getenv("RANK", 0)), int(os.getenv("WORLD_SIZE", 1))
is_ddp = n_ranks > 1


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad_epochs = patience, float("inf"), 0

    def should_stop(self, loss):
        self.bad_epochs = 0 if loss < 0.97 * self.best else self.bad_epochs + 1
        self.best = min(self.best, loss)
        return self.bad_epochs >= self.patience


def get_loaders():
    g = torch.Generator().manual_seed(12)
    x = torch.rand(320, 3, generator=g)
    y = (x[:, :1] * x[:, 1:2] - x[:, 2:]).sin() + 0.3 * torch.randn(320, 1, generator=g)
    full = TensorDataset(x, y)
    train_set, val_set = Subset(full, range(192)), Subset(full, range(192, 320))
    sampler = DistributedSampler(train_set, n_ranks, rank)
    train = DataLoader(train_set, 48 // n_ranks, sampler=sampler)
    return train, DataLoader(Subset(val_set, range(rank, len(val_set), n_ranks)), 32), sampler


def validate(net, loader):
    net.eval()
    totals = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            totals += torch.stack([(net(x) - y).square().sum(), torch.tensor(float(len(x)))])
    if is_ddp:
        dist.all_reduce(totals)
    net.train()
    return (totals[0] / totals[1]).item()


def main():
    if is_ddp:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    model = nn.parallel.DistributedDataParallel(net) if is_ddp else net
    optim = torch.optim.Adam(net.parameters(), lr=0.03)
    scheduler = ReduceLROnPlateau(optim, factor=0.5, patience=0, threshold=0.05)
    stopper = EarlyStopping(patience=3)
    train_loader, val_loader, sampler = get_loaders()

    for epoch in range(12):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optim.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optim.step()
        val_loss = validate(net, val_loader)
        scheduler.step(val_loss)
        if rank == 0:
            print(f"epoch {epoch:2d} val {val_loss:.4f} lr {optim.param_groups[0]['lr']:.5f}", flush=True)
        if stopper.should_stop(val_loss):
            break
    if is_ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
