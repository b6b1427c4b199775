"""Rank, world size and sums over the processes: 0, 1 and the identity when no process group exists."""
import os
import subprocess

import torch
import torch.distributed as dist
import torch.distributed.nn  # early: its default arguments keep the group that is there, with threads that outlive it

from common.cli import UsageError


def get_rank():
    """Return this process's number among all processes of the launch, on all nodes."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size():
    """Return the number of processes of the launch, on all nodes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main_process():
    """Return whether this is the one process that prints, logs and saves (global rank 0)."""
    return get_rank() == 0


def reduce_sum(tensor):
    """Return the sum of a tensor over all processes, as a new tensor; every process must call it."""
    if not dist.is_initialized():
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def agree(value):
    """Return whether all processes hold an equal (plain Python) value; every process must call it."""
    if not dist.is_initialized():
        return True
    values = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def local_world_size():
    """Return how many processes of the launch share this machine, as the launcher says (1 where none does)."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    if "SLURM_STEP_ID" in os.environ:  # tasks may be placed unevenly: the mean, rounded up
        return -(-int(os.environ["SLURM_NTASKS"]) // int(os.environ["SLURM_NNODES"]))
    return 1


def launch_environment():
    """Return what `torch.distributed` wants to find in the environment, as far as no launcher has put it there.

    torchrun and torch.distributed.launch set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. A task of
    Slurm's `srun` has variables of Slurm's instead: its rank, local rank and number of tasks are taken from them, the
    first host of the step is the master, and the port follows from the job's number, so that two jobs do not meet.
    Plain `python` is a group of one, at any free port.
    """
    env = os.environ
    if "RANK" in env:
        return {}
    if "SLURM_STEP_ID" not in env:  # not SLURM_PROCID: a batch script has that too, and is not a task
        return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    hosts = subprocess.run(["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]], capture_output=True,
                           text=True, check=True).stdout.split()
    return {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_NTASKS"], "LOCAL_RANK": env["SLURM_LOCALID"],
            "MASTER_ADDR": env.get("MASTER_ADDR", hosts[0]),
            "MASTER_PORT": env.get("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 10000))}


def cores_per_process():
    """Return how many cores of this machine each process of the launch on it can have, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // local_world_size())


def exact_share(batch_size, world_size):
    """Return the part of a global batch that is one process's; UsageError where the processes cannot share evenly."""
    share, rest = divmod(batch_size, world_size)
    if rest:
        raise UsageError(f"--batch-size {batch_size}: not a multiple of the {world_size} processes that share it")
    return share


def choose_backend(name, device):
    """Return the name of a communication backend: `name`, or the device's own (nccl on CUDA, gloo on CPU) if None.

    Raises UsageError for one that this build of torch lacks, or that does not work on the device.
    """
    device = torch.device(device)
    default = dist.get_default_backend_for_device(device)
    if name is None:
        return default
    if not dist.is_backend_available(name):
        raise UsageError(f"--backend {name}: not in this build of torch; {device.type} takes {default}")
    if device.type not in dist.Backend.backend_capability.get(name, [device.type]):
        raise UsageError(f"--backend {name}: does not work on {device.type}; it takes {default}")
    return name
