"""How a run ends: an error that can be foreseen is one line on standard error, any other keeps its whole traceback."""
import atexit
import contextlib
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from . import signals

PATIENCE = 10  # seconds in which the launcher ends a process that only noticed another's failure
# from torch/utils/data/_utils/signal_handling.py; the error of a dataset arrives as "Caught ... in DataLoader worker"
WORKER_DIED = re.compile(r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)")
# what gloo, the store and NCCL say of a peer that has gone
LATE = re.compile(r"timed? ?out", re.I)
PEER_LOST = re.compile(rf"{LATE.pattern}|connection (was )?(closed|reset|refused)|broken pipe|unreachable|"
                       "no route to host|ncclRemoteError", re.I)


class UsageError(Exception):
    """The command asks for what cannot be done. Every process finds this alike; exit code 2."""

    exit_code = 2


class RunError(Exception):
    """The run failed, for a reason that all processes know alike (a loss that is not finite); exit code 1."""

    exit_code = 1


class ProcessError(RunError):
    """The run failed, for a reason that this process alone knows (a file it could not read); exit code 1."""


def require_finite(value: float, what: str) -> None:
    """Raise RunError if a number that all processes hold alike, such as "epoch 1, step 2: the loss", is not finite."""
    if not math.isfinite(value):
        raise RunError(f"{what} is {value}; try a lower --lr")


def reason(error: BaseException) -> str:
    """Return why an operation failed, in a few words: an OSError's own, or the first line of the message."""
    return getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[0]


def explain(error: BaseException) -> str | None:
    """Return the one line (the whole message, for a lost connection) for an error that can be foreseen, else None."""
    text = str(error).strip()
    # an error of a loader's worker or of a replica arrives with its traceback; the last line is "Class: message"
    last = "".join(text.splitlines()[-1:]).removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")
    if isinstance(error, (UsageError, RunError)):
        return last
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {last} try a smaller --batch-size, or train_grad_accum.py"
    if isinstance(error, RuntimeError) and WORKER_DIED.match(text):
        return f"{text} (out of memory? fewer --workers take less)"
    if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in text:
        return f"MASTER_PORT {os.environ.get('MASTER_PORT')} is in use on this host; choose another port"
    if lost_the_others(error):
        late = LATE.search(text)
        advice = "look at the hosts, their network and --timeout" if late else "the first that failed says why"
        return f"{_where(error)}lost the other processes: {text} ({advice})"
    return None


def lost_the_others(error: BaseException) -> bool:
    """Return whether an error says that another process, or the way to it, is gone."""
    from_peers = isinstance(error, dist.DistError) or type(error) is RuntimeError and "gloo" in str(error)
    return from_peers and bool(PEER_LOST.search(str(error)))


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Where a script starts: set up how it ends, and end it with one line for every failure that can be foreseen.

    Of the processes of one launch, the one that knows the cause reports it: the main process if all processes know it,
    otherwise the one where it happened, with its rank. The others, which notice only a broken connection, first give
    the launcher PATIENCE seconds to end them, and report only if it does not. Anything unforeseen keeps its traceback.
    A process without a launcher takes SIGTERM as it takes Ctrl-C: it ends what it started, then itself.
    After a failure the process writes what is open and exits at once. It does not destroy the process group, which
    waits for the others, who may wait for this process (NCCL: ncclCommDestroy is collective within a node).
    Exit codes: 2 for wrong usage, 1 for a failed run, 130 for Ctrl-C, 143 for SIGTERM.
    """
    signals.end_with_launcher()
    if hasattr(sys.stdout, "reconfigure"):  # an epoch's line is in the log when the epoch is done, not at the end
        sys.stdout.reconfigure(line_buffering=True)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it would talk after the one line
    if not _several():
        signal.signal(signal.SIGTERM, _interrupt)
    failed: list[int] = []  # the exit code; registered first, so atexit calls this after all that the script registers
    atexit.register(lambda: _exit_at_once(failed[0]) if failed else None)
    try:
        yield
    except SystemExit:  # --help, or train_elastic.py after a signal
        raise
    except BaseException as error:
        failed.append(1)
        said = _last_words(error)
        if not said:
            raise
        line, failed[0] = said
        if line:
            print(f"{os.path.basename(sys.argv[0])}: error: {line}", file=sys.stderr)
        sys.exit(failed[0])


def _last_words(error: BaseException) -> tuple[str | None, int] | None:
    """Return (the line or None, the exit code) of an error that can be foreseen, None for any other."""
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
    if isinstance(error, KeyboardInterrupt):
        return _interrupted(error, rank)
    if isinstance(error, ProcessExitedException):  # in mp.spawn's parent; a process that failed has spoken
        if error.exit_code >= 0:
            return None, error.exit_code
        name = signal.Signals(-error.exit_code).name
        return f"process {error.error_index} was ended by {name}; the others were stopped", 1
    line = explain(error)
    if not line:
        return None
    if isinstance(error, (UsageError, RunError)) and not isinstance(error, ProcessError):
        if rank:
            _wait_to_be_ended()
        return f"rank {rank}: {line}" if rank else line, error.exit_code
    # all on a host are late together: one of them speaks
    if lost_the_others(error) and (not LATE.search(line) or os.environ.get("LOCAL_RANK", "0") != "0"):
        _wait_to_be_ended()
    return f"rank {rank}: {line}" if _several() else line, 1


def _interrupted(error: KeyboardInterrupt, rank: int) -> tuple[str | None, int]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the cleanup
    code = error.args[0] if error.args else 128 + signal.SIGINT
    if multiprocessing.parent_process() or rank:  # mp.spawn's parent, or rank 0, speaks
        return None, code
    for process in multiprocessing.active_children():  # Ctrl-C has reached them too
        if code != 130 and process.pid:
            os.kill(process.pid, signal.SIGINT)
        process.join(3)
        process.terminate()
    return "interrupted" if code == 130 else "ended by SIGTERM", code


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt(128 + signal.SIGTERM)


def _exit_at_once(code: int) -> None:
    with contextlib.suppress(OSError):  # a reader of the output that has gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _several() -> bool:
    from .launch import is_slurm_task  # here, because that module imports this one

    size = os.environ.get("WORLD_SIZE")
    return int(size) > 1 if size else is_slurm_task()


def _wait_to_be_ended() -> None:
    signals.noted.wait(PATIENCE)


def _where(error: BaseException) -> str:
    # the training loop's own variables say how far it was
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "main" and "epoch" in frame.f_locals:
            return f"epoch {frame.f_locals['epoch']}, step {frame.f_locals.get('step', 0)}: "
    return ""
