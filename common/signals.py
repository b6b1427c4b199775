"""Signals that stop a run at the next step instead of ending its process; for scripts with snapshots."""
import multiprocessing
import os
import signal
import sys
import threading

from .cli import noted
from .launch import tie_worker

STOPPED = 85  # exit code of a run that saved and stopped because of a signal; a batch script restarts the run


def note_signals(*names: str) -> threading.Event:
    """Make these signals set an event, and return it; loader workers inherit that they are blocked."""
    numbers = {getattr(signal, name) for name in names if hasattr(signal, name)}  # Windows has no SIGUSR1
    for number in numbers:
        signal.signal(number, lambda *_: noted.set())  # in case one of torch's threads receives the signal
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        threading.Thread(target=_note, args=(numbers,), daemon=True).start()
    return noted


def _note(numbers: set[signal.Signals]) -> None:
    while sys.platform != "win32" and signal.sigwait(numbers):
        noted.set()


def shield_worker(worker_id: int) -> None:
    """Do what `tie_worker` does, and accept SIGTERM only from the training process: Slurm can signal every process."""
    tie_worker(worker_id)
    if sys.platform == "linux":
        parent = multiprocessing.parent_process().pid  # type: ignore[union-attr]
        threading.Thread(target=_end_when_asked_by, args=(parent,), daemon=True).start()
    elif sys.platform != "win32":  # macOS has no sigwaitinfo
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_when_asked_by(parent: int) -> None:
    while sys.platform == "linux" and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def stopped() -> int:
    """Ignore further signals and return the exit code of a run that a signal stopped."""
    for name in ("SIGTERM", "SIGUSR1"):  # when one process exits, launchers signal the others
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    return STOPPED
