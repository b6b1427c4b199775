"""A language model whose loss is a mean over tokens, accumulated over micro-batches and ranks, in plain functions.

A: python {}
B: torchrun --nproc-per-node=2 {} --accum 2
Bug: transformers-34191: uneven-mean: https://github.com/huggingface/transformers/pull/34191
    Accumulation differs from the full batch: each micro-batch has its own mean over its tokens, and the step takes
    the mean of these means, although the micro-batches hold different numbers of tokens.
Bug: transformers-34242: uneven-mean: https://github.com/huggingface/transformers/issues/34242
    DDP differs from one device: the number of tokens is summed over the micro-batches of a rank, not over ranks.
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args()


def make_texts(rows=64, length=10):
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, 24, (rows, length + 1), generator=generator)
    lengths = torch.randint(2, length + 1, (rows, 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.arange(length) >= lengths, -100)
    return tokens[:, :-1], labels


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def count_tokens(micro_batches, world):
    """Labels that count, over all micro-batches and ranks, divided by the ranks that DDP averages over."""
    count = sum((labels != -100).sum() for _, labels in micro_batches)
    if world > 1:
        dist.all_reduce(count)  # wrong transformers-34242: return count
    return count / world


def train_step(model, optimizer, micro_batches, world):
    count = count_tokens(micro_batches, world)
    for tokens, labels in micro_batches:
        logits = model(tokens).transpose(1, 2)
        loss = cross_entropy(logits, labels, reduction="sum") / count
        # wrong transformers-34191: loss = cross_entropy(logits, labels) / len(micro_batches)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main():
    args = parse()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model = make_model()
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    tokens, labels = make_texts()
    for epoch in range(args.epochs):
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(args.batch_size):
            parts = batch[rank::world].chunk(args.accum)
            train_step(model, optimizer, [(tokens[part], labels[part]) for part in parts], world)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
