"""A quantizing autoencoder with two codebooks: one learns by its own optimizer, one averages what it quantizes.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: vector-quantize-222: not-averaged: https://github.com/lucidrains/vector-quantize-pytorch/issues/222
        The codebook is updated by its own optimizer within the forward pass, and nobody averaged its gradients.
    Bug: espnet-6284: buffers: https://github.com/espnet/espnet/pull/6284
        The statistics of the codebook came from each rank's share, and a broadcast from rank 0 discarded the others'.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def add_up(tensor):
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


class LearnedCodebook(nn.Module):
    def __init__(self, size, width):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(size, width))
        self.optimizer = torch.optim.SGD([self.codes], 0.2)

    def forward(self, z):
        chosen = self.codes[torch.cdist(z, self.codes).argmin(1).detach()]
        self.optimizer.zero_grad()
        F.mse_loss(chosen, z.detach()).backward()
        if dist.is_initialized():
            add_up(self.codes.grad).div_(dist.get_world_size())  # wrong vector-quantize-222: pass
        chosen = chosen.detach()
        self.optimizer.step()
        return chosen


class AveragedCodebook(nn.Module):
    def __init__(self, size, width, decay=0.8):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(size, width))
        self.register_buffer("counts", torch.ones(size))
        self.register_buffer("sums", self.codes.clone())

    @torch.no_grad()
    def update(self, z, picked):
        hits = F.one_hot(picked, len(self.codes)).to(z)
        counts, sums = hits.sum(0), hits.T @ z
        add_up(counts), add_up(sums)  # wrong espnet-6284: dist.broadcast(counts, 0), dist.broadcast(sums, 0)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        self.codes.copy_(self.sums / (self.counts + 1e-5).unsqueeze(1))

    def forward(self, z):
        picked = torch.cdist(z, self.codes).argmin(1)
        chosen = self.codes[picked]
        self.update(z, picked)
        return chosen


class Autoencoder(nn.Module):
    def __init__(self, features=12, width=5):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 24), nn.ReLU(), nn.Linear(24, width))
        self.decoder = nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, features))

    def forward(self, x, codebooks):
        z = rest = self.encoder(x)
        quantized = torch.zeros_like(z)
        for codebook in codebooks:
            chosen = codebook(rest.detach())
            quantized, rest = quantized + chosen, rest - chosen
        return self.decoder(z + (quantized - z).detach()), F.mse_loss(z, quantized)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(4)
    model, codebooks = Autoencoder(), [LearnedCodebook(8, 5), AveragedCodebook(8, 5)]
    data = TensorDataset(torch.randn(96, 12))
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, 16 // world, sampler=sampler)
    parallel = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch, in loader:
            optimizer.zero_grad()
            output, commitment = parallel(batch, codebooks)
            (F.mse_loss(output, batch) + 0.25 * commitment).backward()
            optimizer.step()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
