"""Produce the errors of docs/errors.md on a CPU, one at a time.

    python docs/examples/errors.py                # their names
    python docs/examples/errors.py unused         # one of them
"""
import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

HERE = "127.0.0.1"
DATA = list(range(8))


def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def in_two(work):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(member, (f"file://{folder}/store", work), nprocs=2)


def member(rank, store, work):
    dist.init_process_group("gloo", store, rank=rank, world_size=2)
    work(rank)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.skipped = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def as_file():
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-E", "language/train.py"], cwd=root)  # -E: without PYTHONPATH


def no_group():
    dist.get_rank()


def no_launcher():
    os.environ.pop("RANK", None)
    dist.init_process_group("gloo")


def no_rank():
    os.environ.pop("RANK", None)
    int(os.environ["RANK"])


def nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def port():
    with socket.create_server((HERE, 0)) as server:
        dist.TCPStore(HERE, server.getsockname()[1], is_master=True)


def no_master():
    with socket.create_server((HERE, 0)) as server:
        free = server.getsockname()[1]
    dist.TCPStore(HERE, free, timeout=timedelta(seconds=1))


def missing():
    with socket.create_server((HERE, 0)) as server:
        free = server.getsockname()[1]
    dist.TCPStore(HERE, free, world_size=2, is_master=True, timeout=timedelta(seconds=1))


def pickled():
    list(DataLoader(DATA, num_workers=1, multiprocessing_context="spawn", collate_fn=lambda batch: batch))


def unused():
    group_of_one()
    model = DistributedDataParallel(TwoLayers())
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()


def none_unused():
    group_of_one()
    model = DistributedDataParallel(nn.Linear(4, 4), find_unused_parameters=True)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()


def twice():
    group_of_one()
    layer = nn.Linear(4, 4)
    model = DistributedDataParallel(nn.Sequential(layer), find_unused_parameters=True)
    model.module.forward = lambda x: checkpoint(layer, x, use_reentrant=True)
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()


def attribute():
    group_of_one()
    model = TwoLayers()
    model.num_classes = 4
    return DistributedDataParallel(model).num_classes


def frozen():
    group_of_one()
    DistributedDataParallel(nn.Linear(4, 4).requires_grad_(False))


def sync_batchnorm():
    group_of_one()
    DistributedDataParallel(nn.SyncBatchNorm(4))


def channels_last():
    group_of_one()
    fully_shard(nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), mesh=init_device_mesh("cpu", (1,)))


def strides():
    group_of_one()
    torch.set_num_threads(2)  # with one, the gradient of this layer has the strides of its weight
    model = DistributedDataParallel(nn.Conv2d(3, 4, 1))
    model(torch.ones(2, 5, 5, 3).permute(0, 3, 1, 2)).sum().backward()


def deepcopy():
    group_of_one()
    AveragedModel(fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,))))


def mixed():
    group_of_one()
    fully_shard(layer := nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    layer.weight + torch.ones(4, 4)


def invalid_storage():
    group_of_one()
    fully_shard(layer := nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    layer.weight.untyped_storage().data_ptr()  # as safetensors does


def inplace():
    x = nn.Linear(4, 4)(torch.ones(1, 4)).sigmoid()
    x += 1
    x.sum().backward()


def two_forwards():
    in_two(two_forwards_in)


def two_forwards_in(rank):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    (model(torch.randn(8, 4)) + model(torch.randn(8, 4))).sum().backward()


def shapes():
    in_two(shapes_in)


def shapes_in(rank):
    DistributedDataParallel(nn.Linear(4, 4 + rank))


def peer():
    in_two(peer_in)


def peer_in(rank):
    if rank:
        os._exit(0)
    dist.all_reduce(torch.ones(1))


def sizes():
    in_two(sizes_in)


def sizes_in(rank):
    dist.all_reduce(torch.ones(1 if rank else 1000))


def again():
    loss = nn.Linear(4, 4)(torch.ones(1, 4)).pow(2).sum()
    loss.backward()
    loss.backward()


def no_gradient():
    nn.Linear(4, 4).requires_grad_(False)(torch.ones(1, 4)).sum().backward()


def frozen_inputs():
    inputs, adapter = torch.ones(1, 4), nn.Linear(4, 4)
    checkpoint(adapter, inputs, use_reentrant=True).sum().backward()


def one_sample():
    nn.BatchNorm1d(4)(torch.ones(1, 4))


def no_parameters():
    torch.optim.SGD([parameter for parameter in TwoLayers().parameters() if parameter.ndim > 2], 0.1)


def scheduler():
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1).step()


def batch():
    DataLoader(DATA, batch_size=64 / 2)


def workers():
    DataLoader(DATA, num_workers=512)


def no_epoch():
    DataLoader(DATA, batch_sampler=[[0, 1]]).sampler.set_epoch(1)


def prefix():
    model = nn.Sequential(nn.Linear(4, 4))
    model.load_state_dict({f"module.{name}": value for name, value in model.state_dict().items()})


def classes():
    nn.Linear(4, 10).load_state_dict(nn.Linear(4, 1000).state_dict())


def namespace():
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"args": argparse.Namespace(lr=0.1)}, Path(folder, "last.pt"))
        torch.load(Path(folder, "last.pt"))


def torn():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.pt")
        torch.save(nn.Linear(300, 300).state_dict(), path)
        path.write_bytes(path.read_bytes()[:200_000])
        torch.load(path)


def local_rank():
    argparse.ArgumentParser(prog="train.py").parse_args(["--local-rank=0"])


class Killed(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGBUS)  # as the kernel does when /dev/shm is full


class Exits(Killed):
    def __getitem__(self, index):
        os._exit(1)


def worker_exits():
    list(DataLoader(Exits(), num_workers=1))


class Raises(Killed):
    def __getitem__(self, index):
        raise RuntimeError("no such sample")


def worker_raises():
    list(DataLoader(Raises(), num_workers=1))


def open_files():
    import resource  # not on Windows

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    list(DataLoader(torch.zeros(200, 4), num_workers=1))  # each batch in the list keeps a file open


def shared_memory():
    next(iter(DataLoader(Killed(), num_workers=1)))


def child():  # torchrun raises this
    raise ChildFailedError("train.py", {0: ProcessFailure(local_rank=0, pid=4711, exitcode=1, error_file="<N/A>")})


ERRORS = [as_file, no_group, no_launcher, no_rank, nccl, port, no_master, missing, local_rank, pickled, unused, twice,
          attribute, none_unused, frozen, shapes, sync_batchnorm, channels_last, strides, deepcopy, mixed, inplace,
          two_forwards, again, no_gradient, no_parameters, frozen_inputs, scheduler, one_sample, peer, sizes,
          shared_memory, worker_exits, worker_raises, open_files, workers, batch, no_epoch, prefix, classes,
          namespace, torn, invalid_storage, child]


def main():
    chosen = {error.__name__: error for error in ERRORS}.get("".join(sys.argv[1:]))
    if not chosen:
        sys.exit(f"{__doc__}\n{' '.join(error.__name__ for error in ERRORS)}")
    chosen()


if __name__ == "__main__":
    main()
