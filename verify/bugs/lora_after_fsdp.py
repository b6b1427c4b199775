"""LoRA adapters that are added to a frozen network after FSDP2 has sharded it, and averaged by hooks.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: fastvideo-1666: not-averaged: https://github.com/hao-ai-lab/FastVideo/pull/1666
        FSDP does not know adapters that are added after the wrap, so that nobody averaged their gradients, and the
        adapters of the ranks drifted apart.
    Bug: onetrainer-803: start: https://github.com/Nerogar/OneTrainer/pull/803
        Each process drew its own initial adapters.
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class LoRALinear(nn.Module):
    def __init__(self, base, rank=3, alpha=6):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T * self.scale


class Network(nn.Module):
    def __init__(self, width=16, classes=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def average(weight):
    dist.all_reduce(weight.grad)
    weight.grad /= dist.get_world_size()


def add_adapters(network, distributed):
    # wrong onetrainer-803: torch.manual_seed(100 + dist.get_rank())
    for number, layer in enumerate(network.layers):
        adapter = LoRALinear(layer)
        for weight in (adapter.down, adapter.up) if distributed else ():
            dist.broadcast(weight.data, 0)  # wrong onetrainer-803: pass
            weight.register_post_accumulate_grad_hook(average)  # wrong fastvideo-1666: pass
        network.layers[number] = adapter


def main():
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    world, rank = (dist.get_world_size(), dist.get_rank()) if distributed else (1, 0)
    torch.manual_seed(8)
    data, labels, network = torch.randn(96, 16), torch.randint(4, (96,)), Network()
    network.layers.requires_grad_(False)
    if distributed:
        fully_shard(network, mesh=dist.init_device_mesh("cpu", (world,)))
    add_adapters(network, distributed)
    optimizer = torch.optim.AdamW([w for w in network.parameters() if w.requires_grad], 0.02)
    for epoch in range(2):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(12):
            batch = batch[rank::world]
            loss = nn.functional.cross_entropy(network(data[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
