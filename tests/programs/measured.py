"""train_combined.py, which prints on each rank the sum of BatchNorm's statistics of each model that it measures."""
import sys

import torch
import torch.distributed as dist

import train_combined as script

measure = script.evaluate


def evaluate(model: torch.nn.Module, *arguments: object) -> object:
    total = sum(buffer.double().sum().item() for buffer in model.buffers())
    sys.stdout.write(f"rank {dist.get_rank()} measures: {total!r}\n")  # one write: print() makes two
    sys.stdout.flush()
    return measure(model, *arguments)


script.evaluate = evaluate
args = script.parse_args()
script.join_group(args)
script.main(args)
dist.destroy_process_group()
