"""Reads from a DataLoader whose two workers start by the method that the command line names, and waits.

    PYTHONPATH=. python tests/programs/loading.py forkserver
"""
import sys

import torch
from torch.utils.data import DataLoader

from common import loading

if __name__ == "__main__":
    numbers = [(number, number) for number in range(1000)]
    options = loading.options(2, torch.device("cpu"), numbers) | {"multiprocessing_context": sys.argv[1]}
    for _ in DataLoader(numbers, 1, **options):
        print("reading", flush=True)
        sys.stdin.read()
