"""Signals: which process ends when another does, and what `train_elastic.py` does with SIGTERM and SIGUSR1."""
import ctypes
import multiprocessing
import os
import signal
import sys
import threading

STOPPED = 85  # exit code of a run that a signal stopped after a save: "start me again"

noted = threading.Event()


def end_with_parent(name: str) -> None:
    """Let the system send this process the signal `name` when its parent ends (on Linux; elsewhere, nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.Signals[name])  # PR_SET_PDEATHSIG


def end_with_launcher() -> None:
    """Under torchrun, end when its agent ends, even by SIGKILL: else this process would wait for peers or train on."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or multiprocessing.parent_process():
        return
    end_with_parent("SIGTERM")
    # the agent may have ended while torch was imported (it is a Python program, also as process 1 of a container)
    if os.getppid() == 1 and "python" not in os.path.basename(os.path.realpath("/proc/1/exe")):
        sys.exit(128 + signal.SIGTERM)


def note_signals(*names: str) -> threading.Event:
    """From now on only note these signals, however often they come; return the `threading.Event` that says so.

    This thread blocks them, so that the loader's workers, which it starts, inherit the block: see `shield_worker`.
    """
    numbers = {getattr(signal, name) for name in names if hasattr(signal, name)}  # Windows has no SIGUSR1
    for number in numbers:
        signal.signal(number, lambda *_: noted.set())  # where a thread of torch's takes it
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        threading.Thread(target=_note, args=(numbers,), daemon=True).start()
    return noted


def _note(numbers: set[signal.Signals]) -> None:
    while sys.platform != "win32" and signal.sigwait(numbers):
        noted.set()


def tie_worker(worker_id: int) -> None:
    """In a DataLoader's worker (its `worker_init_fn`): end when the process that reads from it ends.

    torch's own watchdog misses a death while the worker still starts, which under spawn takes seconds. Under forkserver
    it watches the server, which lives as long as a worker does.
    """
    end_with_parent("SIGKILL")  # Windows has no signal.SIGKILL
    threading.Thread(target=_outlive_no_parent, daemon=True).start()


def _outlive_no_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # a worker has a parent
    os._exit(1)


def shield_worker(worker_id: int) -> None:
    """As `tie_worker`, and take SIGTERM from the training process alone.

    Schedulers signal every process of a job. A worker that ended then would break the epoch that is to be saved.
    """
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


def stopped(epoch: int, step: int) -> int:
    """Return the exit code of a run that a signal stopped after this step; the main process says so."""
    from .reduce import is_main_process  # here, because that module imports this one

    for name in ("SIGTERM", "SIGUSR1"):  # when one process has ended, launchers signal the others
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if is_main_process():
        print(f"epoch {epoch}, step {step}: stopped by a signal and saved; --resume auto continues here")
    return STOPPED
