"""Rank, world size and sums over the processes: 0, 1 and the identity when no process group exists."""
import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # early: its default arguments keep the group that is there, with threads that outlive it

from . import devices, launch
from .errors import UsageError

_stores: list[dist.Store] = []  # rank 0 may serve the one in here: it has to live on


def get_rank() -> int:
    """Return this process's number among all processes of the launch, on all nodes."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of processes of the launch, on all nodes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main_process() -> bool:
    """Return whether this is the one process that prints, logs and saves (global rank 0)."""
    return get_rank() == 0


def reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all processes, as a new tensor; every process must call it."""
    if not dist.is_initialized():
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def agree(value: object) -> bool:
    """Return whether all processes hold an equal (plain Python) value; every process must call it."""
    if not dist.is_initialized():
        return True
    values: list[object] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def exact_share(batch_size: int, world_size: int) -> int:
    """Return the part of a global batch that is one process's; UsageError where the processes cannot share evenly."""
    share, rest = divmod(batch_size, world_size)
    if rest:
        raise UsageError(f"--batch-size {batch_size}: not a multiple of the {world_size} processes that share it")
    return share


def choose_backend(name: str | None, device: str | torch.device) -> str:
    """Return the name of a communication backend: `name`, or if None the device's own (nccl on CUDA, gloo on a CPU).

    It is gloo, and the main process says so, where torch lacks that backend and where two processes share a device:
    NCCL refuses a second rank on a GPU ("Duplicate GPU detected", in src/init.cc of github.com/NVIDIA/nccl). Raises
    UsageError for a backend that this build of torch lacks, or that does not work on the device.
    """
    device = torch.device(device)
    default = dist.get_default_backend_for_device(device)
    backend = pick_backend(name, device.type, default, dist.is_backend_available, dist.Backend.backend_capability,
                           shared=lambda: devices_are_shared(devices.identify(device)))
    if name is None and backend != default and os.environ["RANK"] == "0":
        print(f"gloo connects the processes on {device}: {default} is not in this build of torch, or they share it")
    return backend


def pick_backend(name: str | None, device_type: str, default: str, is_available: Callable[[str], bool],
                 takes: Mapping[str, Collection[str]], shared: Callable[[], bool]) -> str:
    """Return the backend for --backend `name` on a `device_type` whose own backend is `default`; see choose_backend.

    `is_available(name)` says whether torch has a backend, `takes[name]` lists the types of device whose tensors it
    sends, and `shared()`, asked only where gloo could help, whether two processes share a device.
    """
    if name is None:
        if default == "gloo" or device_type not in takes["gloo"]:
            return default
        return "gloo" if not is_available(default) or shared() else default  # Windows has no NCCL
    if not is_available(name):
        raise UsageError(f"--backend {name}: not in this build of torch; {device_type} takes {default}")
    if device_type not in takes.get(name, [device_type]):
        raise UsageError(f"--backend {name}: does not work on {device_type}; it takes {default}")
    return name


def devices_are_shared(identity: str, timeout: timedelta = timedelta(minutes=5)) -> bool:
    """Return whether two of the launch's processes gave the same `identity` of a device; every process must call it.

    It is checked before there is a group, and only for launches on one host: on several, where agents number their
    attempts to start differently, pass --backend gloo yourself.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1 or world_size > launch.local_world_size():
        return False
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)  # torchrun's store keeps what earlier attempts wrote
    keys = [f"device of rank {other}, attempt {attempt}" for other in range(world_size)]
    store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    store.set(keys[rank], identity)
    _stores.append(store)
    return len({store.get(key) for key in keys}) < world_size
