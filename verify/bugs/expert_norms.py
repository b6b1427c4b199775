"""A mixture of experts: each rank holds a part of the experts and reads its own samples, and gradients are clipped.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: colossalai-2192: clip: https://github.com/hpcaitech/ColossalAI/issues/2192
        The gradient norm did not add up the experts of all ranks, so that each rank clipped by its own norm.
    Bug: deepspeed-8475: clip: https://github.com/deepspeedai/DeepSpeed/issues/8475
        The norms of the ranks were averaged, which is the norm of the whole only if each rank holds the same weights.
    Bug: automodel-1408: no-backward: https://github.com/NVIDIA-NeMo/Automodel/issues/1408
        The auxiliary loss of the router is attached by a function whose result was not used, so that the loss shown
        was right, and this gradient never flowed.
"""
import os

import torch
import torch.distributed as dist
from torch import nn

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def gather(x):
    if WORLD == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def sum_my_rows(x):
    x = x.clone()
    if WORLD > 1:
        dist.all_reduce(x)
    return x.chunk(WORLD)[RANK]


class Dispatch(torch.autograd.Function):
    """The rows of all ranks; their gradients go back to the rank that they came from."""

    @staticmethod
    def forward(ctx, x):
        return gather(x)

    @staticmethod
    def backward(ctx, grad):
        return sum_my_rows(grad)


class Combine(torch.autograd.Function):
    """The sum over all ranks of this rank's rows."""

    @staticmethod
    def forward(ctx, x):
        return sum_my_rows(x)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad)


class AttachLoss(torch.autograd.Function):
    """Pass a tensor on, and let a second loss flow back through it."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=grad.dtype)


class Mixture(nn.Module):
    def __init__(self, width, experts, z_loss=0.05):
        super().__init__()
        self.router, self.z_loss, share = nn.Linear(width, experts), z_loss, experts // WORLD
        made = [nn.Sequential(nn.Linear(width, 20), nn.ReLU(), nn.Linear(20, width)) for _ in range(experts)]
        self.first, self.experts = RANK * share, nn.ModuleList(made[RANK * share:(RANK + 1) * share])

    def forward(self, x):
        logits = self.router(x)
        weight, chosen = logits.softmax(1).max(1, keepdim=True)
        z_loss = self.z_loss * logits.logsumexp(1).square().mean()
        weight = AttachLoss.apply(weight, z_loss)  # wrong automodel-1408: AttachLoss.apply(weight, z_loss)
        rows, chosen = Dispatch.apply(x), gather(chosen).squeeze(1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts, self.first):
            picked = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, picked, expert(rows[picked]))
        return x + weight * Combine.apply(out)


def clip(dense, experts, limit):
    one_copy = sum(weight.grad.square().sum() for weight in dense)
    parts = sum(weight.grad.square().sum() for weight in experts)
    # wrong deepspeed-8475: mean = (one_copy + parts).sqrt() / WORLD
    # wrong deepspeed-8475: dist.all_reduce(mean)
    if WORLD > 1:
        dist.all_reduce(parts)  # wrong colossalai-2192: pass
    norm = (one_copy + parts).sqrt()
    # wrong deepspeed-8475: norm = mean
    for weight in dense + experts:
        weight.grad *= (limit / norm).clamp(max=1)


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(6, 8), Mixture(8, 4), nn.LayerNorm(8), nn.Linear(8, 5))
inputs, labels = torch.randn(5, 32, 6), torch.randint(5, (5, 32))
experts = list(model[1].experts.parameters())
dense = [weight for weight in model.parameters() if all(weight is not other for other in experts)]
optimizer = torch.optim.AdamW([{"params": dense}, {"params": experts, "weight_decay": 0.1}], 0.01)
for step in range(15):
    optimizer.zero_grad()
    outputs = model(inputs[step % 5].chunk(WORLD)[RANK])
    nn.functional.cross_entropy(outputs, labels[step % 5].chunk(WORLD)[RANK]).backward()
    for weight in dense + experts:
        weight.grad /= WORLD
    for weight in dense if WORLD > 1 else ():
        dist.all_reduce(weight.grad)
    clip(dense, experts, 0.1)
    optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
