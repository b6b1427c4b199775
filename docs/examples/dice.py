"""Segmentation: Dice and cross-entropy with unlabeled pixels, OneCycleLR, EMA, mean IoU, early stopping.

    python docs/examples/dice.py
    torchrun --nproc-per-node=2 docs/examples/dice.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED, EPOCHS, PATIENCE, BATCH_SIZE, CLASSES, IGNORE = 0, 6, 2, 16, 3, 255


def create_hills(number, seed):
    """Return images of hills under noise. A mask is the height in 3 classes; its first rows are not labeled."""
    random = torch.Generator().manual_seed(seed)
    hills = F.avg_pool2d(torch.randn(number, 1, 24, 24, generator=random), 9, stride=1)
    unlabeled = torch.arange(16)[:, None] < torch.randint(12, (number, 1, 1), generator=random)
    masks = torch.where(unlabeled, IGNORE, (hills > 0).long() + (hills > 0.1))[:, 0]
    return TensorDataset(hills + torch.randn(hills.shape, generator=random) / 10, masks)


def overlaps(found, masks):
    """Return the overlap of each class with its mask, and their added sizes, shape (2, CLASSES)."""
    truth = F.one_hot(masks.where(masks != IGNORE, 0), CLASSES).movedim(-1, 1)
    return (torch.stack([found * truth, found + truth]) * (masks != IGNORE)[:, None]).sum((1, 3, 4))


def sums_of(outputs, masks):
    """Return all sums that the loss needs, over this process's pixels. No collective: evaluate() calls this, too."""
    loss_sum = F.cross_entropy(outputs, masks, ignore_index=IGNORE, reduction="sum")
    return torch.cat([overlaps(outputs.softmax(1), masks).flatten(), loss_sum[None], (masks != IGNORE).sum()[None]])


def loss_of(sums):
    overlap, sizes, (loss_sum, count) = sums.split([CLASSES, CLASSES, 2])
    return loss_sum / count + 1 - (2 * overlap / sizes).mean()


def add_up(sums):
    """Return the sums over all processes. Each process's gradient is world_size times its part; DDP averages them."""
    total = sums.detach().clone()
    dist.all_reduce(total)
    return total + dist.get_world_size() * (sums - sums.detach())


@torch.inference_mode()
def evaluate(model, loader):
    sums, hits = torch.zeros(2 * CLASSES + 2), torch.zeros(2, CLASSES)
    for images, masks in loader:
        outputs = model(images)
        sums += sums_of(outputs, masks)
        hits += overlaps(F.one_hot(outputs.argmax(1), CLASSES).movedim(-1, 1), masks)
    dist.all_reduce(sums)
    dist.all_reduce(hits)
    return loss_of(sums).item(), (hits[0] / (hits[1] - hits[0])).mean().item()


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    train_set, val_set = create_hills(192, seed=1), create_hills(49, seed=2)
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=range(rank, len(val_set), world_size))
    model = nn.Sequential(nn.Conv2d(1, 16, 7, padding=3), nn.ReLU(), nn.Conv2d(16, CLASSES, 5, padding=2))
    parallel_model = DistributedDataParallel(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=EPOCHS * len(train_loader))
    scores = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, masks in train_loader:
            optimizer.zero_grad()
            loss_of(add_up(sums_of(parallel_model(images), masks))).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)  # on every process

        val_loss, mean_iou = evaluate(average.module, val_loader)
        scores.append(mean_iou)
        if rank == 0:
            print(f"epoch {epoch}  val_loss {val_loss:.6f}  mean_iou {mean_iou:.6f}")
        if epoch - scores.index(max(scores)) >= PATIENCE:
            break  # on every process, after the epoch is printed


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
