"""A GPT on one long stream of tokens, without a DataLoader, in the style of build-nanogpt's single script.

A: python {}
B: torchrun --nproc-per-node=2 {} 2
Bug: build-nanogpt-30: not-averaged: https://github.com/karpathy/build-nanogpt/pull/30
    Accumulation over 4 micro-batches trains worse than one batch: the flag that asks DDP for the reduction is set
    after the forward pass, but DDP looks at it in the forward pass, too.
"""
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab=32, width=16, block=8):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block, width)
        self.h, self.ln_f = Block(width, 2), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
accum = int(sys.argv[1]) if len(sys.argv) > 1 else 1
B, T, steps = 8 // (world * accum), 8, 20
tokens = torch.randint(32, (1400,), generator=torch.Generator().manual_seed(1337))
position = B * T * rank


def next_batch():
    global position
    chunk = tokens[position:position + B * T + 1]
    position += B * T * world
    if position + B * T * world + 1 > len(tokens):
        position = B * T * rank
    return chunk[:-1].view(B, T), chunk[1:].view(B, T)


torch.manual_seed(1337)
model = GPT()
raw = model
if ddp:
    model = DDP(model)
matrices, vectors = [p for p in raw.parameters() if p.dim() > 1], [p for p in raw.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                              lr=6e-3, betas=(0.9, 0.95))
for step in range(steps):
    optimizer.zero_grad()
    for micro in range(accum):
        x, y = next_batch()
        model.require_backward_grad_sync = micro == accum - 1  # wrong build-nanogpt-30:
        _, loss = model(x, y)
        # wrong build-nanogpt-30: model.require_backward_grad_sync = micro == accum - 1
        (loss / accum).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 6e-3 * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    optimizer.step()
if ddp:
    dist.destroy_process_group()
