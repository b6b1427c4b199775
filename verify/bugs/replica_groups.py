"""A convolutional network in replica groups that a manager keeps together, in the style of torchft's train_ddp.py.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: torchft-train-ddp: set-epoch: https://github.com/pytorch/torchft/blob/main/train_ddp.py
    The loop counts steps, not epochs, and never calls `sampler.set_epoch`, so each pass has the same order.
"""
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

REPLICA_GROUP = int(os.environ.get("RANK", 0))
REPLICA_GROUPS = int(os.environ.get("WORLD_SIZE", 1))
STEPS = 20


class Manager:
    """Counts steps and adds up gradients over the groups that take part."""

    def __init__(self):
        self.step = 0

    def start_quorum(self):
        if REPLICA_GROUPS > 1:
            here = torch.ones(())
            dist.all_reduce(here)
            self.participants = int(here)

    def allreduce(self, parameter):
        if REPLICA_GROUPS > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.participants)

    def should_commit(self):
        self.step += 1
        return True


class ManagedModel(nn.Module):
    def __init__(self, manager, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(manager.allreduce)

    def forward(self, *inputs):
        return self.module(*inputs)


class ManagedOptimizer:
    def __init__(self, manager, optimizer):
        self.manager, self.optimizer = manager, optimizer

    def zero_grad(self):
        self.manager.start_quorum()
        self.optimizer.zero_grad()

    def step(self):
        if self.manager.should_commit():
            self.optimizer.step()


def main():
    if REPLICA_GROUPS > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(40, 1, 8, 8)
    dataset = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
    if REPLICA_GROUPS > 1:
        sampler = DistributedSampler(dataset, num_replicas=REPLICA_GROUPS, rank=REPLICA_GROUP, shuffle=True)
    else:
        sampler = RandomSampler(dataset, generator=torch.Generator())
    loader = DataLoader(dataset, batch_size=8 // REPLICA_GROUPS, sampler=sampler)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    manager = Manager()
    model = ManagedModel(manager, network)
    optimizer = ManagedOptimizer(manager, optim.AdamW(model.parameters(), lr=0.01))
    criterion = nn.CrossEntropyLoss()
    passes = 0
    while manager.step < STEPS:
        if REPLICA_GROUPS > 1:
            sampler.set_epoch(passes)  # wrong torchft-train-ddp: pass
        else:
            sampler.generator.manual_seed(passes)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
        passes += 1
    if REPLICA_GROUPS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
