"""Rank, world size and sums over the processes; without a process group, these are 0, 1 and a copy."""
import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # import it before a group exists: its default arguments would keep that group alive

from . import devices, launch
from .errors import UsageError

# An argument of DDP, renamed in torch 2.13, that turns off the broadcast of rank 0's buffers in each forward pass
NO_BUFFER_BROADCAST = {"forward_sync_buffers" if torch.__version__ >= "2.13" else "broadcast_buffers": False}

_stores: list[dist.Store] = []  # keeps the store alive: rank 0 may serve it


def get_rank() -> int:
    """Return this process's rank among all processes of the launch, on all nodes."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of processes of the launch, on all nodes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main_process() -> bool:
    """Return whether this is the one process that prints, logs and saves (global rank 0)."""
    return get_rank() == 0


def reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all processes, as a new tensor; every process must call it."""
    tensor = tensor.clone()
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def agree(value: object) -> bool:
    """Return whether all processes pass equal (plain Python) values; every process must call it."""
    if not dist.is_initialized():
        return True
    values: list[object] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def exact_share(batch_size: int, world_size: int) -> int:
    """Return each process's share of a global batch; raise UsageError if the batch does not divide evenly."""
    share, rest = divmod(batch_size, world_size)
    if rest:
        raise UsageError(f"--batch-size {batch_size}: not a multiple of the {world_size} processes that share it")
    return share


def choose_backend(name: str | None, device: str | torch.device) -> str:
    """Return the communication backend: `name`, or by default the device's own (nccl on CUDA, gloo on a CPU).

    If torch lacks that backend, or if two processes share a device, which NCCL rejects, the default is gloo, and the
    main process says so. Raises UsageError if the backend `name` is not in this build or does not work on the device.
    """
    device = torch.device(device)
    default = dist.get_default_backend_for_device(device)
    backend = pick_backend(name, device.type, default, dist.is_backend_available, dist.Backend.backend_capability,
                           lambda: devices_are_shared(devices.identify(device)))
    if name is None and backend != default and os.environ["RANK"] == "0":
        print(f"using gloo on {device}: this build of torch lacks {default}, or processes share the device")
    return backend


def pick_backend(name: str | None, device_type: str, default: str, is_available: Callable[[str], bool],
                 takes: Mapping[str, Collection[str]], shared: Callable[[], bool]) -> str:
    """Return the backend for --backend `name` on a `device_type` whose own backend is `default`; see choose_backend.

    `takes[name]` lists the device types that a backend accepts; `shared()` tells if two processes share a device.
    """
    if name is None:
        helps = default != "gloo" and device_type in takes["gloo"]
        return "gloo" if helps and (not is_available(default) or shared()) else default
    if not is_available(name):
        raise UsageError(f"--backend {name}: not in this build of torch; use {default} on {device_type}")
    if device_type not in takes.get(name, [device_type]):
        raise UsageError(f"--backend {name}: does not work on {device_type}; use {default}")
    return name


def devices_are_shared(identity: str, timeout: timedelta = timedelta(minutes=5)) -> bool:
    """Return whether two processes of the launch pass the same device `identity`; every process must call it.

    It runs before the group exists. On several hosts, it returns False without a check, because each host's torchrun
    agent counts restarts separately: if processes share a device there, pass --backend gloo.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1 or world_size > launch.local_world_size():
        return False
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)  # torchrun's store keeps the keys of earlier attempts
    keys = [f"device of rank {other}, attempt {attempt}" for other in range(world_size)]
    store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    store.set(keys[rank], identity)
    _stores.append(store)
    return len({store.get(key) for key in keys}) < world_size
