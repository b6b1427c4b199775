"""AdamW with warm-up, a scheduler that depends on a metric, early stopping, and a random split.

    python docs/examples/schedule.py
    torchrun --nproc-per-node=2 docs/examples/schedule.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

SEED, EPOCHS, PATIENCE, BATCH_SIZE = 0, 100, 4, 64


@torch.inference_mode()
def evaluate(model, loader):
    sums = torch.zeros(2)
    for x, y in loader:
        sums += torch.stack([F.mse_loss(model(x), y, reduction="sum"), torch.tensor(float(len(y)))])
    dist.all_reduce(sums)  # from here on, every process has the same sums
    return (sums[0] / sums[1]).item()


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    x = torch.randn(600, 8)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True) + torch.randn(600, 1) / 4)

    # The split has a generator, so it is the same on every process, whatever was drawn before
    train_set, val_set = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(SEED))

    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=range(rank, len(val_set), world_size))
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    parallel_model = DistributedDataParallel(model)

    # 0.02 suits a batch of 64 samples over all processes; Adam's square-root rule adapts it to other batch sizes
    optimizer = torch.optim.AdamW(model.parameters(), 0.02 * (BATCH_SIZE / 64) ** 0.5)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)

    best_loss, best_epoch = float("inf"), 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            F.mse_loss(parallel_model(x), y).backward()
            optimizer.step()
            warmup.step()  # counts optimizer steps, whose number does not depend on the number of processes

        model.eval()
        val_loss = evaluate(model, val_loader)

        # Decide on every process, above the code that only rank 0 runs
        plateau.step(val_loss)
        if val_loss < best_loss:
            best_loss, best_epoch = val_loss, epoch
        stop = epoch - best_epoch >= PATIENCE

        if rank == 0:
            print(f"epoch {epoch:2}  val_loss {val_loss:.6f}  lr {optimizer.param_groups[0]['lr']:.5f}")
        if stop:
            break


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
