"""A loss averaged over tokens: sequences of different lengths, padded to the longest in the batch.

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

SEED, EPOCHS, BATCH_SIZE, TOKENS, IGNORE = 0, 3, 32, 20, -100


def sequences(number):
    """Return sequences of 5 to 40 tokens; each token is usually the previous one plus the first."""
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for _ in range(number):
        length, first = torch.randint(5, 41, (), generator=generator), torch.randint(1, 5, (), generator=generator)
        noise = torch.rand(length, generator=generator) < 0.1
        found.append((first * torch.arange(1, length + 1) + noise) % TOKENS)
    return found


def collate(batch):
    inputs = pad_sequence([tokens[:-1] for tokens in batch], batch_first=True)
    labels = pad_sequence([tokens[1:] for tokens in batch], batch_first=True, padding_value=IGNORE)
    return inputs, labels


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(TOKENS, 16), nn.GRU(16, 32, batch_first=True)
        self.output = nn.Linear(32, TOKENS)

    def forward(self, tokens):
        return self.output(self.layer(self.embedding(tokens))[0])


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    train_set = sequences(512)
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, drop_last=True, collate_fn=collate)
    model = Model()
    parallel_model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for inputs, labels in loader:
            outputs = parallel_model(inputs)
            loss_sum = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")

            # Divide by the tokens of all processes; DDP divides the sum of the gradients by world_size
            count = (labels != IGNORE).sum()
            dist.all_reduce(count)
            loss = loss_sum * world_size / count

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss_sum.detach(), count / world_size])

        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}  loss per token {sums[0] / sums[1]:.6f}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
