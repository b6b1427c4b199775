"""Start the processes from Python with mp.spawn: no launcher.

    python spawned.py --nprocs 2
"""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 20)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(20, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def toy_data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(320, 10, generator=g)
    return TensorDataset(x, x.reshape(-1, 5, 2).prod(2))


def worker(rank, world_size, port, lr, batch_size, epochs):
    setup(rank, world_size, port)
    torch.manual_seed(0)
    model = ToyModel()
    ddp_model = DDP(model)

    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr, momentum=0.9)
    dataset = toy_data()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size // world_size, sampler=sampler)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(x), y)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nprocs", type=int, default=2)
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    mp.spawn(worker, args=(args.nprocs, free_port, 0.1, 40, 2), nprocs=args.nprocs)
