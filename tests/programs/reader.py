"""Reads data as train_DDP.py does on two processes and on one, and saves what came, epoch by epoch, to a folder.

    PYTHONPATH=. torchrun --nproc-per-node=2 tests/programs/reader.py FOLDER
"""
import itertools
import os
import sys

import torch
from torch.utils.data import DataLoader, DistributedSampler

from common import datasets

folder = sys.argv[1]
rank = int(os.environ["RANK"])
full, _ = datasets.create_datasets("fake", "", 0, "")
train_set = datasets.ArrayDataset("fake", full.images[:62], full.labels[:62], 7, augment=True)
for world_size, workers in itertools.product((1, 2)[rank:], (0, 1, 2)):
    sampler = DistributedSampler(train_set, world_size, rank, seed=7, drop_last=True)
    options = datasets.loader_options(workers, torch.device("cpu"), train_set)
    loader = DataLoader(train_set, 12 // world_size, sampler=sampler, drop_last=True, **options)
    for epoch in (1, 2):
        train_set.set_epoch(epoch)
        sampler.set_epoch(epoch)
        batches = [images for images, labels in loader]
        torch.save(batches, f"{folder}/{world_size}-{rank}-{workers}-{epoch}.pt")
