"""Linear features, a small network, plain SGD: no DataLoader, only functions.

    python regression.py
"""
import torch
from torch import nn


def make_data(samples=512, features=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, features, generator=generator)
    w = torch.randn(features, 1, generator=generator)
    return x, x @ w + (x**2).mean(1, keepdim=True)


def make_model(features=8):
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 1))


def batches(x, y, size, epoch):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for part in order.split(size):
        yield x[part], y[part]


def train(epochs=3, batch_size=64, lr=0.05):
    torch.manual_seed(0)
    model = make_model()
    x, y = make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(epochs):
        for inputs, targets in batches(x, y, batch_size, epoch):
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
