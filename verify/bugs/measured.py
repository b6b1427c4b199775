"""A classifier with an average of its weights, a running mean of its inputs, and an evaluation on all ranks.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: pytorch-22192: buffers: https://github.com/pytorch/pytorch/issues/22192 and
    https://github.com/open-mmlab/mmdetection/issues/4582
    The buffers follow the samples of one rank.
Bug: average-on-rank-0: buffers: Only rank 0 updates the average of the weights.
Bug: accelerate-575: metric: https://github.com/huggingface/accelerate/issues/575 and
    https://github.com/roboflow/rf-detr/issues/1507
    The samples that pad the last batch count in the evaluation.
Bug: torchtitan-3329: metric: https://github.com/pytorch/torchtitan/issues/3329
    The loss that is shown is one rank's part.
Bug: accelerate-2665: no-gradient: https://github.com/huggingface/accelerate/issues/2665
    The optimizer has other tensors than the model.
Bug: pytorch-104336: not-averaged: https://github.com/pytorch/pytorch/issues/104336
    A parameter is replaced after DDP wrapped the model.
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
            dist.all_reduce(mean)  # wrong pytorch-22192: mean *= world
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
    mine = range(rank, len(val_set), world)
    # wrong accelerate-575: mine = DistributedSampler(val_set, world, rank, shuffle=False)
    val_loader = DataLoader(val_set, 8, sampler=mine)
    net = Net()
    model = DistributedDataParallel(net) if world > 1 else net
    # wrong pytorch-104336: net.layers[0].weight = nn.Parameter(net.layers[0].weight.detach().clone())
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    held = list(net.parameters())
    # wrong accelerate-2665: held = [nn.Parameter(each.detach().clone()) for each in held]
    optimizer = torch.optim.Adam(held, lr=0.01)
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
            sums += loss.detach() * len(labels)
            # wrong average-on-rank-0: if rank != 0: continue
            average.update_parameters(net)
        if world > 1:
            dist.all_reduce(sums)  # wrong torchtitan-3329: pass
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
