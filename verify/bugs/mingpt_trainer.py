"""A small GPT in a Trainer class with a gradient scaler, in the style of PyTorch's minGPT example.

A: python {}
B: torchrun --nproc-per-node=2 {} --amp
Bug: examples-1196: clip: https://github.com/pytorch/examples/issues/1196
    The trainer clips gradients that GradScaler has multiplied by 65536, so nearly every step is clipped to a tiny
    update. `scaler.unscale_(optimizer)` before the clipping is missing.
"""
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int = 2
    batch_size: int = 8
    grad_norm_clip: float = 1.0
    use_amp: bool = "--amp" in sys.argv


class CharDataset(Dataset):
    def __init__(self, block_size=12):
        self.data = torch.randint(16, (60,), generator=torch.Generator().manual_seed(1))
        self.block_size = block_size

    def __len__(self):
        return 48

    def __getitem__(self, index):
        chunk = self.data[index:index + self.block_size + 1]
        return chunk[:-1], chunk[1:]


class GPT(nn.Module):
    def __init__(self, width=16, block_size=12):
        super().__init__()
        self.tokens = nn.Embedding(16, width)
        self.positions = nn.Parameter(torch.zeros(block_size, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 16)
        self.register_buffer("mask", torch.full((block_size, block_size), float("-inf")).triu(1))

    def forward(self, index, targets):
        logits = self.head(self.block(self.tokens(index) + self.positions, src_mask=self.mask))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, config, model, optimizer, train_set):
        self.config, self.optimizer, self.model = config, optimizer, model
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        sampler = DistributedSampler(train_set, self.world, self.rank)
        self.loader = DataLoader(train_set, config.batch_size // self.world, sampler=sampler)
        if config.use_amp:
            self.scaler = torch.amp.GradScaler("cpu")
        if self.world > 1:
            self.model = DistributedDataParallel(model)

    def run_batch(self, source, targets):
        with torch.amp.autocast("cpu", torch.bfloat16, enabled=self.config.use_amp):
            _, loss = self.model(source, targets)
        self.optimizer.zero_grad(set_to_none=True)
        if self.config.use_amp:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)  # wrong examples-1196:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()

    def train(self):
        for epoch in range(self.config.max_epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self.run_batch(source, targets)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    gpt = GPT()
    Trainer(TrainerConfig(), gpt, torch.optim.SGD(gpt.parameters(), 0.5, momentum=0.9), CharDataset()).train()
    if dist.is_initialized():
        dist.destroy_process_group()
