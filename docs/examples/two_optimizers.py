"""Two networks with an optimizer each: a generator, and a critic that learns to tell generated samples from real ones.

    python docs/examples/two_optimizers.py
    torchrun --nproc-per-node=2 docs/examples/two_optimizers.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SEED, EPOCHS, BATCH_SIZE, NOISE = 0, 3, 64, 4


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    train_set = torch.randn(512, 2) * 0.3 + torch.tensor([1.0, -1.0])
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    # One wrapper for each network, because each has its own backward pass
    parallel_generator = DistributedDataParallel(generator)
    parallel_critic = DistributedDataParallel(critic)
    generator_optimizer = torch.optim.Adam(generator.parameters(), 0.002, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), 0.002, betas=(0.5, 0.999))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        random = torch.Generator().manual_seed(1000 * SEED + epoch)
        sums = torch.zeros(2)
        for real in loader:
            # Draw the noise of the whole batch on every process, then take this process's share
            noise = torch.randn(BATCH_SIZE, NOISE, generator=random)[rank::world_size]
            fake = parallel_generator(noise)

            # The critic: one forward pass for real and fake samples; no gradient reaches the generator
            scores = parallel_critic(torch.cat([real, fake.detach()]))
            labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
            critic_loss = F.binary_cross_entropy_with_logits(scores, labels)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()

            # The generator: call the unwrapped critic, because this step averages only the generator's gradients
            scores = critic(fake)
            generator_loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
            generator_optimizer.zero_grad()
            generator_loss.backward()
            generator_optimizer.step()
            sums += torch.stack([critic_loss.detach(), generator_loss.detach()])

        dist.all_reduce(sums)
        if rank == 0:
            critic_loss, generator_loss = (sums / len(loader) / world_size).tolist()
            print(f"epoch {epoch}  critic {critic_loss:.6f}  generator {generator_loss:.6f}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
