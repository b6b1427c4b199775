"""Reads from a DataLoader whose two workers start by the method that the command line names, and waits.

    PYTHONPATH=. python tests/programs/loading.py forkserver
"""
import sys

import torch
from torch.utils.data import DataLoader

from common.datasets import loader_options


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return index, index


if __name__ == "__main__":
    options = loader_options(2, torch.device("cpu"), Numbers()) | {"multiprocessing_context": sys.argv[1]}
    for _ in DataLoader(Numbers(), 1, **options):
        print("reading", flush=True)
        sys.stdin.read()
