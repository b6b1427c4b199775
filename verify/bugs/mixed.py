"""Mixed precision: autocast to bfloat16, a GradScaler, clipping and OneCycleLR; mp.spawn starts the processes.

A: python {} --nprocs 1
B: python {} --nprocs 2
Bug: no-seed: start: Nothing sets a seed before the model is created.
Bug: clipped-while-scaled: clip: Gradients are clipped before they are unscaled.
Bug: other-norm: clip: The norm to clip by depends on the number of ranks.
"""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS, CLASSES = 64, 3, 5


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def blobs(n):
    generator = torch.Generator().manual_seed(21)
    centers = 2 * torch.randn(CLASSES, 16, generator=generator)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    return TensorDataset(centers[labels] + torch.randn(n, 16, generator=generator), labels)


def build():
    torch.manual_seed(100)  # wrong no-seed:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def worker(rank, world_size, port):
    setup(rank, world_size, port)
    net = build()
    model = nn.parallel.DistributedDataParallel(net)
    dataset = blobs(512)
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(dataset, BATCH // world_size, sampler=sampler)
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
            scaler.unscale_(optimizer)  # wrong clipped-while-scaled:
            max_norm = 1.0  # wrong other-norm: max_norm = 1.0 / world_size
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        if rank == 0:
            print(f"{epoch=} loss={loss.item():.4f} lr={scheduler.get_last_lr()[0]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nprocs", type=int, default=2)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    mp.spawn(worker, args=(args.nprocs, free_port), nprocs=args.nprocs)
