"""A classifier with an average of its weights, a running mean of its inputs, and an evaluation on all ranks.

    python measured.py
    torchrun --nproc-per-node=2 measured.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def update(self, x):
        """Follow the mean of the inputs of all ranks."""
        mean = x.mean(0)
        if world > 1:
            dist.all_reduce(mean)
            mean /= world
        self.mean.lerp_(mean, 0.1)

    def forward(self, x):
        return self.layers(x)


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(42)
    x = torch.randn(201, 6)
    y = x[:, :3].argmax(1)
    train_set, val_set = TensorDataset(x[:160], y[:160]), TensorDataset(x[160:], y[160:])
    sampler = DistributedSampler(train_set, world, rank)
    loader = DataLoader(train_set, 16 // world, sampler=sampler)
    val_loader = DataLoader(val_set, 8, sampler=range(rank, len(val_set), world))
    net = Net()
    model = DistributedDataParallel(net) if world > 1 else net
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        net.train()
        sums = torch.zeros(1)
        for inputs, labels in loader:
            optimizer.zero_grad()
            net.update(inputs)
            logits = model(inputs)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            average.update_parameters(net)
            sums += loss.detach() * len(labels)
        if world > 1:
            dist.all_reduce(sums)
        train_loss = (sums / len(train_set)).item()
        right = torch.zeros(2)
        net.eval()
        with torch.no_grad():
            for inputs, labels in val_loader:
                hits = (net(inputs).argmax(1) == labels).sum()
                right += torch.stack([hits, torch.tensor(len(labels))])
        if world > 1:
            dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: train_loss={train_loss:.4f} val_accuracy={(right[0] / right[1]).item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
