"""Gradient accumulation with no_sync and clipping.

A: python {} --accum-steps 4
B: torchrun --nproc-per-node=2 {} --accum-steps 2
Bug: micro-batches-summed: scale: The loss is not divided by the number of micro-batches.
Bug: always-no-sync: not-averaged: no_sync() also covers the last micro-batch.
Bug: clip-each: clip: Each micro-batch clips the gradient.
Bug: no-weight-decay: optimizer: One program has no weight decay.
Options micro-batches-summed: --max-norm 100
"""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--accum-steps", type=int, default=4)
parser.add_argument("--micro-batch", type=int, default=16)
parser.add_argument("--max-norm", type=float, default=0.2)
args = parser.parse_args()

ddp = int(os.environ.get("RANK", -1)) != -1  # did torchrun start us?
if ddp:
    dist.init_process_group("gloo")
rank = dist.get_rank() if ddp else 0
world_size = dist.get_world_size() if ddp else 1
master_process = rank == 0

torch.manual_seed(1337)
inputs = torch.randn(512, 10)
targets = inputs.cumsum(1)[:, ::3].tanh()
train_set = TensorDataset(inputs, targets)
sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
train_loader = DataLoader(train_set, batch_size=args.micro_batch, sampler=sampler)

raw_model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
model = DDP(raw_model) if ddp else raw_model
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-2, betas=(0.9, 0.95))
# wrong no-weight-decay: optimizer.param_groups[0]["weight_decay"] = 0

for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(train_loader):
        last = (i + 1) % args.accum_steps == 0
        # wrong always-no-sync: last = False
        with model.no_sync() if ddp and not last else contextlib.nullcontext():
            loss = nn.functional.mse_loss(model(x), y)
            loss = loss / args.accum_steps  # wrong micro-batches-summed:
            loss.backward()
        # wrong always-no-sync: last = (i + 1) % args.accum_steps == 0
        # wrong clip-each: nn.utils.clip_grad_norm_(raw_model.parameters(), args.max_norm)
        if last:
            nn.utils.clip_grad_norm_(raw_model.parameters(), args.max_norm)  # wrong clip-each:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"epoch {epoch}: loss {loss.item() * args.accum_steps:.4f}")

if ddp:
    dist.destroy_process_group()
