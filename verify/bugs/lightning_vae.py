"""A variational autoencoder under Lightning's Trainer, which starts its second process itself.

A: python {}
B: python {} --devices 2
Needs: lightning
Bug: lightning-6789: scale: https://github.com/Lightning-AI/pytorch-lightning/issues/6789
    Two GPUs with half the batch each differ from one GPU: the loss is a sum over the batch, and DDP takes the mean
    of the ranks' gradients, so they are half as large.
"""
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEVICES = int(sys.argv[-1]) if "--devices" in sys.argv else 1


class Vae(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))

    def training_step(self, batch, batch_idx):
        images, noise = batch
        mean, log_var = self.encoder(images).chunk(2, 1)
        rebuilt = self.decoder(mean + noise * (log_var / 2).exp())
        divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)
        loss = (rebuilt - images).square().sum(1) + 0.1 * divergence
        return loss.sum() * DEVICES  # wrong lightning-6789: return loss.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0025)


class Images(pl.LightningDataModule):
    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        pairs = TensorDataset(torch.randn(48, 12, generator=generator), torch.randn(48, 4, generator=generator))
        sampler = DistributedSampler(pairs, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(pairs, batch_size=8 // self.trainer.world_size, sampler=sampler)


def main():
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(accelerator="cpu", devices=DEVICES, strategy="ddp" if DEVICES > 1 else "auto",
                         use_distributed_sampler=False, max_epochs=2, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Vae(), datamodule=Images())


if __name__ == "__main__":
    main()
