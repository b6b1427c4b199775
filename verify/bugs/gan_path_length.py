"""A GAN in functions: generator and discriminator average their gradients by hand, with a path length penalty.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: stylegan2-159: loss: https://github.com/rosinality/stylegan2-pytorch/issues/159
        The penalty compares path lengths with their mean over the batch. With several GPUs, each took the mean over
        its own share, so that the penalty was not that of one GPU.
    Bug: tutorials-31572: not-averaged|partial: https://github.com/pytorch/pytorch/issues/31572
        The ring all-reduce of PyTorch's tutorial sent empty buffers, so that each rank kept its own gradients.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import autograd, nn, optim

BATCH, NOISE = 16, 6


def ring_all_reduce(tensor):
    """Send the buffer once around the ring, and add up what comes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, send = tensor.clone(), tensor.clone()
    # wrong tutorials-31572: send = torch.zeros_like(tensor)
    for _ in range(size - 1):
        receive = torch.zeros_like(send)
        request = dist.isend(send, (rank + 1) % size)
        dist.recv(receive, (rank - 1) % size)
        request.wait()
        total += receive
        send = receive
    tensor.copy_(total)


def average_gradients(network, world):
    for weight in network.parameters():
        if world > 1:
            ring_all_reduce(weight.grad)
        weight.grad /= world


def make_networks():
    generator = nn.Sequential(nn.Linear(NOISE, 24), nn.Softplus(), nn.Linear(24, 10))
    discriminator = nn.Sequential(nn.Linear(10, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    return generator, discriminator


def noises(step, rank, world):
    """The noise of a whole batch is drawn everywhere, so that it does not depend on the number of processes."""
    source = torch.Generator().manual_seed(1000 + step)
    draws = torch.randn(BATCH, NOISE, generator=source), torch.randn(BATCH, 10, generator=source)
    return [draw.chunk(world)[rank] for draw in draws]


def path_length_penalty(generator, z, y, mean_length, world, decay=0.3):
    z = z.clone().requires_grad_()
    grad, = autograd.grad((generator(z) * y).sum(), z, create_graph=True)
    lengths = (grad.square().sum(1) + 1e-8).sqrt()
    batch_mean = lengths.detach().mean()
    if world > 1:
        ring_all_reduce(batch_mean)  # wrong stylegan2-159: batch_mean *= world
        batch_mean /= world
    mean_length = mean_length + decay * (batch_mean - mean_length)
    return (lengths - mean_length).square().mean(), mean_length


def train(steps=14):
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator, discriminator = make_networks()
    real_images = torch.randn(64, 10) @ torch.randn(10, 10)
    g_optimizer = optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.99))
    d_optimizer = optim.Adam(discriminator.parameters(), 2e-3, betas=(0.5, 0.99))
    mean_length = torch.zeros(())
    for step in range(steps):
        z, y = noises(step, rank, world)
        real = real_images[torch.arange(step * BATCH, (step + 1) * BATCH) % 64].chunk(world)[rank]
        d_optimizer.zero_grad()
        (F.softplus(discriminator(generator(z).detach())) + F.softplus(-discriminator(real))).mean().backward()
        average_gradients(discriminator, world)
        d_optimizer.step()
        g_optimizer.zero_grad()
        F.softplus(-discriminator(generator(z))).mean().backward()
        if step % 2 == 0:
            penalty, mean_length = path_length_penalty(generator, z, y, mean_length, world)
            (2 * penalty).backward()
        average_gradients(generator, world)
        g_optimizer.step()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    train()
