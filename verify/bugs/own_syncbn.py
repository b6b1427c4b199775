"""A network with an own synchronized BatchNorm, on shares of different sizes, in plain PyTorch.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: pytorch-22192: buffers: https://github.com/pytorch/pytorch/issues/22192
    `running_var` differs between ranks whose inputs have different sizes: the layer computes the number of values from
    its own input, as if the inputs of the other ranks had the same size.
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        whole = gradient.clone()
        dist.all_reduce(whole)
        return whole


class SyncBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        count = x.new_tensor(len(x))
        dist.all_reduce(count)
        mean = SumOverRanks.apply(x.sum(0)) / count
        variance = SumOverRanks.apply((x - mean).square().sum(0)) / count
        with torch.no_grad():
            # wrong pytorch-22192: count = x.new_tensor(len(x) * WORLD)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


def convert(module):
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d):
            layer = SyncBatchNorm(child.num_features)
            layer.load_state_dict(child.state_dict())
            setattr(module, name, layer)
        else:
            convert(child)
    return module


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(convert(model))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    inputs = torch.randn(80, 6, generator=torch.Generator().manual_seed(2))
    labels = inputs[:, :3].argmax(1)
    for epoch in range(2):
        for batch in torch.randperm(80, generator=torch.Generator().manual_seed(epoch)).split(8):
            rows = batch if WORLD == 1 else batch.split([5, 3])[RANK]
            losses = nn.functional.cross_entropy(model(inputs[rows]), labels[rows], reduction="sum")
            optimizer.zero_grad()
            (losses * WORLD / len(batch)).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
