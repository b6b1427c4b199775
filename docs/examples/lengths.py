"""A `batch_sampler` that cuts batches of similar length, and a bidirectional layer, which would read padding.

    python docs/examples/lengths.py
    torchrun --nproc-per-node=2 docs/examples/lengths.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

SEED, EPOCHS, BATCH_SIZE, SIGNS, IGNORE = 0, 3, 16, 12, -100


def strings(number, seed):
    """Return pairs of equally long tensors: signs, and for each sign whether the two around it are equal."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 41, (number,), generator=generator).tolist()
    found = [torch.randint(SIGNS, (length,), generator=generator) for length in lengths]
    return [(signs, (signs.roll(1) == signs.roll(-1)).long()) for signs in found]


class ByLength:
    """Yields lists of indices, each of samples of similar length; their order depends on (seed, epoch)."""

    def __init__(self, lengths):
        self.lengths, self.epoch = torch.tensor(lengths), 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 * SEED + self.epoch)
        drawn = torch.randperm(len(self.lengths), generator=generator)[:len(self) * BATCH_SIZE]
        batches = drawn[self.lengths[drawn].argsort(stable=True)].view(-1, BATCH_SIZE)
        return iter(batches[torch.randperm(len(batches), generator=generator)].tolist())

    def __len__(self):
        return len(self.lengths) // BATCH_SIZE


class ShareOfBatches:
    """This process's share of each batch of a batch sampler, which must yield the same batches on every process."""

    def __init__(self, batches, rank, world_size):
        self.batches, self.rank, self.world_size = batches, rank, world_size

    def __iter__(self):
        for batch in self.batches:
            yield batch[self.rank::self.world_size]

    def __len__(self):
        return len(self.batches)


def collate(samples):
    signs, targets = zip(*samples)
    return list(signs), pad_sequence(targets, batch_first=True, padding_value=IGNORE)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(SIGNS, 8), nn.Linear(32, 2)
        self.layer = nn.GRU(8, 16, batch_first=True, bidirectional=True)

    def forward(self, signs):
        # Packed, the layer starts at the last sign of each string, not at the padding behind it
        packed = pack_sequence([self.embedding(each) for each in signs], enforce_sorted=False)
        return self.output(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    train_set = strings(330, seed=1)
    batches = ByLength([len(signs) for signs, _ in train_set])
    share = ShareOfBatches(batches, rank, world_size)
    loader = DataLoader(train_set, batch_sampler=share, collate_fn=collate)
    model = Tagger()
    parallel_model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    for epoch in range(EPOCHS):
        batches.epoch = epoch
        loss_sum = torch.zeros(())
        for signs, targets in loader:
            count = (targets != IGNORE).sum()
            dist.all_reduce(count)
            outputs = parallel_model(signs).flatten(0, 1)
            loss = F.cross_entropy(outputs, targets.flatten(), ignore_index=IGNORE, reduction="sum") / count
            optimizer.zero_grad()
            (loss * world_size).backward()
            optimizer.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss_sum.item() / len(loader):.6f}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
