"""Signals: end a process when another ends, and handle SIGTERM and SIGUSR1 for `train_elastic.py`."""
import ctypes
import multiprocessing
import os
import signal
import sys
import threading

STOPPED = 85  # exit code of a run that saved and stopped on a signal: restart it

noted = threading.Event()


def end_with_parent(name: str) -> None:
    """On Linux, make the kernel send this process the signal `name` when its parent ends; elsewhere, do nothing.

    "Parent" is the thread that started this process (https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html).
    """
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


def note_signals(*names: str) -> threading.Event:
    """Make these signals set an event instead of ending the process; return that `threading.Event`.

    This thread blocks them, so the loader workers that it starts inherit the block: see `shield_worker`.
    """
    numbers = {getattr(signal, name) for name in names if hasattr(signal, name)}  # Windows has no SIGUSR1
    for number in numbers:
        signal.signal(number, lambda *_: noted.set())  # in case one of torch's threads receives it
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        threading.Thread(target=_note, args=(numbers,), daemon=True).start()
    return noted


def _note(numbers: set[signal.Signals]) -> None:
    while sys.platform != "win32" and signal.sigwait(numbers):
        noted.set()


def tie_worker(worker_id: int) -> None:
    """As a DataLoader's `worker_init_fn`, end the worker when the process that reads from it ends.

    torch's own watchdog misses a death while the worker is starting, which takes seconds under spawn. Under forkserver,
    it watches the server, which lives as long as a worker does.
    """
    end_with_parent("SIGKILL")  # Windows has no signal.SIGKILL
    threading.Thread(target=_outlive_no_parent, daemon=True).start()


def _outlive_no_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # a worker has a parent
    os._exit(1)


def shield_worker(worker_id: int) -> None:
    """Like `tie_worker`, and accept SIGTERM only from the training process.

    Schedulers signal every process of a job. If a worker exited then, the epoch would fail before it is saved.
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
    """Return the exit code of a run that a signal stopped after this step; the main process prints a line."""
    from .reduce import is_main_process  # here, because that module imports this one

    for name in ("SIGTERM", "SIGUSR1"):  # when one process exits, launchers signal the others
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if is_main_process():
        print(f"epoch {epoch}, step {step}: stopped by a signal and saved; --resume auto continues here")
    return STOPPED
