"""Launchers (torchrun, Slurm, mp.spawn, plain python): ranks, rendezvous, cores, and exiting with the parent."""
import contextlib
import ctypes
import multiprocessing
import multiprocessing.queues
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from .errors import UsageError


def local_world_size() -> int:
    """Return the launcher's number of processes on this host (1 without a launcher)."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return slurm_local_world_size(os.environ) if is_slurm_task() else 1


def launch_environment() -> dict[str, str]:
    """Return the environment variables that `torch.distributed` needs and that no launcher has set.

    In a parallel Slurm step, they follow from Slurm's variables: unless MASTER_ADDR and MASTER_PORT are set, the first
    host of the step is the master, and the port depends on the job and step numbers. Plain `python` gets a group of one
    process, on any free port. Raises UsageError if a variable is missing or wrong, or if `scontrol` does not answer.
    """
    env, names = os.environ, ["MASTER_PORT"]
    if env.get("RANK"):
        names = ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name):
                raise UsageError(f"RANK is set, but {name} is not; use a launcher such as torchrun, which sets both")
    elif not is_slurm_task():
        if env.get("WORLD_SIZE", "1") not in ("", "1"):
            raise UsageError(f"WORLD_SIZE is {env['WORLD_SIZE']}, but RANK is not set; use a launcher such as "
                             "torchrun, which sets both, or unset WORLD_SIZE")
        return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name in names:
        if name in env and not (env[name].isdecimal() and int(env[name]) < 65536):
            raise UsageError(f"{name} is {env[name]!r}, which is not a number from 0 to 65535")
    if env.get("RANK"):
        if int(env["RANK"]) >= int(env["WORLD_SIZE"]):
            raise UsageError(f"RANK is {env['RANK']}, but WORLD_SIZE is {env['WORLD_SIZE']}; ranks count from 0")
        return {}
    port = step_port(int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"]))
    return {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": env["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": str(slurm_local_world_size(env)),
            "MASTER_ADDR": env.get("MASTER_ADDR") or _first_host(env["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": env.get("MASTER_PORT", str(port))}


def cores_per_process() -> int:
    """Return how many cores this process may use, at least 1: those bound to it, or a share of the launch's cores."""
    if not hasattr(os, "sched_getaffinity"):  # macOS, Windows
        return max(1, (os.cpu_count() or 1) // local_world_size())
    own = os.sched_getaffinity(0)
    started_by_torch = "TORCHELASTIC_RUN_ID" in os.environ or multiprocessing.parent_process()
    if "SLURM_CPUS_ON_NODE" in os.environ and not started_by_torch:
        total = int(os.environ["SLURM_CPUS_ON_NODE"])  # "Number of CPUs available to the step on this node" (man srun)
    else:  # a parent outside this container has PID 0, which sched_getaffinity() takes as this process
        total = len(own | os.sched_getaffinity(os.getppid()))
    return max(1, min(len(own), total // local_world_size()))


def is_slurm_task() -> bool:
    """Return whether this process is a task of a parallel Slurm step."""
    group = None
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # not isatty: nohup and redirection leave the controlling terminal
            os.close(os.open("/dev/tty", os.O_RDONLY))
            group = os.getpgrp()
    return is_task(os.environ, group)


def is_task(env: Mapping[str, str], group: int | None) -> bool:
    """Return whether a process with the environment `env` belongs to one of several tasks that Slurm's `srun` started.

    `group` is its process group, or None if it has no terminal. A batch script is not a step, and the interactive step
    of `salloc` has one task. The shell of `srun -n4 --pty bash` has the variables of a task, but the other tasks have
    ended. An interactive shell gives each command a group. A script leaves them in its own.
    """
    return int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and (group is None or env.get("SLURM_TASK_PID") == str(group))


def slurm_local_world_size(env: Mapping[str, str]) -> int:
    """Return the Slurm step's number of tasks on this node: SLURM_STEP_TASKS_PER_NODE "2(x3),1" means 2, 2, 2, 1."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])
    counts = [int(tasks) for tasks, nodes in parts for _ in range(int(nodes or 1))]
    return counts[int(env["SLURM_NODEID"])]


def step_port(job: int, step: int) -> int:
    """Return the default MASTER_PORT of a Slurm step: 1000 consecutive jobs get 20 ports each."""
    return 12000 + job % 1000 * 20 + step % 20  # below Linux's ports for outgoing connections (ip_local_port_range)


def _first_host(nodes: str) -> str:
    try:
        return subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True,
                              check=True).stdout.split()[0]
    except (FileNotFoundError, subprocess.CalledProcessError):  # a container without Slurm or its configuration
        raise UsageError(f"scontrol cannot name the first host of {nodes}; set MASTER_ADDR to its name") from None


def end_with_parent(name: str) -> None:
    """On Linux, make the kernel send this process the signal `name` when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.Signals[name])  # PR_SET_PDEATHSIG


def end_with_launcher() -> None:
    """Under torchrun, exit when the agent has ended, even by SIGKILL: otherwise, this process would keep running."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or multiprocessing.parent_process():
        return
    end_with_parent("SIGTERM")
    # the agent may have exited while this process imported torch; in a container, process 1 may be the agent (Python)
    if os.getppid() == 1 and "python" not in os.path.basename(os.path.realpath("/proc/1/exe")):
        sys.exit(128 + signal.SIGTERM)


def tie_worker(worker_id: int) -> None:
    """Make a loader worker exit when the process that created its DataLoader ends; pass this as `worker_init_fn`.

    torch's own watchdog does not run while the worker starts, and under forkserver it watches the fork server. A batch
    that the worker cannot send becomes an error in that process, which would otherwise wait forever.
    """
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]
    end_with_parent("SIGKILL")  # Windows has no signal.SIGKILL
    threading.Thread(target=_outlive_no_parent, daemon=True).start()


def _outlive_no_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # a worker has a parent
    os._exit(1)


def _send_error(queue: Any, error: Exception, batch: Any) -> None:
    """Send `error` in place of a batch that cannot be sent."""
    from torch._utils import ExceptionWrapper  # not at the top: other users of this module do not need torch
    if not isinstance(batch, tuple):  # pickled already: the connection is broken
        os._exit(1)
    wrapper = ExceptionWrapper((type(error), error, error.__traceback__), "in DataLoader worker process")
    queue.put((batch[0], wrapper))
