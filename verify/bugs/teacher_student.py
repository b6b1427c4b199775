"""Self-distillation as in DINO: a teacher that averages the student, a center of its outputs, and accumulation.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: lightly-train-968: buffers|forward: https://github.com/lightly-ai/lightly-train/issues/968
        With accumulation, the teacher and the center were updated after each micro-batch, so that later micro-batches
        of a step saw a different teacher.
    Options lightly-train-968: --accum 2
    Bug: f5-tts-631: buffers: https://github.com/SWivid/F5-TTS/issues/631
        The moving average of the weights was updated in each micro-batch, not in each step of the optimizer.
    Options f5-tts-631: --accum 2
"""
import argparse
import contextlib
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Average(nn.Module):
    """A moving average of a network's weights."""

    def __init__(self, network, momentum):
        super().__init__()
        self.network, self.momentum = copy.deepcopy(network).requires_grad_(False), momentum

    def forward(self, x):
        return self.network(x)

    @torch.no_grad()
    def update(self, network):
        for mine, new in zip(self.network.parameters(), network.parameters()):
            mine.lerp_(new, 1 - self.momentum)


class DistillationLoss(nn.Module):
    def __init__(self, outputs, momentum=0.9):
        super().__init__()
        self.register_buffer("center", torch.zeros(outputs))
        self.momentum, self.sum, self.count = momentum, torch.zeros(outputs), 0

    def forward(self, student, teacher):
        self.sum, self.count = self.sum + teacher.sum(0), self.count + len(teacher)
        targets = ((teacher - self.center) / 0.2).softmax(1)
        return -(targets * (student / 0.5).log_softmax(1)).sum(1).mean()

    def update_center(self):
        if dist.is_initialized():
            dist.all_reduce(self.sum)
            self.count *= dist.get_world_size()
        self.center.lerp_(self.sum / self.count, 1 - self.momentum)
        self.sum, self.count = torch.zeros_like(self.center), 0


class Trainer:
    def __init__(self, args):
        self.args = args
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if self.world > 1:
            dist.init_process_group("gloo")
        torch.manual_seed(6)
        self.images, self.noise = torch.randn(64, 14), torch.randn(2, 64, 14) * 0.3
        self.student = nn.Sequential(nn.Linear(14, 24), nn.GELU(), nn.Linear(24, 10))
        self.teacher, self.average = Average(self.student, 0.8), Average(self.student, 0.95)
        self.loss = DistillationLoss(10)
        self.parallel = DDP(self.student) if self.world > 1 else self.student
        self.optimizer = torch.optim.AdamW(self.student.parameters(), 0.01)

    def step(self, batch):
        self.optimizer.zero_grad()
        parts = batch.chunk(self.args.accum)
        for number, part in enumerate(parts):
            part = part.chunk(self.world)[self.rank]
            last = number == len(parts) - 1
            with contextlib.nullcontext() if last or self.world == 1 else self.parallel.no_sync():
                seen, target = (self.images[part] + noise[part] for noise in self.noise)
                loss = self.loss(self.parallel(seen), self.teacher(target))
                (loss / len(parts)).backward()
            # wrong lightly-train-968: self.teacher.update(self.student)
            # wrong lightly-train-968: self.loss.update_center()
            # wrong f5-tts-631: self.average.update(self.student)
        self.optimizer.step()
        self.teacher.update(self.student)  # wrong lightly-train-968:
        self.loss.update_center()  # wrong lightly-train-968:
        self.average.update(self.student)  # wrong f5-tts-631:

    def fit(self):
        for epoch in range(self.args.epochs):
            order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(epoch))
            for batch in order.split(16):
                self.step(batch)
        if self.world > 1:
            dist.destroy_process_group()


parser = argparse.ArgumentParser()
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--epochs", type=int, default=4)
trainer = Trainer(parser.parse_args())
trainer.fit()
