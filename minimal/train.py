"""Regression on tabular data, on one device: a plain training loop that needs only torch.

    python minimal/train.py

Parent: none
"""
import argparse
import math
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def create_table(rows, seed):  # yours: the data
    """Return a generated dataset. Each sample is a tuple (features, target)."""
    numbers = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    features = numbers[:, :3]
    return TensorDataset(features, features.sin().sum(1, keepdim=True) + 0.5 * numbers[:, 3:])


@torch.inference_mode()
def evaluate(model, loader, device):  # yours: the loss, here and in main()
    """Return the mean loss over all samples as a float; each sample counts once."""
    model.eval()
    sums = torch.zeros(2, device=device)  # the sum of the losses, the number of samples
    for features, targets in loader:
        loss = nn.functional.mse_loss(model(features.to(device)), targets.to(device), reduction="sum")
        sums += torch.stack([loss, torch.full_like(loss, len(targets))])
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=100, help="maximum number of passes over the table")
    parser.add_argument("--patience", type=int, default=6, help="stop after N epochs without improvement")
    parser.add_argument("--batch-size", type=int, default=48, help="samples per step, over ALL processes")
    parser.add_argument("--lr", type=float, default=0.02, help="initial learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed for the weights and the sample order")
    parser.add_argument("--device", help="cpu, cuda, xpu (default: cuda if available, else cpu)")
    parser.add_argument("--output", default="best.pt", help="file for the checkpoint of the best epoch")
    args = parser.parse_args()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(args.seed)
    train_set, val_set = create_table(1000, seed=1), create_table(499, seed=2)
    if not 0 < args.batch_size <= len(train_set):
        parser.exit(2, f"error: --batch-size {args.batch_size}: the table has {len(train_set)} rows\n")
    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, args.batch_size)

    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)  # yours: the model
    optimizer = torch.optim.Adam(model.parameters(), args.lr)  # yours: the optimizer
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    best_loss, best_epoch = float("inf"), 0
    for epoch in range(1, args.epochs + 1):
        if epoch - best_epoch > args.patience:
            break
        sampler.generator.manual_seed(args.seed * 10**6 + epoch)
        model.train()
        loss_sum = torch.zeros((), device=device)
        for features, targets in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(features.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(targets)

        train_loss = loss_sum.item() / (len(train_loader) * args.batch_size)
        val_loss, lr = evaluate(model, val_loader, device), scheduler.get_last_lr()[0]
        if math.isnan(val_loss):
            parser.exit(1, f"error: val_loss is nan in epoch {epoch}: lower --lr, or check the data\n")
        scheduler.step(val_loss)
        if val_loss < best_loss:
            best_loss, best_epoch = val_loss, epoch
            state = {"model": model.state_dict(), "epoch": epoch, "val_loss": val_loss}

        if epoch == best_epoch:
            torch.save(state, args.output + ".tmp")
            os.replace(args.output + ".tmp", args.output)  # a crash cannot leave half a checkpoint
        print(f"epoch {epoch:3}  loss {train_loss:.5f}  val_loss {val_loss:.5f}  lr {lr:g}")


if __name__ == "__main__":
    main()
