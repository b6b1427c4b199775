"""Classify points with Hugging Face Accelerate, with accumulation and a linear schedule.

A: python {}
B: torchrun --nproc-per-node=2 {}
Needs: accelerate
Bug: plain-backward: scale: Accelerate does not see the backward pass, so the loss is not divided by the number of
    micro-batches.
"""
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2
EPOCHS = 3


def get_dataset(n=384):
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(n, 6, generator=generator)
    labels = (features[:, 0] * features[:, 1] > 0).long() + (features[:, 2] > 0.5).long()
    return TensorDataset(features, labels)


def training_function():
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=11)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, dataloader_config=config)
    set_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataloader = DataLoader(get_dataset(), batch_size=32, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=EPOCHS * 6)
    criterion = nn.CrossEntropyLoss()
    model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)

    for epoch in range(EPOCHS):
        model.train()
        total = 0.0
        for features, labels in dataloader:
            with accelerator.accumulate(model):
                loss = criterion(model(features), labels)
                accelerator.backward(loss)  # wrong plain-backward: loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"epoch {epoch}: {total / len(dataloader):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
