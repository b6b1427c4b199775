"""A sequence model under FSDP2 with a schedule and clipping, in functions, in the style of fine-tuning scripts.

A: python {}
B: torchrun --nproc-per-node=2 {}
Bug: accelerate-2665: no-gradient: https://github.com/huggingface/accelerate/issues/2665
    The loss stays flat: the optimizer is created from the model's own parameters, and FSDP then gives the model other
    parameters, so the optimizer steps on tensors that nobody uses (issue 3256 explains it).
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Summarizer(nn.Module):
    def __init__(self, vocabulary=40, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, bias=False) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(model):
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def train(model, loader, optimizer, scheduler, epochs):
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for tokens, labels in loader:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = Summarizer()
    # wrong accelerate-2665: optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    if world > 1:
        dist.init_process_group("gloo")
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)  # wrong accelerate-2665:
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    tokens = torch.randint(40, (64, 8), generator=torch.Generator().manual_seed(1))
    texts = TensorDataset(tokens, tokens.flip(1))
    sampler = DistributedSampler(texts, world, int(os.environ.get("RANK", 0)))
    train(model, DataLoader(texts, 8 // world, sampler=sampler), optimizer, scheduler, epochs=2)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
