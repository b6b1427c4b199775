"""A tiny GAN with two networks and two optimizers.

    python gan.py
    torchrun --nproc-per-node=2 gan.py
"""
import os

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group(backend="gloo")

# hyperparameters
nz, batch_size, num_epochs = 4, 32, 2

torch.manual_seed(999)
real_points = torch.randn(256, 2) @ torch.tensor([[1.0, 0.6], [0.0, 0.3]]) + 2.0
noise_bank = torch.randn(num_epochs, 256, nz)

netG = nn.Sequential(nn.Linear(nz, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
if world > 1:
    netG = DistributedDataParallel(netG)
    netD = DistributedDataParallel(netD)

criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.SGD(netD.parameters(), lr=0.1)
optimizerG = torch.optim.SGD(netG.parameters(), lr=0.05)

dataset = TensorDataset(torch.arange(256), real_points)
sampler = DistributedSampler(dataset, world, rank, shuffle=True)
dataloader = DataLoader(dataset, batch_size=batch_size // world, sampler=sampler, drop_last=True)

for epoch in range(num_epochs):
    sampler.set_epoch(epoch)
    for i, (index, real) in enumerate(dataloader):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = netG(noise_bank[epoch, index])

        # (1) update D: real points are 1, generated points are 0
        optimizerD.zero_grad()
        points, labels = torch.cat([real, fake.detach()]), torch.cat([ones, zeros])
        errD = criterion(netD(points), labels)
        errD.backward()
        optimizerD.step()

        # (2) update G: D should classify its points as real
        optimizerG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()

        if i % 4 == 0 and rank == 0:
            print(f"[{epoch}/{num_epochs}][{i}/{len(dataloader)}] loss_D {errD:.4f} loss_G {errG:.4f}")

if world > 1:
    dist.destroy_process_group()
