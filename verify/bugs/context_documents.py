"""Attention over packed documents: each rank holds a part of every sequence, and gathers keys and values.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: axolotl-4002: forward: https://github.com/axolotl-ai-cloud/axolotl/pull/4002
        With context parallelism, attention ignored the borders of the documents in a packed sequence, and the loss was
        1.83 times as large.
    Bug: seq1f1b-6: forward: https://github.com/thunlp/Seq1F1B/issues/6
        Positions started at zero in each part of a sequence: the loss started at 11.4 instead of 2.
    Bug: megatron-7452-tokens: uneven-mean: https://github.com/NVIDIA/Megatron-LM/issues/7452
        Finding 9: each rank divided its loss by the tokens that count in its part of the sequence, and the gradients
        were averaged.
    Bug: pytorch-192920: no-backward: https://github.com/pytorch/pytorch/issues/192920
        On gloo, a scatter into a tensor that is not contiguous writes its values in the wrong places, silently. The
        backward pass of torch.distributed.nn.functional.all_gather does so where keys are used transposed.
"""
import math
import os

import torch
import torch.distributed as dist
from torch import nn

# wrong pytorch-192920: import torch.distributed.nn.functional as nnf

WORDS, WIDTH, LENGTH = 16, 12, 12


class AllGather(torch.autograd.Function):
    """Concatenate the parts of a sequence (dimension 1); backward, add up what all ranks send to this part."""

    @staticmethod
    def forward(ctx, part, world, rank):
        ctx.world, ctx.rank = world, rank
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(world)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(ctx.world, 1)[ctx.rank], None, None


def gather(part, world, rank):
    return AllGather.apply(part, world, rank)  # wrong pytorch-192920: return torch.cat(nnf.all_gather(part), 1)


class Attention(nn.Module):
    def __init__(self, world, rank):
        super().__init__()
        self.world, self.rank = world, rank
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x, documents):
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.world > 1:
            k, v = (gather(part, self.world, self.rank) for part in (k, v))
        places = torch.arange(LENGTH)
        mine = slice(self.rank * x.shape[1], (self.rank + 1) * x.shape[1])
        allowed = places[mine].unsqueeze(1) >= places
        allowed = allowed & (documents[:, mine].unsqueeze(2) == documents.unsqueeze(1))  # wrong axolotl-4002:
        scores = q @ k.transpose(1, 2) / math.sqrt(WIDTH)
        return x + scores.masked_fill(~allowed, -math.inf).softmax(2) @ v


class Model(nn.Module):
    def __init__(self, world, rank):
        super().__init__()
        self.world, self.rank = world, rank
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention(world, rank) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, documents):
        places = torch.arange(ids.shape[1])
        places = places + self.rank * ids.shape[1]  # wrong seq1f1b-6:
        x = self.words(ids) + self.places(places)
        for layer in self.layers:
            x = layer(x, documents)
        return self.head(x)


def packed(number):
    """Sequences of several documents, and labels: the next word of the same document, if there is one."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(WORDS, (4, LENGTH), generator=generator)
    documents = (torch.rand(4, LENGTH, generator=generator) < 0.3).cumsum(1)
    labels = ids.roll(-1, 1)
    labels[documents != documents.roll(-1, 1)] = -100
    labels[:, -1] = -100
    return ids, documents, labels


world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(7)
model = Model(world, rank)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for step in range(12):
    ids, documents, labels = packed(step % 4)
    ids, labels = ids.chunk(world, 1)[rank], labels.chunk(world, 1)[rank]
    logits = model(ids, documents)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    if world > 1:
        dist.all_reduce(count)  # wrong megatron-7452-tokens: count = count * world
    optimizer.zero_grad()
    (loss / count).backward()
    for weight in model.parameters() if world > 1 else ():
        dist.all_reduce(weight.grad)
    optimizer.step()
if world > 1:
    dist.destroy_process_group()
