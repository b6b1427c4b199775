"""A word embedding and a head that are cut over the vocabulary, with tensor and data parallel groups, functions only.

    A: python {}
    B: torchrun --nproc-per-node=4 {}
    Bug: megatron-7452-logits: forward: https://github.com/NVIDIA/Megatron-LM/issues/7452
        Finding 2: the head gathered its logits, and the loss took them for one rank's part of the vocabulary. The loss
        was log(2) too large, and its gradients were wrong.
    Bug: torchtune-2687: scale: https://github.com/meta-pytorch/torchtune/pull/2687
        Losses and gradient norms with tensor parallelism did not match those without it. The tokens were added up over
        all ranks, but the gradients were multiplied by the number of data parallel ranks only.
"""
import os

import torch
import torch.distributed as dist
from torch.nn.functional import relu

WORDS, WIDTH, LENGTH = 24, 12, 10
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
tensor_size = 2 if world > 1 else 1
data_size, tensor_rank, data_rank = world // tensor_size, rank % tensor_size, rank // tensor_size
tensor_group = data_group = None


class AddForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x, group=tensor_group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class AddBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return AddForward.forward(ctx, grad.contiguous())


class GatherWords(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(tensor_size)]
        if world > 1:
            dist.all_gather(parts, x.contiguous(), group=tensor_group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(tensor_size, -1)[tensor_rank]


def here(ids, size):
    """Which ids this rank has, and their row here."""
    rows = ids - tensor_rank * size
    return (rows >= 0) & (rows < size), rows.clamp(0, size - 1)


def embed(weight, ids):
    mine, rows = here(ids, len(weight))
    return AddForward.apply(weight[rows] * mine.unsqueeze(-1))


def head(weight, x, gather_output=False):
    logits = AddBackward.apply(x) @ weight.T
    return GatherWords.apply(logits) if gather_output else logits


def cross_entropy_sum(logits, targets):
    """The sum over the tokens whose target is not -100."""
    top = logits.detach().amax(-1)
    if world > 1:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=tensor_group)
    logits = logits - top.unsqueeze(-1)
    mine, rows = here(targets, logits.shape[-1])
    target = AddForward.apply(logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * mine)
    return ((AddForward.apply(logits.exp().sum(-1)).log() - target) * (targets != -100)).sum()


def scale_gradients(parameters, targets):
    tokens = (targets != -100).sum()
    for weight in parameters if world > 1 else ():
        dist.all_reduce(weight.grad, group=data_group)
        weight.grad /= data_size
    if world > 1:
        dist.all_reduce(tokens)
    for weight in parameters:
        weight.grad *= world / tokens  # wrong torchtune-2687: weight.grad *= data_size / tokens


if world > 1:
    dist.init_process_group("gloo")
    tensor_groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    data_groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    tensor_group, data_group = tensor_groups[data_rank], data_groups[tensor_rank]
torch.manual_seed(11)
whole = [torch.randn(WORDS, WIDTH), torch.randn(WORDS, WIDTH) * 0.3]
words, unwords = [torch.nn.Parameter(weight.chunk(tensor_size)[tensor_rank].clone()) for weight in whole]
body = torch.nn.Linear(WIDTH, WIDTH)
parameters = [words, unwords, *body.parameters()]
optimizer = torch.optim.SGD(parameters, 0.2, momentum=0.9)
texts = torch.randint(WORDS, (3, 8, LENGTH))
for step in range(15):
    ids = texts[step % 3].chunk(data_size)[data_rank]
    targets = ids.roll(-1, 1)
    for row, number in enumerate(range(data_rank * len(ids), (data_rank + 1) * len(ids))):
        targets[row, 3 + number % (LENGTH - 4):] = -100
    optimizer.zero_grad()
    hidden = embed(words, ids)
    hidden = hidden + relu(body(hidden))
    logits = head(unwords, hidden)  # wrong megatron-7452-logits: logits = head(unwords, hidden, gather_output=True)
    cross_entropy_sum(logits, targets).backward()
    scale_gradients(parameters, targets)
    optimizer.step()
if world > 1:
    dist.destroy_process_group()
