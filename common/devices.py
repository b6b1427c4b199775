"""Devices: which one a process takes, and how torch is set up for them."""
import os
from collections.abc import Collection

import torch
import torch.distributed as dist

from . import launch
from .errors import UsageError


def select_device(name: str | None, local_rank: int | None = None) -> torch.device:
    """Return the `torch.device` called `name`; for None the accelerator if one is there, else the CPU.

    With `local_rank`, of a process in a group, it is this process's own device, and is made the current one, so that
    nothing opens a context on device 0. Raises UsageError for a device that is not available.
    """
    device = _choose(name, local_rank)
    if local_rank is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def count_processes(name: str | None) -> int:
    """Return how many processes suit --device `name`: one for each device it names, or 2 on a CPU."""
    device = _choose(name, 0)
    return 2 if device.type == "cpu" else len(device_ids(torch.device(name or device.type)))


def _choose(name: str | None, local_rank: int | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    group: dict = {} if local_rank is None else {"local_rank": local_rank, "processes": launch.local_world_size(),
                                                 "in_groups": device_types_in_groups()}
    count = torch.accelerator.device_count()
    return torch.device(choose_device(name, accelerator.type if accelerator else None, count, **group))


def choose_device(name: str | None, accelerator: str | None, count: int, local_rank: int | None = None,
                  processes: int = 1, in_groups: Collection[str] = ()) -> str:
    """Return the name of the device to use, such as "cpu", "cuda" or, for a process of a group, "cuda:1".

    `name` is --device or None; `accelerator` the machine's kind ("cuda", "mps", None) and `count` how many devices of
    it are visible. A process of a group has a `local_rank` among the `processes` of its host, which take one device
    after the other (several share one where there are fewer, or where a scheduler shows each process its own alone),
    and takes a kind that is in `in_groups`. Raises UsageError.
    """
    try:
        device = torch.device(name or accelerator or "cpu")
    except RuntimeError:
        raise UsageError(f"--device {name}: no such kind of device; try cpu, cuda, cuda:1, xpu or mps") from None
    grouped = local_rank is not None
    if device.type == "cpu" or not name and grouped and device.type not in in_groups:
        return "cpu"
    if accelerator != device.type:
        raise UsageError(f"--device {name}: not on this machine (its accelerator: {accelerator or 'none'}); "
                         "try --device cpu")
    if (device.index or 0) >= count:
        raise UsageError(f"--device {name}: this machine has {count}, numbered from 0")
    if not grouped:
        return str(device)
    if device.type not in in_groups:
        raise UsageError(f"--device {name}: no backend of torch.distributed sends its tensors; "
                         f"train.py trains on it, this script with --device cpu")
    if device.index is None:
        return f"{device.type}:{local_rank % count}"
    if processes > 1:
        raise UsageError(f"--device {name}: {processes} processes on this host take a device each; say --device "
                         f"{device.type}, and choose the devices with CUDA_VISIBLE_DEVICES")
    return str(device)


def device_types_in_groups() -> set[str]:
    """Return the types of device that torch.distributed has a default backend for that takes their tensors.

    That leaves out "mps": torch's default there is gloo, whose tensors are on "cpu" or "cuda"
    (`Backend.default_device_backend_map` and `Backend.backend_capability` of torch/distributed/distributed_c10d.py).
    """
    defaults, takes = dist.Backend.default_device_backend_map, dist.Backend.backend_capability
    return {device for device, backend in defaults.items() if device in takes.get(backend, [device])}


def device_ids(device: torch.device) -> list[int]:
    """Return the indices of the devices that `device` ("cuda": all, "cuda:1": that one) names, [] for a CPU or MPS."""
    if device.type in ("cpu", "mps"):
        return []
    return list(range(torch.accelerator.device_count())) if device.index is None else [device.index]


def identify(device: torch.device) -> str:
    """Return a text that is the same in two processes exactly where they use the same accelerator."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", device))


def set_deterministic(wanted: bool) -> None:
    """If `wanted`, make a GPU compute the same bits in every run: slower, and an error where torch has no algorithm.

    As https://docs.pytorch.org/docs/stable/notes/randomness.html says: deterministic algorithms, no search for the
    fastest convolution, and a cuBLAS workspace of fixed size, which has to be set before cuBLAS is first used.
    """
    if not wanted:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def peak_memory(device: torch.device) -> str:
    """Return "  N MiB", the most memory that tensors took on `device` so far; "" where no device counts it."""
    measure = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return f"  {measure(device) / 2**20:,.0f} MiB" if measure else ""
