"""Devices: select one for each process and configure torch for it."""
import ctypes
import os
import sys
from collections.abc import Collection

import torch
import torch.distributed as dist

from . import launch
from .errors import UsageError


def prepare(name: str | None, deterministic: bool, local_rank: int | None = None) -> torch.device:
    """Select a device, configure torch for it, and return the device; call this before NCCL starts.

    Otherwise, despite `deterministic`, NVLink SHARP may sum in another order each time (pytorch pull request 156381).
    """
    device = select_device(name, local_rank)
    keep_freed_memory(device)
    choose_algorithms(deterministic, device)
    return device


def select_device(name: str | None, local_rank: int | None = None) -> torch.device:
    """Return the device `name`; by default, the accelerator, or the CPU if there is none.

    A process in a group passes its `local_rank` and gets its own device, as choose_device() explains. It becomes the
    current device: the process would otherwise also open a context on device 0, for example to pin memory.
    """
    device = _choose(name, local_rank)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    return device


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, make glibc keep freed memory: returning it would cost page faults (docs/speed.md; `man mallopt`)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt and device.type == "cpu":
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: larger blocks do not come from the heap; 32 MiB is the maximum
        mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD: how many free bytes the heap may keep at its end


def count_processes(name: str | None) -> int:
    """Return the default number of processes for --device `name`: one per device, or 2 on a CPU."""
    device = _choose(name, 0)
    return 2 if device.type == "cpu" else len(device_ids(torch.device(name or device.type)))


def _choose(name: str | None, local_rank: int | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    group: tuple = () if local_rank is None else (local_rank, launch.local_world_size(), device_types_in_groups())
    count = torch.accelerator.device_count()
    return torch.device(choose_device(name, accelerator.type if accelerator else None, count, *group))


def choose_device(name: str | None, accelerator: str | None, count: int, local_rank: int | None = None,
                  processes: int = 1, in_groups: Collection[str] = ()) -> str:
    """Return the name of the device to use, such as "cpu", "cuda" or, for a process in a group, "cuda:1".

    `name` is the value of --device or None, `accelerator` is the host's type of accelerator ("cuda", "mps", None), and
    `count` is the number of its visible devices. A process in a group has a `local_rank` among the `processes` of its
    host, and may use the types in `in_groups`. If there are too few devices, processes share them. Raises UsageError if
    the processes cannot use this device.
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
        raise UsageError(f"--device {name}: no torch.distributed backend supports it; use train.py, or --device cpu")
    if device.index is None:
        return f"{device.type}:{local_rank % count}"
    if processes > 1:
        raise UsageError(f"--device {name}: the {processes} processes on this host need one device each; use --device "
                         f"{device.type}, and select devices with CUDA_VISIBLE_DEVICES")
    return str(device)


def device_types_in_groups(platform: str = sys.platform) -> set[str]:
    """Return the device types whose default torch.distributed backend accepts their tensors, such as "cuda".

    Not "mps", and on Windows not "cuda", where gloo's all-reduce would end the process (pytorch issue 186535).
    """
    defaults, takes = dist.Backend.default_device_backend_map, dist.Backend.backend_capability
    return {device for device, backend in defaults.items() if device in takes.get(backend, [device])
            and not (platform == "win32" and device == "cuda")}


def device_ids(device: torch.device) -> list[int]:
    """Return the indices of the devices that `device` names ("cuda": all, "cuda:1": [1]); [] for a CPU or MPS."""
    if device.type in ("cpu", "mps"):
        return []
    return list(range(torch.accelerator.device_count())) if device.index is None else [device.index]


def identify(device: torch.device) -> str:
    """Return a string that is equal for two processes if and only if they use the same accelerator."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", device))


def choose_algorithms(deterministic: bool, device: torch.device) -> None:
    """Configure a GPU for bit-identical results in every run if `deterministic`, and for speed otherwise.

    `deterministic` follows https://docs.pytorch.org/docs/stable/notes/randomness.html; the cuBLAS workspace must be
    fixed before anything uses cuBLAS. Raises UsageError on MPS. For speed, float32 matrix products use TF32, as
    convolutions do by default, and cuDNN searches for the fastest ones. A CPU, which may have TF32, stays as it is.
    """
    if deterministic and device.type == "mps":
        raise UsageError("--deterministic: MPS has no deterministic max-pooling; use --device cpu")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    elif device.type in ("cuda", "xpu"):
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True


def peak_memory(device: torch.device) -> str:
    """Return "  N MiB", the peak memory of tensors on `device` so far; "" if the device does not track it."""
    measure = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return f"  {measure(device) / 2**20:,.0f} MiB" if measure else ""
