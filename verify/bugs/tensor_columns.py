"""A transformer block cut by hand over tensor ranks, with q, k and v packed in one tensor, as Megatron does.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: megatron-7452-norm: partial: https://github.com/NVIDIA/Megatron-LM/issues/7452
        Finding 11: the weight of a norm after attention is shared by all heads, and each tensor rank has a part of
        them. Nobody added the gradients of the copies, which drifted apart.
    Bug: megatron-7452-sinks: clip: https://github.com/NVIDIA/Megatron-LM/issues/7452
        Finding 8: the attention sinks, one for each head, were not marked as cut. The norm for the clipping counted
        those of the first tensor rank only.
"""
import os

import torch
import torch.distributed as dist
from torch import nn

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def add_up(tensor):
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


class EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return add_up(grad)


class LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add_up(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def cut(whole, dim, *shape):
    """This rank's part of a weight that every rank draws as a whole."""
    part = nn.Parameter(whole.chunk(WORLD, dim)[RANK].reshape(shape))
    part.cut = True
    return part


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads // WORLD, width // heads
        self.qkv = cut(torch.randn(3, heads, self.size, width) * 0.3, 1, -1, width)
        self.out = cut(torch.randn(width, heads, self.size) * 0.3, 1, width, -1)
        self.sinks = cut(torch.randn(heads), 0, -1)
        # wrong megatron-7452-sinks: self.sinks.cut = False
        self.head_norm = nn.Parameter(torch.ones(self.size))
        self.head_norm.add_gradients = True  # wrong megatron-7452-norm:

    def forward(self, x):
        batch, length, _ = x.shape
        packed = EnterRegion.apply(x) @ self.qkv.T
        q, k, v = packed.view(batch, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) / self.size ** 0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        sinks = self.sinks.view(1, -1, 1, 1).expand(batch, -1, length, 1)
        y = torch.cat([scores, sinks], 3).softmax(3)[..., :-1] @ v
        y = y * (y.square().mean(3, keepdim=True) + 1e-3).rsqrt() * self.head_norm
        return LeaveRegion.apply(y.transpose(1, 2).flatten(2) @ self.out.T)


class Block(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.attention, self.norm, self.last_norm = Attention(width, heads), nn.LayerNorm(width), nn.LayerNorm(width)
        self.up = cut(torch.randn(4 * width, width) * 0.3, 0, -1, width)
        self.down = cut(torch.randn(width, 4 * width) * 0.1, 1, width, -1)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        hidden = nn.functional.gelu(EnterRegion.apply(self.last_norm(x)) @ self.up.T)
        return x + LeaveRegion.apply(hidden @ self.down.T)


def clip(model, limit):
    """Clip by the norm of the whole model: a cut weight counts on every rank, a copy on the first one."""
    counted = [weight.grad for weight in model.parameters() if RANK == 0 or getattr(weight, "cut", False)]
    norm = add_up(sum(grad.square().sum() for grad in counted)).sqrt()
    for weight in model.parameters():
        weight.grad *= (limit / norm).clamp(max=1)


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(3)
model = Block()
inputs, targets = torch.randn(4, 8, 6, 16), torch.randn(4, 8, 6, 16)
optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
for step in range(16):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs[step % 4]), targets[step % 4]).backward()
    for weight in model.parameters():
        if getattr(weight, "add_gradients", False):
            weight.grad = add_up(weight.grad)
    clip(model, 0.05)
    optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
