"""Attention over a sequence that is split over ranks: keys and values are gathered, as Llama 3 did.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: accelerate-76: no-backward: https://github.com/huggingface/accelerate/issues/76
    A gather without a backward pass: only a rank's own part keeps its gradient.
Bug: positions: forward: The positions start at 0 on every rank.
Bug: mask: forward: The causal mask is not shifted by the rank's first position.
Bug: SkyRL-1420: scale: https://github.com/NovaSky-AI/SkyRL/issues/1420 and
    https://github.com/verl-project/verl/issues/4250
    The loss is also divided by the number of ranks that share a sequence.
Bug: transformers-48167: metric: https://github.com/huggingface/transformers/issues/48167
    The loss that is shown is the sum over the ranks that share a sequence.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LENGTH, WIDTH, VOCABULARY = 16, 8, 12


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)  # wrong accelerate-76:
        return grad.chunk(SIZE, 1)[RANK]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if SIZE > 1:
            k, v = GatherSequence.apply(k), GatherSequence.apply(v)
        first = RANK * x.shape[1]  # wrong mask: first = 0
        mask = torch.ones(x.shape[1], LENGTH, dtype=torch.bool).tril(first)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.head = Attention(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1]) + RANK * tokens.shape[1]
        # wrong positions: places = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(places)
        return self.head(x + self.attention(x))


def take(batch):
    """Return this rank's part of each sequence, and its labels."""
    inputs, labels = batch[:, :-1], batch[:, 1:]
    return inputs.chunk(SIZE, 1)[RANK], labels.chunk(SIZE, 1)[RANK]


if __name__ == "__main__":
    if SIZE > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(11)
    model = Model()
    data = torch.randint(VOCABULARY, (48, LENGTH + 1))
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(3):
        total = torch.zeros(())
        for batch in loader:
            inputs, labels = take(batch)
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()  # wrong SkyRL-1420: (loss / SIZE).backward()
            for parameter in model.parameters():
                if SIZE > 1:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= SIZE
            optimizer.step()
            total += loss.detach() / len(loader)
        if SIZE > 1:
            dist.all_reduce(total)
            total /= SIZE  # wrong transformers-48167:
        if RANK == 0:
            print(f"epoch {epoch} loss {total.item():.5f}")
    if SIZE > 1:
        dist.destroy_process_group()
