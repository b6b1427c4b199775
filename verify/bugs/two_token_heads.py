"""A language model that also predicts the word after the next one, with DDP and losses divided by tokens at the end.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: megatron-7452-mtp: uneven-mean: https://github.com/NVIDIA/Megatron-LM/issues/7452
        Finding 3: the loss of the second prediction was weighted by each rank's own counts of tokens, which gave a
        gradient of 14/3 where 4 is right.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, LENGTH, BATCH = 20, 16, 10, 8


class TwoTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.trunk = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        hidden, _ = self.trunk(self.words(ids))
        after = self.second(torch.cat([hidden, self.words(ids.roll(-1, 1))], 2)).tanh()
        return self.head(hidden), self.head(after)


def token_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def total(count):
    count = count.clone()
    if dist.is_initialized():
        dist.all_reduce(count)
    return count


def shift(labels):
    labels = labels.roll(-1, 1)
    labels[:, -1] = -100
    return labels


def batches(steps, rank, world):
    """Texts of different lengths, in which only the answer counts."""
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(VOCABULARY, (6 * BATCH, LENGTH), generator=generator)
    starts = torch.randint(0, LENGTH - 2, (6 * BATCH, 1), generator=generator)
    labels = texts.masked_fill(torch.arange(LENGTH) < starts, -100)
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH).remainder(len(texts)).chunk(world)[rank]
        yield texts[rows], shift(labels[rows])


def run(steps=18, mtp_scale=0.5):
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = TwoTokens()
    parallel_model = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for ids, labels in batches(steps, rank, world):
        first, second = parallel_model(ids)
        loss, count = token_sum(first, labels)
        mtp_loss, mtp_count = token_sum(second, shift(labels))
        weight = total(count) / total(mtp_count)  # wrong megatron-7452-mtp: weight = count / mtp_count.clamp(min=1)
        optimizer.zero_grad()
        (loss + mtp_scale * weight * mtp_loss).backward()
        tokens = total(count)
        for parameter in model.parameters():
            parameter.grad *= world / tokens
        optimizer.step()
    if world > 1:
        dist.destroy_process_group()


run()
