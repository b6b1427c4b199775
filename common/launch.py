"""How this process was started, and where the processes meet: torchrun, Slurm, `mp.spawn` or plain `python`."""
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping

import torch.distributed as dist

from .errors import UsageError, reason


def local_world_size() -> int:
    """Return how many processes of the launch share this machine, as the launcher says (1 without a launcher)."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return slurm_local_world_size(os.environ) if is_slurm_task() else 1


def launch_environment() -> dict[str, str]:
    """Return the variables that `torch.distributed` reads from the environment and that no launcher has set.

    torchrun and torch.distributed.launch set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT. A task of a parallel Slurm step takes them from Slurm's own variables. The first host of the step is
    the master, and the port follows from the numbers of job and step; MASTER_ADDR and MASTER_PORT override both.
    Plain `python` is a group of one process, at any free port.
    Raises UsageError where MASTER_ADDR is not set and Slurm's `scontrol`, which names the hosts, cannot run.
    """
    env = os.environ
    if "RANK" in env:
        return {}
    if not is_slurm_task():
        return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    port = step_port(int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"]))
    return {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": env["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": str(slurm_local_world_size(env)),
            "MASTER_ADDR": env.get("MASTER_ADDR") or _first_host(env["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": env.get("MASTER_PORT", str(port))}


def cores_per_process() -> int:
    """Return how many cores of this machine each process of the launch on it can have, at least 1.

    Cores that several processes share are divided among them. Cores that the launcher gave to this process alone
    (Slurm's task/affinity, `torchrun --numa-binding`, numactl) are not.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS, Windows
        return max(1, (os.cpu_count() or 1) // local_world_size())
    own = os.sched_getaffinity(0)
    started_by_torch = "TORCHELASTIC_RUN_ID" in os.environ or multiprocessing.parent_process()
    if "SLURM_CPUS_ON_NODE" in os.environ and not started_by_torch:
        total = int(os.environ["SLURM_CPUS_ON_NODE"])  # "Number of CPUs available to the step on this node" (man srun)
    else:  # a parent outside this container has the id 0, which stands for this process itself
        total = len(own | os.sched_getaffinity(os.getppid()))
    return share_cores(len(own), total, local_world_size())


def share_cores(own: int, total: int, processes: int) -> int:
    """Return how many cores one of `processes` computes with: its `own`, but no more than its share of the `total`."""
    return max(1, min(own, total // processes))


def is_slurm_task() -> bool:
    """Return whether this process is one of the tasks of a parallel Slurm step."""
    return is_task(os.environ, os.getpid(), _has_terminal())


def is_task(env: Mapping[str, str], pid: int, has_terminal: bool) -> bool:
    """Return whether the process `pid` with the environment `env` is one of several tasks that Slurm's `srun` started.

    A batch script has SLURM_PROCID but is no step, and the interactive step of `salloc` is a step of one task. In the
    shell of `srun -n4 --pty bash` the variables are those of the first of four tasks, but the other three shells have
    ended. What is started there has the shell's terminal and a pid other than the task's; a task of a step without
    `--pty` has no terminal, also where a wrapper script starts `python`.
    """
    return int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and (not has_terminal or env.get("SLURM_TASK_PID") == str(pid))


def _has_terminal() -> bool:
    try:  # not isatty: nohup or a redirection takes standard input away, but not the controlling terminal
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True


def slurm_local_world_size(env: Mapping[str, str]) -> int:
    """Return how many tasks of the Slurm step share the node, from the environment of one of them.

    SLURM_STEP_TASKS_PER_NODE has one number for each node of the step; "2(x3),1" stands for 2, 2, 2, 1.
    """
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"]):
        counts += [int(tasks)] * int(nodes or 1)
    return counts[int(env["SLURM_NODEID"])]


def step_port(job: int, step: int) -> int:
    """Return the port where the tasks of a Slurm step meet.

    The steps of a job and the jobs next to it have ports of their own: 20 for each of 1000 jobs, below the range from
    which Linux takes the ports of outgoing connections (ip_local_port_range, from 32768).
    """
    return 12000 + job % 1000 * 20 + step % 20


def _first_host(nodes: str) -> str:
    try:
        return subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True,
                              check=True).stdout.split()[0]
    except (FileNotFoundError, subprocess.CalledProcessError):  # a container without Slurm, or without its settings
        raise UsageError(f"scontrol cannot name the first host of {nodes}; set MASTER_ADDR to its name") from None


def serve_store(host: str, port: int, nodes: int) -> dist.TCPStore:
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
                             use_libuv=sys.platform != "win32",  # torch is built without it there
                             master_listen_fd=listener.detach() if listener else None)
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        why = "in use" if "EADDRINUSE" in str(error) or "in use" in str(error) else reason(error)
        raise UsageError(f"--port {port} on --ip {host}: {why}") from None
