"""A small transformer that is evaluated every few steps and returns probabilities in evaluation mode.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: batch-norm: batchnorm: BatchNorm normalizes the share of each process.
Bug: no-train: evaluation: Nothing calls train() after an evaluation.
Bug: dropout: random: Each rank draws its own dropout masks.
Options batch-norm: --batch-norm
Options dropout: --dropout 0.2
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


class Classifier(nn.Module):
    """Reads twelve numbers as six tokens of two, each of which sees those before it."""

    def __init__(self, p, batch_norm):
        super().__init__()
        self.embedding = nn.Linear(2, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, p, batch_first=True, norm_first=True)
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        future = torch.ones(6, 6, dtype=torch.bool).triu(1)
        x = self.layer(self.embedding(x.view(-1, 6, 2)), future)[:, -1]
        x = self.head(self.norm(x))
        return x if self.training else x.softmax(dim=1)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    correct = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return correct / len(loader.dataset)


def run(cfg):
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(cfg.seed)
    x = torch.randn(480, 12)
    y = x[:, :4].argmax(1)
    train_set, val_set = random_split(TensorDataset(x, y), [384, 96], torch.Generator().manual_seed(cfg.seed))
    sampler = DistributedSampler(train_set, world, rank, seed=cfg.seed)
    train_loader = DataLoader(train_set, batch_size=cfg.batch // world, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=96)

    model = Classifier(cfg.dropout, cfg.batch_norm)
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    step = 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in train_loader:
            model.train()  # wrong no-train:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(inputs), labels).backward()
            optimizer.step()
            step += 1
            if step % cfg.eval_every == 0 and rank == 0:
                print(f"step {step}: accuracy {accuracy(model, val_loader):.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    run(parser.parse_args())
