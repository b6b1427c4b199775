"""A convolutional network on synthetic stripes, with GroupNorm or BatchNorm.

    python cnn.py --norm group
    torchrun --nproc-per-node=2 cnn.py --norm group
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Stripes(Dataset):
    """Noisy 8x8 images: the label is the direction of the stripes."""

    def __init__(self, count=256):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        label = i % 2
        line = torch.randn(8, generator=g).repeat(8, 1)
        image = line if label else line.T
        return (image + 0.5 * torch.randn(8, 8, generator=g)).unsqueeze(0), label


def conv_block(cin, cout, norm):
    norm_layer = nn.BatchNorm2d(cout) if norm == "batch" else nn.GroupNorm(4, cout)
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), norm_layer, nn.ReLU(inplace=True), nn.MaxPool2d(2))


class ConvNet(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.features = nn.Sequential(conv_block(1, 8, norm), conv_block(8, 16, norm))
        self.classifier = nn.Linear(64, 2)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def train(args, rank, world_size):
    torch.manual_seed(args.seed)
    model = ConvNet(args.norm)
    model = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    loss_fn = nn.CrossEntropyLoss()
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    train_set = Stripes()
    train_sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=train_sampler)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        for images, labels in train_loader:
            opt.zero_grad()
            loss = loss_fn(model(images), labels)
            loss.backward()
            opt.step()
        print(f"rank {rank} epoch {epoch + 1}/{args.epochs} loss {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--norm", choices=["group", "batch"], default="group")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(parser.parse_args(), dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    else:
        train(parser.parse_args(), 0, 1)
