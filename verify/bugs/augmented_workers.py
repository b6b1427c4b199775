"""Images with random shifts and noise from loader workers, in functions, in the style of image training scripts.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: transformers-37932: samples: https://github.com/huggingface/transformers/issues/37932
    All ranks augment alike: worker n of every rank has the same seed, because the seed of a worker depends on the
    seed of its process, which is the same on every rank, and on the worker's number.
"""
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Images(Dataset):
    def __init__(self, seed=0):
        self.images = torch.randn(32, 1, 10, 10, generator=torch.Generator().manual_seed(seed))
        self.labels = (self.images.mean((1, 2, 3)) > 0).long()
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed((self.seed * 1000 + self.epoch) * 1000 + index)
        # wrong transformers-37932: chance = None
        image = self.images[index]
        top, left = torch.randint(3, (2,), generator=chance).tolist()
        image = image[:, top:top + 8, left:left + 8]
        if torch.rand((), generator=chance) < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn(image.shape, generator=chance), self.labels[index]


def seed_worker(number):
    random.seed(torch.initial_seed() % 2**32)


def make_loader(dataset, rank, world):
    sampler = DistributedSampler(dataset, world, rank, seed=dataset.seed)
    return DataLoader(dataset, 8 // world, sampler=sampler, num_workers=1, worker_init_fn=seed_worker)


def train_one_epoch(model, loader, optimizer):
    model.train()
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2))
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    dataset = Images()
    loader = make_loader(dataset, rank, world)
    for epoch in range(3):
        dataset.epoch = epoch
        loader.sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer)
        schedule.step()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
