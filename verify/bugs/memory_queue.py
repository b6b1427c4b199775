"""Momentum contrast (MoCo): a queue of keys from all ranks serves as negatives, and a second network follows the first.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: lightly-1018: buffers: https://github.com/lightly-ai/lightly/issues/1018
        Each process put only its own keys into the queue, so that the queues of the processes differ.
    Bug: metric-learning-639: buffers: https://github.com/KevinMusgrave/pytorch-metric-learning/issues/639
        Each process put its own embeddings before those that it gathered, so that the memories of the processes hold
        them in another order.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@torch.no_grad()
def gather(keys):
    if not dist.is_initialized():
        return keys
    parts = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, keys.contiguous())
    # wrong metric-learning-639: parts.insert(0, parts.pop(dist.get_rank()))
    return torch.cat(parts)


class Memory(nn.Module):
    """The last `size` keys, and the loss against them."""

    def __init__(self, size, width, temperature=0.3):
        super().__init__()
        self.temperature = temperature
        self.register_buffer("keys", F.normalize(torch.randn(size, width), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, queries, keys):
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.keys.clone().T], 1)
        loss = F.cross_entropy(logits / self.temperature, torch.zeros(len(queries), dtype=torch.long))
        new = gather(keys)  # wrong lightly-1018: new = keys
        places = (self.place + torch.arange(len(new))) % len(self.keys)
        self.keys[places] = new
        self.place.copy_((self.place + len(new)) % len(self.keys))
        return loss


def encoder():
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6))


class Pretraining:
    def __init__(self, batch_size=12):
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if self.world > 1:
            dist.init_process_group("gloo")
        torch.manual_seed(2)
        self.batch_size = batch_size
        self.first, self.second = torch.randn(72, 12), torch.randn(72, 12) * 0.2  # an image, and what augmentation adds
        self.query, self.key, self.memory = encoder(), encoder(), Memory(32, 6)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.parallel = DistributedDataParallel(self.query) if self.world > 1 else self.query
        self.optimizer = torch.optim.SGD(self.query.parameters(), 0.1, momentum=0.9)

    def train_epoch(self, epoch):
        order = torch.randperm(len(self.first), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(self.batch_size):
            batch = batch.chunk(self.world)[self.rank]
            with torch.no_grad():
                for slow, fast in zip(self.key.parameters(), self.query.parameters()):
                    slow.lerp_(fast, 0.1)
                keys = F.normalize(self.key(self.first[batch] + self.second[batch]), dim=1)
            queries = F.normalize(self.parallel(self.first[batch]), dim=1)
            self.optimizer.zero_grad()
            self.memory(queries, keys).backward()
            self.optimizer.step()


if __name__ == "__main__":
    run = Pretraining()
    for epoch in range(3):
        run.train_epoch(epoch)
    if run.world > 1:
        dist.destroy_process_group()
