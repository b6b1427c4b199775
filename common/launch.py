"""How this process was started, and where the processes meet: torchrun, Slurm, `mp.spawn` or plain `python`."""
import os
import socket
import subprocess

import torch.distributed as dist

from .errors import UsageError


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


def serve_store(host, port, nodes):
    """Return a TCPStore that this process serves, at a free port where `port` is 0.

    On one node it listens on the address `host` alone. For several it listens on all, as every other store of torch
    does: on the first host itself its name may stand for 127.0.1.1, where no other host gets through. Raises UsageError
    for a port that is in use, for a host that is not this one, or for several `nodes` and no port.
    """
    if nodes > 1 and not port:
        raise UsageError(f"--nnodes {nodes}: the other hosts cannot guess the port; name one with --port")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family) if nodes == 1 else None
        port = listener.getsockname()[1] if listener else port
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False,
                             master_listen_fd=listener and listener.detach())
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        reason = "in use" if "EADDRINUSE" in str(error) or "in use" in str(error) else str(error).splitlines()[0]
        raise UsageError(f"--port {port} on --ip {host}: {reason}") from None
