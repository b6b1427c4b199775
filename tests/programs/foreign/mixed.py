"""Mixed precision: autocast to bfloat16, a GradScaler, clipping and OneCycleLR.

    python mixed.py
    torchrun --nproc-per-node=2 mixed.py
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS, CLASSES = 64, 3, 5


def blobs(n):
    generator = torch.Generator().manual_seed(21)
    centers = 2 * torch.randn(CLASSES, 16, generator=generator)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    return TensorDataset(centers[labels] + torch.randn(n, 16, generator=generator), labels)


def build():
    torch.manual_seed(100)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def fit(rank, world):
    net = build()
    model = nn.parallel.DistributedDataParallel(net) if world > 1 else net
    dataset = blobs(512)
    sampler = DistributedSampler(dataset, world, rank)
    loader = DataLoader(dataset, BATCH // world, sampler=sampler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=EPOCHS, steps_per_epoch=len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        if rank == 0:
            print(f"{epoch=} loss={loss.item():.4f} lr={scheduler.get_last_lr()[0]:.4f}")


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
        fit(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    else:
        fit(0, 1)
