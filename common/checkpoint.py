"""Atomic checkpoints that load without executing code."""
import contextlib
import errno
import math
import os
import pickle
import re
import shutil
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .errors import ProcessError, UsageError, reason
from .reduce import agree, is_main_process

LOCK_SECONDS = 100  # an NFSv4 server drops a crashed host's locks when the host's lease expires, after 90 s on Linux
REQUIRED = {"model", "optimizer", "scheduler", "epoch", "score", "best_score"}  # the keys of every checkpoint
_locks: list[TextIO] = []  # keeps the lock files open: closing one would release its lock


def make_folder(path: str | Path, lock: bool = True) -> Path:
    """Create the output folder `path` if needed and return it; every process must call this.

    With `lock`, the main process locks the folder until it exits; a loader worker that outlives it holds no lock. All
    processes raise UsageError if one of them cannot use the folder, or if another run has locked it.
    """
    problem = None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            problem = f"--output-dir {path}: not writable"
        elif lock and is_main_process():
            _locks.append(_lock(path, open(Path(path, ".lock"), "a+")))
    except OSError as error:
        problem = f"--output-dir {path}: {reason(error)}"
    except UsageError as error:
        problem = str(error)
    if not agree(problem) or problem:
        raise UsageError(problem or f"--output-dir {path}: another process cannot use it")
    return Path(path)


def _lock(path: str | Path, file: TextIO) -> TextIO:
    """Lock the `file` in the folder `path` and return it; warn if the file system does not support locks."""
    if sys.platform == "win32":  # Windows has no fcntl
        return file
    import fcntl

    end, waiting = time.monotonic() + LOCK_SECONDS, False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # ENOSYS on Lustre without -o flock, ENOLCK on NFS
                print(f"--output-dir {path}: its file system has no locks ({error.strerror}); a second run there will "
                      "not be detected", file=sys.stderr)
                return file
        file.seek(0)
        holder, _, kernel = file.read().strip().rpartition(" ")
        if kernel == _kernel() or time.monotonic() > end:
            raise UsageError(f"--output-dir {path}: in use by another run (host and process: {holder}); "
                             "choose another folder")
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
    """Return an ID of this host's current boot; a lock whose file contains the same ID is held by a live process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def collect(state: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return the content of a checkpoint: the `state_dict()` of each object in `state`, plus `values`.

    `values` must be plain Python values, to load with `weights_only=True`. Names in the model's `classes` are included.
    """
    names = getattr(state.get("model"), "classes", None)
    classes = {"classes": names} if isinstance(names, list) else {}
    return {name: part.state_dict() for name, part in state.items()} | classes | values


def other_classes(content: dict[str, Any], model: Any) -> str:
    """Return the first class in which a checkpoint's `content` and a `model` differ, in words; "" if there is none."""
    saved, names = content.get("classes"), getattr(model, "classes", None)
    if not isinstance(saved, list) or not isinstance(names, list) or saved == names:
        return ""
    place, (old, new) = next(each for each in enumerate(zip_longest(saved, names)) if each[1][0] != each[1][1])
    return f"its class {place} is {old!r} (of {len(saved)}), this run's is {new!r} (of {len(names)})"


def copied(value: Any) -> Any:
    """Return a copy of `value` (nested dicts, lists and tensors) with all tensors on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)


def save_checkpoint(path: str | Path, content: dict[str, Any], names: Iterable[str] = ()) -> None:
    """Write `content`, from collect(), atomically to each of `names` in the folder of `path`, and then to `path`.

    The content goes to a temporary file, which is flushed to disk and renamed, so a crash leaves either the old file or
    the new one. Each of `names` becomes a hard link or a copy. Raises ProcessError, for example if the disk is full.
    """
    temporary, other = (Path(path).with_name(f".{Path(path).name}.{kind}") for kind in ("tmp", "link"))
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        for name in names:
            other.unlink(missing_ok=True)  # a killed run may have left this file
            _link(temporary, other)
            os.replace(other, other.with_name(name))
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's zip writer reports a full disk as a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            other.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise ProcessError(f"cannot save {path}: {reason(cause)}; earlier checkpoints are intact") from None
    with contextlib.suppress(OSError):  # flush the folder, which stores the new name; Windows cannot open folders
        directory = os.open(Path(path).parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # FAT and some network file systems have no hard links
        with open(source, "rb") as original, open(target, "wb") as copy:
            shutil.copyfileobj(original, copy)
            copy.flush()
            os.fsync(copy.fileno())


class BackgroundWriter:
    """Saves checkpoints while training continues: one at a time, in the order of the calls."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None

    def save(self, path: str | Path, content: dict[str, Any]) -> None:
        """Wait for the previous save, copy `content`, and write it in the background."""
        self.wait()
        self.writing = self.pool.submit(save_checkpoint, path, copied(content))

    def wait(self) -> None:
        """Wait until the last save is on disk; raise ProcessError if it failed."""
        if self.writing:
            self.writing.result()


def load_file(option: str, path: str | Path) -> dict[str, Any]:
    """Return the dict that `torch.save` wrote to `path`, with its tensors on the CPU.

    The file may contain only tensors and plain values, so loading executes no code. torch maps the file into memory, so
    the processes of a host share one copy of its pages. Copy any tensor that must outlive the file. Raises UsageError,
    naming `option`, if the file is missing, incomplete, damaged or in another format.
    """
    try:
        if archive := zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:  # torch compares no checksums; they are all 0 if it wrote none
                if any(part.CRC for part in parts.infolist()) and parts.testzip():
                    raise zipfile.BadZipFile
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except OSError as error:
        raise UsageError(f"{option} {path}: {reason(error)}") from None
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        why = "incomplete, damaged or not from torch.save"
        if "maximum supported version" in str(error):
            why = f"written by a newer torch than {torch.__version__}"
        elif refused := re.search(r"GLOBAL (\S+)", str(error)):
            why = f"rejected: only tensors and plain values are loaded, and it contains {refused[1]}"
        raise UsageError(f"{option} {path}: {why}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{option} {path}: contains a {type(content).__name__}, not a checkpoint")
    return content


def resume(path: str | Path | None, output_dir: str | Path, state: dict[str, Any],
           progress: dict[str, Any] | None = None, take: Callable[[Any, Any], Any] = lambda part, saved: copied(saved),
           read: Callable[[str | Path], dict[str, Any]] | None = None) -> tuple[int, float]:
    """Restore the objects in `state` from a checkpoint; return (the next epoch, the best score so far or -inf).

    `path` is a file, None (no resume) or "auto" (`last.pt` in `output_dir`, if it exists). Any script may have written
    the checkpoint: optional objects that are not in it, such as a `scaler`, stay unchanged, and one line names them.
    The optimizer uses this command's learning rate, momentum and weight decay; one more line lists the changes. Each
    key of `progress` receives its value from the checkpoint; without `progress`, a checkpoint from within an epoch is
    rejected. `take(part, saved)` returns the state that the object `part` loads, and `read(path)` (by default,
    `load_file`) the content of a checkpoint. Raises UsageError if it does not fit or differs between processes.
    """
    for group in state["optimizer"].param_groups:  # record this command's rate: some schedulers do not record it
        group.setdefault("initial_lr", group["lr"])
    if path == "auto":
        path = Path(output_dir, "last.pt")
        path = path if path.exists() else None
    found = (1, -math.inf)
    if path is not None:
        content = read(path) if read else load_file("--resume", path)
        found = _restore(path, content, state, progress, take)
    if not agree((found, progress)):
        raise UsageError("--resume: the processes found different checkpoints; all hosts need to see the same folder")
    return found


def _restore(path: str | Path, checkpoint: dict[str, Any], state: dict[str, Any], progress: dict[str, Any] | None,
             take: Callable[[Any, Any], Any]) -> tuple[int, float]:
    for name in [*state, "epoch", "score", "best_score"]:
        if name not in checkpoint and name in REQUIRED:
            raise UsageError(f"--resume {path}: has no {name!r}; to load only its weights, use --weights")
    if other := other_classes(checkpoint, state["model"]):
        raise UsageError(f"--resume {path}: {other}; use the same classes, or load its weights with --weights")
    settings = [group.copy() for group in state["optimizer"].param_groups]
    for name, part in state.items():
        if not checkpoint.get(name):  # a disabled scaler has no state
            continue
        try:
            part.load_state_dict(take(part, checkpoint[name]))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"--resume {path}: its {name} does not fit; check the options of the model, the data and "
                             "the optimizer, such as --model, --dataset and --freeze-layers") from None
    step = checkpoint.get("step", 0)
    if step and progress is None:
        raise UsageError(f"--resume {path}: a snapshot within an epoch; resume it with the script that wrote it, or"
                         " load its weights with --weights")
    if progress:
        progress.update((name, checkpoint[name]) for name in progress.keys() & checkpoint.keys())
    changes = _keep_settings(state, settings)
    if is_main_process():
        done = f"{step} steps of epoch {checkpoint['epoch'] + 1} are" if step else f"epoch {checkpoint['epoch']} is"
        best = f", best score {checkpoint['best_score']:.4f}" if checkpoint["epoch"] else ""
        print(f"resume {path}: {done} done{best}")
        if changes:
            print(f"resume {path}: this command changes {', '.join(changes)}")
        if missing := [name for name, part in state.items() if name not in checkpoint and part.state_dict()]:
            print(f"resume {path}: not in the checkpoint, so initialized by this run: {', '.join(missing)}")
    return checkpoint["epoch"] + 1, checkpoint["best_score"]


def _keep_settings(state: dict[str, Any], settings: list[dict[str, Any]]) -> list[str]:
    """Reset a restored optimizer to this command's `settings`; return the changes, such as ["lr from 0.1 to 0.2"]."""
    groups, scheduler = state["optimizer"].param_groups, cast(Any, state.get("scheduler"))
    # a momentum that the scheduler changes, as OneCycleLR does, keeps the checkpoint's value
    scheduled = {"lr", "momentum", "betas"} if getattr(scheduler, "cycle_momentum", False) else {"lr"}
    restored = [group.copy() for group in groups]
    for group, old, new in zip(groups, restored, settings):
        group.update((name, value) for name, value in new.items() if name not in {"params", *scheduled})
        if "initial_lr" in new:  # schedulers scale this rate
            group["lr"] = old["lr"] * (new["initial_lr"] / old["initial_lr"])
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
    if hasattr(scheduler, "lr_lambdas"):  # recompute the rate: --epochs and --lrf may have changed too
        for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas):
            group["lr"] = base * factor(scheduler.last_epoch)
    return sorted({f"{name} from {old[name]:g} to {new[name]:g}" for old, new in zip(restored, groups)
                   for name in ("lr", "momentum", "weight_decay") if name in new and old[name] != new[name]})
