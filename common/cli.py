"""The frame of a script: validated arguments, one-line errors, and how its run ends."""
import argparse
import atexit
import contextlib
import gc
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from .errors import ProcessError, RunError, UsageError, reason
from .launch import end_with_launcher, is_slurm_task

PATIENCE = 10  # seconds: a process that only lost a connection waits this long for the launcher to end it
# From torch/utils/data/_utils/signal_handling.py; an error in a dataset says "Caught ... in DataLoader worker" instead
WORKER_DIED = re.compile(r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)")
# From aten/src/ATen/MapAllocator.cpp; where a file system cannot reserve space, a bus error ends the worker instead
SHARED_MEMORY_FULL = re.compile(r"unable to allocate shared memory|</torch_\w+>.*No space left on device")
# Messages of gloo, the store and NCCL about a lost peer. Under NCCL, torch's watchdog usually ends the process first,
# with SIGABRT, so nothing in this file runs (see docs/operations.md)
LATE = re.compile(r"timed? ?out", re.I)
PEER_LOST = re.compile(rf"{LATE.pattern}|connection (was )?(closed|reset|refused)|broken pipe|unreachable|"
                       "no route to host|remote process exited", re.I)

noted = threading.Event()  # set by a signal that does not end the process: see signals.note_signals


class ArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that reports errors in one line, shows defaults, expands ~ and accepts no abbreviations."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description.strip(), allow_abbrev=False, formatter_class=_HelpFormatter)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args  # a shell does not expand the ~ in --output-dir=~/runs
        return super().parse_known_args([_expand_user(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def _expand_user(word: str) -> str:
    if word != word.encode(errors="replace").decode():
        raise UsageError(f"{word!a}: not UTF-8, which TensorBoard needs; rename the file or folder, or link to it")
    option, equals, path = word.partition("=")
    return option + equals + os.path.expanduser(path) if option.startswith("--") else os.path.expanduser(word)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default not in (None, False, argparse.SUPPRESS) and "default" not in str(action.help)
        return f"{action.help} (default: %(default)s)" if shown else str(action.help)


def _number(convert: Callable[[str], float], holds: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def show(values: Mapping[str, float]) -> str:
    """Return the values as text: "accuracy 0.8134  top5 0.9972"."""
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


positive_int = _number(int, lambda value: value > 0, "a whole number above 0")
count = _number(int, lambda value: 0 <= value < 2**64, "a whole number from 0 to 2**64 - 1")  # also for seeds
positive = _number(float, lambda value: value > 0, "a number above 0")
not_negative = _number(float, lambda value: value >= 0, "a number, 0 or more")
fraction = _number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
port_number = _number(int, lambda value: 0 < value < 65536, "a port, 1 to 65535")


def explain(error: BaseException) -> str | None:
    """Return the line to print for an expected error (for a lost connection, the whole message), else None."""
    text = str(error).strip()
    # An error from a loader worker or from DataParallel includes a traceback, which ends with "Class: message"
    last = "".join(text.splitlines()[-1:]).removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")
    if isinstance(error, (UsageError, RunError)):
        return last
    if isinstance(error, OSError):
        try:
            print(flush=True)  # does this fail again, as after `| head`? flush() alone would not
        except OSError as lost:
            return f"standard output: {reason(lost)}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {last} try a smaller --batch-size, or train_grad_accum.py"
    if isinstance(error, RuntimeError) and WORKER_DIED.match(text):
        return f"{text} (out of memory? try fewer --workers)"
    if SHARED_MEMORY_FULL.search(last):
        return "/dev/shm is full; enlarge it (in Docker: --shm-size=8g), or use fewer --workers"
    if "AF_UNIX path too long" in last:  # limit: 107 bytes
        return f"TMPDIR {tempfile.gettempdir()}: too long for the sockets of loader workers; set a shorter TMPDIR"
    if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in text:
        return f"MASTER_PORT {os.environ.get('MASTER_PORT')} is in use on this host; choose another port"
    if lost_the_others(error):
        late = LATE.search(text)
        advice = "check the hosts, the network and --timeout" if late else "the first process that failed says why"
        lines = [number for frame, number in traceback.walk_tb(error.__traceback__)
                 if os.path.basename(frame.f_code.co_filename) == os.path.basename(sys.argv[0])]
        where = f"line {lines[-1]}: " if lines else ""  # of the script
        return f"{where}lost the other processes: {text} ({advice})"
    return None


def lost_the_others(error: BaseException) -> bool:
    """Return whether the error means that another process, or the connection to it, is lost."""
    # torch 2.15's NCCL group raises a RuntimeError: NCCLException in torch/csrc/distributed/c10d/nccl2
    from_peers = isinstance(error, dist.DistError) or type(error) is RuntimeError and re.search("gloo|NCCL", str(error))
    return bool(from_peers and PEER_LOST.search(str(error)))


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Run a script in this context, which prints one line for an expected failure and sets the exit code.

    If all processes know the cause, the main process reports it. Otherwise, the process that failed reports it, with
    its rank. Processes that only lost a connection first give the launcher PATIENCE seconds to end them. An unexpected
    error keeps its traceback. Without a launcher, SIGTERM acts like Ctrl-C: the process ends its children, then itself.
    Exit codes: 2 for wrong usage, 1 for a failed run, 130 for Ctrl-C, 143 for SIGTERM. After a failure, the process
    exits at once: destroying the process group would wait for processes that may wait for this one. So does a process
    with a device mesh when its script is done.
    """
    # A shell closed these streams, as with 2>&-. tqdm and flush() need files, and otherwise, another file would get a
    # stream's number, to which torch's C++ code writes warnings
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    end_with_launcher()
    if hasattr(sys.stdout, "reconfigure"):  # write each epoch's line to a log file at once; print any file name
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # mp.spawn would log the error, too
    if not _several():
        signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the job does not ignore Ctrl-C
        signal.signal(signal.SIGINT, _interrupt)
    codes: list[int] = []  # the exit code, if any; the handler below is registered first, so it runs last
    atexit.register(lambda: _exit_at_once(codes[0]) if codes else None)
    try:
        yield
        codes += [0] if _has_mesh() else []
    except SystemExit as end:  # --help, or the exit code of a script with snapshots
        codes += [int(end.code or 0)] if _has_mesh() else []
        raise
    except BaseException as error:
        codes.append(1)
        said = _last_words(error)
        if not said:
            raise
        line, codes[0] = said
        if line:
            print(f"{os.path.basename(sys.argv[0])}: error: {line}", file=sys.stderr)
        sys.exit(codes[0])


def _has_mesh() -> bool:
    """Return whether a device mesh exists: torch keeps it, so gloo's threads outlive the group (docs/pitfalls, E15)."""
    return any(type(value) is dist.DeviceMesh for value in gc.get_objects())


def _last_words(error: BaseException) -> tuple[str | None, int] | None:
    """Return (the line or None, the exit code) for an expected error, None for any other."""
    number = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    rank = int(number) if number.isdecimal() else 0
    if isinstance(error, KeyboardInterrupt):
        return _interrupted(error, rank)
    if isinstance(error, ProcessExitedException):  # in mp.spawn's parent; the failed process has already reported it
        if error.exit_code >= 0:
            return None, error.exit_code
        name = signal.Signals(-error.exit_code).name
        return f"process {error.error_index} was killed by {name}; the others were stopped", 1
    line = explain(error)
    if not line:
        return None
    if isinstance(error, (UsageError, RunError)) and not isinstance(error, ProcessError):
        if rank and _must_end():
            return None, error.exit_code
        return f"rank {rank}: {line}" if rank else line, error.exit_code
    # all processes of a host time out together: only one reports
    bystander = lost_the_others(error) and (not LATE.search(line) or os.environ.get("LOCAL_RANK", "0") != "0")
    if bystander and not noted.is_set() and _must_end():  # an earlier signal did not come from the launcher
        return None, 1
    return f"rank {rank}: {line}" if _several() else line, 1


def _interrupted(error: KeyboardInterrupt, rank: int) -> tuple[str | None, int]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would interrupt the cleanup
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a loader worker ends
    sys.unraisablehook = lambda _: None  # __del__ fails if the constructor was interrupted
    code = error.args[0] if error.args else 128 + signal.SIGINT
    if multiprocessing.parent_process() or rank:  # mp.spawn's parent or rank 0 reports
        return None, code
    for process in multiprocessing.active_children():
        if process.daemon:  # a loader's worker; while it starts, an interrupt would end it with a traceback
            process.kill()
        elif code != 130 and process.pid:  # a terminal sends Ctrl-C to the children, too
            os.kill(process.pid, signal.SIGINT)
        process.join(3)
        process.terminate()
    return "interrupted" if code == 130 else "terminated by SIGTERM", code


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame and sys.platform != "win32":
        if frame.f_code is BaseProcess.start.__code__:  # a half-started child would print a traceback: retry later
            threading.Timer(0.01, os.kill, [os.getpid(), number]).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt(128 + number)


def _exit_at_once(code: int) -> None:
    with contextlib.suppress(OSError):  # the reader of the output has exited
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _several() -> bool:
    size = os.environ.get("WORLD_SIZE")
    return size.isdecimal() and int(size) > 1 if size else is_slurm_task()


def _must_end() -> bool:
    """Give the launcher PATIENCE seconds to end this process; return whether it sent a signal that is only noted."""
    # in short intervals: Python handles a signal that another thread receives only after wait()
    return any(noted.wait(0.1) for _ in range(10 * PATIENCE))
