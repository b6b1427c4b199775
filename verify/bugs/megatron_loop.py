"""A loop as in Megatron's simple example: a schedule calls functions, and a hook of its configuration adds gradients.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: megatron-1685: not-averaged: https://github.com/NVIDIA/Megatron-LM/issues/1685
        The example script never called finalize_model_grads, so that the gradients were not synchronized.
    Bug: nemo-rl-3789: not-averaged: https://github.com/NVIDIA-NeMo/RL/pull/3789
        The hook that adds the gradients was set in the configuration of the provider. The model keeps a copy of this
        configuration, which the schedule reads, and there the hook was missing.
    Bug: torchtitan-1258: clip: https://github.com/pytorch/torchtitan/pull/1258
        The function that clips goes through the parameters twice. Given a generator, it finds none the second time,
        and clips nothing.
"""
import copy
import os
from dataclasses import dataclass
from functools import partial
from typing import Callable, Optional

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Config:
    hidden: int = 16
    vocabulary: int = 18
    length: int = 8
    finalize_grads: Optional[Callable] = None
    schedule_finalizes: bool = True  # wrong megatron-1685: schedule_finalizes: bool = False


class Recurrent(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = copy.deepcopy(config)
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.decoder = nn.GRU(config.hidden, config.hidden, batch_first=True)
        self.output_layer = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, tokens):
        return self.output_layer(self.decoder(self.embedding(tokens))[0])


def add_gradients(models):
    """Average one contiguous buffer of gradients for each model."""
    for model in models:
        grads = [weight.grad for weight in model.parameters()]
        buffer = torch.cat([grad.flatten() for grad in grads])
        if dist.is_initialized():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
        for grad, part in zip(grads, buffer.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))


def clip_grad_norm(parameters, max_norm):
    parameters = list(parameters)  # wrong torchtitan-1258:
    norm = torch.stack([weight.grad.norm() for weight in parameters]).norm()
    for weight in parameters:
        weight.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def train_data_iterator(config, batch_size, steps):
    generator = torch.Generator().manual_seed(9)
    texts = torch.randint(config.vocabulary, (48, config.length + 1), generator=generator)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for step in range(steps):
        batch = texts[torch.arange(step * batch_size, (step + 1) * batch_size) % len(texts)].chunk(world)[rank]
        yield {"tokens": batch[:, :-1], "labels": batch[:, 1:]}


def loss_func(labels, logits):
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss, {"lm loss": loss.detach()}


def forward_step(iterator, model):
    batch = next(iterator)
    return model(batch["tokens"]), partial(loss_func, batch["labels"])


def forward_backward(forward_step, iterator, model, config):
    output, loss_func = forward_step(iterator, model)
    loss, shown = loss_func(output)
    loss.backward()
    if config.schedule_finalizes and config.finalize_grads is not None:
        config.finalize_grads([model])
    return shown


def main(steps=16, batch_size=12):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(123)
    provider = Config()
    model = Recurrent(provider)
    runtime = model.config  # wrong nemo-rl-3789: runtime = provider
    runtime.finalize_grads = add_gradients
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    iterator = train_data_iterator(model.config, batch_size, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        forward_backward(forward_step, iterator, model, model.config)
        clip_grad_norm(model.parameters(), 0.2)
        optimizer.step()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
