"""A Lightning module that optimizes by hand, under Lightning's Trainer.

A: python {}
B: torchrun --nproc-per-node=2 {}
Needs: lightning
Bug: lightning-9237: not-averaged: https://github.com/Lightning-AI/pytorch-lightning/issues/9237
    Ranks diverge: the module calls `loss.backward()` in place of `self.manual_backward(loss)`, which would have
    prepared DDP for the backward pass.
Bug: lightning-18086: not-averaged: https://github.com/Lightning-AI/pytorch-lightning/issues/18086
    With `static_graph=True` gradients are not averaged in the first step: DDP delays the reduction of a static graph's
    first step to the end of the backward pass, and Lightning did not start it (corrected in pull request 21251).
Options lightning-18086: --static-graph
"""
import os
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        inputs, targets = batch
        loss = (self.network(inputs) - targets).square().mean()
        self.manual_backward(loss)  # wrong lightning-9237: loss.backward()
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self):
        inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
        rows = TensorDataset(inputs, inputs[:, :1] * 2 - 1)
        sampler = DistributedSampler(rows, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(rows, batch_size=8 // self.trainer.world_size, sampler=sampler)


class Strategy(DDPStrategy):
    """Lightning's DDP strategy."""

    # wrong lightning-18086: def post_backward(self, closure_loss): pass


def main():
    pl.seed_everything(0, verbose=False)
    strategy = Strategy(static_graph="--static-graph" in sys.argv) if WORLD > 1 else "auto"
    trainer = pl.Trainer(accelerator="cpu", devices=WORLD, strategy=strategy, use_distributed_sampler=False,
                         max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False)
    trainer.fit(Regressor())


if __name__ == "__main__":
    main()
