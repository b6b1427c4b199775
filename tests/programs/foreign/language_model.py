"""A small causal transformer on sentences of different lengths.

    python language_model.py
    torchrun --nproc-per-node=2 language_model.py
"""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

PAD, VOCAB, MAX_LEN, STEPS = 0, 31, 20, 16


class TinyGPT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(MAX_LEN, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        length = ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.tokens(ids) + self.positions(torch.arange(length))
        return self.head(self.blocks(hidden, mask=future))


def make_sentences(count):
    g = torch.Generator().manual_seed(2)
    sentences = []
    for length in torch.randint(4, MAX_LEN, (count,), generator=g).tolist():
        words = [int(torch.randint(1, VOCAB, (), generator=g))]
        while len(words) <= length:
            words.append((3 * words[-1] + int(torch.randint(2, (), generator=g))) % (VOCAB - 1) + 1)
        sentences.append(torch.tensor(words))
    return sentences


def warmup_cosine(step, warmup=4):
    return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup)))


def main():
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    sentences = make_sentences(256)
    sampler = DistributedSampler(sentences, world_size, rank)
    loader = DataLoader(sentences, 32 // world_size, sampler=sampler,
                        collate_fn=lambda batch: pad_sequence(batch, batch_first=True, padding_value=PAD))
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine)
    net = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model

    for epoch in range(STEPS // len(loader)):
        sampler.set_epoch(epoch)
        for batch in loader:
            logits, targets = net(batch[:, :-1]), batch[:, 1:]
            loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
            tokens = (targets != PAD).sum()
            if world_size > 1:
                dist.all_reduce(tokens)
            loss = loss_sum / tokens * world_size  # DDP divides by the number of processes
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.5f}")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
