"""Two towers for images and texts, with a contrastive loss over the batch of all ranks, as in CLIP.

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Bug: open_clip-616: no-backward: https://github.com/mlfoundations/open_clip/issues/616
        Each rank computed the loss of its own rows against gathered features that carry no gradient, so that the
        negatives of other ranks did not learn. A local loss must gather with gradients.
    Bug: declutr-212: group-scale|scale: https://github.com/JohnGiorgi/DeCLUTR/pull/212
        Each rank computed the loss over all pairs, with gradients for its own features only, and DDP divided the sum
        of these gradients by the number of ranks.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gather_and_put_mine(features):
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.detach().contiguous())
    parts[dist.get_rank()] = features
    return torch.cat(parts)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 8))
        self.text = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images, texts):
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1), self.log_scale.exp()


class ClipLoss(nn.Module):
    def __init__(self, distributed):
        super().__init__()
        self.distributed = distributed
        self.gather = GatherWithGradient.apply  # wrong open_clip-616: self.gather = gather_and_put_mine

    def forward(self, images, texts, scale):
        all_images, all_texts, first = images, texts, 0
        if self.distributed:
            all_images, all_texts = self.gather(images), self.gather(texts)
            # wrong declutr-212: all_images, all_texts = gather_and_put_mine(images), gather_and_put_mine(texts)
            first = dist.get_rank() * len(images)
            # wrong declutr-212: images, texts, first = all_images, all_texts, 0
        pairs = torch.arange(first, first + len(images))
        return (F.cross_entropy(scale * images @ all_texts.T, pairs)
                + F.cross_entropy(scale * texts @ all_images.T, pairs)) / 2


def train(epochs=3, batch_size=16):
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    world = dist.get_world_size() if distributed else 1
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(80, 20), torch.randn(80, 12))
    sampler = DistributedSampler(dataset, world, dist.get_rank() if distributed else 0, seed=4)
    loader = DataLoader(dataset, batch_size // world, sampler=sampler)
    model, loss_function = Towers(), ClipLoss(distributed)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.2)
    parallel_model = DistributedDataParallel(model) if distributed else model
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, texts in loader:
            optimizer.zero_grad()
            loss_function(*parallel_model(images, texts)).backward()
            optimizer.step()
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    train()
