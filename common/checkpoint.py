"""Atomic checkpoints that load without executing code."""
import contextlib
import errno
import os
import pickle
import socket
import sys
import time
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO, cast

import torch

from .errors import ProcessError, UsageError, reason
from .reduce import agree, is_main_process

LOCK_SECONDS = 100  # an NFSv4 server drops the locks of a crashed host when its lease ends; on Linux that is 90 s

_locks: list[TextIO] = []  # open as long as the process lives


def make_folder(path: str | Path, lock: bool = True) -> Path:
    """Make the folder `path` for a run's output if it is not there, and return it; UsageError where it cannot be.

    With `lock` the main process locks it until that process exits, for any reason: another run's main process is
    refused. (The lock is the process's own; a loader's worker that lives on for a moment does not hold it.)
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise UsageError(f"--output-dir {path}: not writable")
        if lock and is_main_process():
            _locks.append(_lock(path, open(Path(path, ".lock"), "a+")))
    except OSError as error:
        raise UsageError(f"--output-dir {path}: {reason(error)}") from None
    return Path(path)


def _lock(path: str | Path, file: TextIO) -> TextIO:
    """Lock the `file` of the folder `path` and return it; warn where the file system has no locks."""
    if sys.platform == "win32":  # has no fcntl
        return file
    import fcntl

    end = time.monotonic() + LOCK_SECONDS
    waiting = False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # Lustre without -o flock: ENOSYS; NFS: ENOLCK
                print(f"--output-dir {path}: its file system has no locks ({error.strerror}); a second run there is not"
                      " noticed", file=sys.stderr)
                return file
        else:
            break
        file.seek(0)
        holder, _, kernel = file.read().strip().rpartition(" ")
        if kernel == _kernel() or time.monotonic() > end:
            raise UsageError(f"--output-dir {path}: another run writes there (host and process: {holder}); "
                             "name another folder")
        if not waiting:
            print(f"--output-dir {path}: locked by another host (host and process: {holder}); waiting up to "
                  f"{LOCK_SECONDS} s, in case that host has crashed", file=sys.stderr)
        waiting = True
        time.sleep(1)
    file.truncate(0)
    file.write(f"{socket.gethostname()} {os.getpid()} {_kernel()}\n")
    file.flush()
    return file


def _kernel() -> str:
    """Return what names this start of this machine: on one machine a lock is held by a process that lives."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def save_checkpoint(path: str | Path, state: dict[str, Any], **values: Any) -> None:
    """Write the `state_dict()` of every object in `state`, and `values` as they are, to `path`, whole or not at all.

    The file is written under another name, forced to disk, then renamed: a crash leaves the old one or the new one.
    `values` are plain Python values, so that the file loads with `weights_only=True`. Raises ProcessError when the
    file cannot be written (no space, no permission).
    """
    _write(Path(path), _content(state, values))


class BackgroundWriter:
    """Saves checkpoints while training goes on: one at a time, in the order of the calls."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None

    def save(self, path: str | Path, state: dict[str, Any], **values: Any) -> None:
        """Copy `state` and `values` now, then write them as `save_checkpoint` does; waits for the save before."""
        self.wait()
        content = _copy(_content(state, values))
        self.writing = self.pool.submit(_write, Path(path), content)

    def wait(self) -> None:
        """Return when the last save is on disk; raises ProcessError if it failed."""
        if self.writing:
            self.writing.result()


def _content(state: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in state.items()} | values


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    return type(value)(map(_copy, value)) if isinstance(value, (list, tuple)) else value


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's zip writer turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise ProcessError(f"cannot save {path}: {reason(cause)}; what was saved before is whole") from None
    with contextlib.suppress(OSError):  # the new name is on disk only when the folder is; Windows opens no folder
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)


def load_file(option: str, path: str | Path) -> dict[str, Any]:
    """Return what `torch.save` wrote to `path`, on the CPU: tensors and plain values only, no code is run.

    The file is mapped, not read: the processes of a host share its pages, where each would have a copy in memory
    (https://docs.pytorch.org/docs/stable/generated/torch.load.html, `mmap`). So copy what is to outlive the file.
    Raises UsageError, naming `option`, for a file that is missing, torn or of another kind.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise UsageError(f"{option} {path}: no such file") from None
    except OSError as error:
        raise UsageError(f"{option} {path}: {reason(error)}") from None
    except pickle.UnpicklingError:
        raise UsageError(f"{option} {path}: not a file of tensors and plain values, so it is not loaded") from None
    except (RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        newer = "maximum supported version" in str(error)
        why = f"written by a newer torch than {torch.__version__}" if newer else "torn, or not written by torch.save"
        raise UsageError(f"{option} {path}: {why}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{option} {path}: holds a {type(content).__name__}, not a checkpoint")
    return content


def resume(path: str | Path | None, output_dir: str | Path, state: dict[str, Any],
           progress: dict[str, Any] | None = None) -> tuple[int, float]:
    """Restore the objects in `state` from a checkpoint; return (the next epoch, the best accuracy so far or -1).

    `path` is a file, None for nothing to resume, or "auto" for `last.pt` in `output_dir` if it is there. A checkpoint
    of any variant will do: one without a `scaler` leaves the scaler as it is. The optimizer keeps the settings of this
    command (rate, momentum, weight decay), and one line says what they change. `progress` is a dict that takes over
    what the checkpoint has under its keys; without one a snapshot within an epoch is refused. Raises UsageError for a
    checkpoint that does not fit, and where the processes did not all find the same one.
    """
    if path == "auto":
        path = Path(output_dir, "last.pt")
        path = path if path.exists() else None
    found = (1, -1.0) if path is None else _restore(path, state, progress)
    if not agree((found, progress)):
        raise UsageError("--resume: the processes found different checkpoints; all hosts need to see the same folder")
    return found


def _restore(path: str | Path, state: dict[str, Any], progress: dict[str, Any] | None) -> tuple[int, float]:
    checkpoint = load_file("--resume", path)
    for name in [*state, "epoch", "accuracy", "best_accuracy"]:
        if name not in checkpoint and name != "scaler":
            raise UsageError(f"--resume {path}: has no {name!r}; to start from its weights alone use --weights")
    settings = [group.copy() for group in state["optimizer"].param_groups]
    for name, part in state.items():
        if not checkpoint.get(name):  # a scaler that was not in use has no state
            continue
        try:
            part.load_state_dict(_copy(checkpoint[name]))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"--resume {path}: its {name} is of another run: other --model, --dataset or"
                             " --freeze-layers?") from None
    step = checkpoint.get("step", 0)
    if step and progress is None:
        raise UsageError(f"--resume {path}: a snapshot within an epoch; resume it with train_elastic.py, or load its"
                         " weights with --weights")
    if progress is not None:
        progress.update((name, checkpoint[name]) for name in progress.keys() & checkpoint.keys())
    changes = _keep_settings(state, settings)
    if is_main_process():
        done = f"{step} steps of epoch {checkpoint['epoch'] + 1} are" if step else f"epoch {checkpoint['epoch']} is"
        print(f"resume {path}: {done} done, best accuracy {checkpoint['best_accuracy']:.4f}")
        if changes:
            print(f"resume {path}: this command changes {', '.join(changes)}")
    return checkpoint["epoch"] + 1, checkpoint["best_accuracy"]


def _keep_settings(state: dict[str, Any], settings: list[dict[str, Any]]) -> list[str]:
    """Give a restored optimizer the `settings` it had before; return what that changes, ["lr from 0.1 to 0.2"]."""
    groups, scheduler = state["optimizer"].param_groups, cast(Any, state.get("scheduler"))
    restored = [group.copy() for group in groups]
    for group, old, new in zip(groups, restored, settings):
        group.update((name, value) for name, value in new.items() if name not in ("params", "lr"))
        if "initial_lr" in new:  # a scheduler moves the rate in proportion to this
            group["lr"] = old["lr"] * (new["initial_lr"] / old["initial_lr"])
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
    if hasattr(scheduler, "lr_lambdas"):  # a closed form, in which --epochs and --lrf may have changed too
        for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas):
            group["lr"] = base * factor(scheduler.last_epoch)
    return sorted({f"{name} from {old[name]:g} to {new[name]:g}" for old, new in zip(restored, groups)
                   for name in ("lr", "momentum", "weight_decay") if name in new and old[name] != new[name]})
