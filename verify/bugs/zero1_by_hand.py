"""An optimizer that shards its states over data parallel ranks (ZeRO stage 1), written by hand around torch's Adam.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: ramtorch-13: optimizer: https://github.com/lodestone-rock/RamTorch/issues/13
        After the step, the broadcast skipped the weights of offloaded linear layers, which are nearly all of the
        model. Only the rank that owns a weight had its new value, and the loss stayed flat.
    Bug: pytorch-149768: clip: https://github.com/pytorch/pytorch/issues/149768
        The constant 1e-6 that guards the division by the gradient norm was added to each shard's norm, before these
        norms were combined.
"""
import os

import torch
import torch.distributed as dist
from torch import nn


class ShardedAdam:
    """Each rank updates a part of the weights, and sends them to the others."""

    def __init__(self, weights, world, rank, lr, max_norm):
        self.weights, self.world, self.rank, self.max_norm = list(weights), world, rank, max_norm
        loads, self.owners = [0] * world, []
        for weight in self.weights:
            self.owners.append(loads.index(min(loads)))
            loads[self.owners[-1]] += weight.numel()
        self.mine = [weight for weight, owner in zip(self.weights, self.owners) if owner == rank]
        self.adam = torch.optim.Adam(self.mine, lr)

    def average_gradients(self):
        for weight in self.weights if self.world > 1 else ():
            dist.all_reduce(weight.grad)
            weight.grad /= self.world

    def combine(self, norm):
        """The norm of the whole from the norms of the shards."""
        square = norm.square()
        if self.world > 1:
            dist.all_reduce(square)
        return square.sqrt()

    def clip(self):
        norm = torch.stack([weight.grad.norm() for weight in self.mine]).norm()
        norm = self.combine(norm) + 1e-6  # wrong pytorch-149768: norm = self.combine(norm + 1e-6)
        for weight in self.mine:
            weight.grad.mul_((self.max_norm / norm).clamp(max=1))

    def step(self):
        self.average_gradients()
        self.clip()
        self.adam.step()
        for weight, owner in zip(self.weights, self.owners):
            # wrong ramtorch-13: if getattr(weight, "offloaded", False): continue
            if self.world > 1:
                dist.broadcast(weight.data, owner)
        for weight in self.weights:
            weight.grad = None


class Offloaded(nn.Linear):
    """A linear layer whose weights could stay in the memory of the host."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        for weight in self.parameters():
            weight.offloaded = True


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(Offloaded(10, 24), nn.LayerNorm(24), nn.GELU(), Offloaded(24, 24), nn.Linear(24, 3))
    inputs, labels = torch.randn(96, 10), torch.randint(3, (96,))
    optimizer = ShardedAdam(model.parameters(), world, rank, lr=0.01, max_norm=0.3)
    for epoch in range(3):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(16):
            batch = batch[rank::world]
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
