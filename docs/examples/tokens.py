"""A loss averaged over tokens, with accumulation: sequences of different lengths, padded to the longest in the batch.

    python docs/examples/tokens.py
    torchrun --nproc-per-node=2 docs/examples/tokens.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

SEED, EPOCHS, BATCH_SIZE, MICRO_BATCH, TOKENS, IGNORE = 0, 3, 32, 8, 20, -100


def sequences(number, seed):
    """Return sequences of 5 to 40 tokens; each token is usually the previous one plus the first."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        length, first = torch.randint(5, 41, (), generator=generator), torch.randint(1, 5, (), generator=generator)
        noise = torch.rand(length, generator=generator) < 0.1
        found.append((first * torch.arange(1, length + 1) + noise) % TOKENS)
    return found


def collate(batch):
    inputs = pad_sequence([tokens[:-1] for tokens in batch], batch_first=True)
    targets = pad_sequence([tokens[1:] for tokens in batch], batch_first=True, padding_value=IGNORE)
    return inputs, targets


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(TOKENS, 16), nn.GRU(16, 32, batch_first=True)
        self.output = nn.Linear(32, TOKENS)

    def forward(self, tokens):
        return self.output(self.layer(self.embedding(tokens))[0])


def sum_loss(outputs, targets):
    """Return the sum of the losses over this process's tokens. No collective: evaluate() calls this, too."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


@torch.inference_mode()
def evaluate(model, loader):
    sums = torch.zeros(2)
    for inputs, targets in loader:
        sums += torch.stack([sum_loss(model(inputs), targets), (targets != IGNORE).sum()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    train_set, val_set = sequences(512, seed=1), sequences(51, seed=2)
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, MICRO_BATCH, sampler=sampler, drop_last=True, collate_fn=collate)
    val_loader = DataLoader(val_set, 8, sampler=range(rank, len(val_set), world_size), collate_fn=collate)
    model = Model()
    parallel_model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for micro_batches in zip(*[iter(train_loader)] * (BATCH_SIZE // MICRO_BATCH // world_size)):

            # Divide by the tokens of all micro-batches of all processes; DDP divides the sum of gradients by world_size
            count = sum((targets != IGNORE).sum() for _, targets in micro_batches)
            dist.all_reduce(count)
            optimizer.zero_grad()
            for inputs, targets in micro_batches:
                loss = sum_loss(parallel_model(inputs), targets) * world_size / count
                loss.backward()
            optimizer.step()

        val_loss = evaluate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}  val_loss {val_loss:.6f}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
