"""Checkpoints that a crash cannot tear and that loading cannot turn into running code."""
import os
import pickle
import zipfile
from pathlib import Path

import torch

from common.cli import ProcessError, UsageError
from common.reduce import is_main_process


def make_folder(path):
    """Make the folder `path` for a run's output if it is not there, and return it; UsageError where it cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"--output-dir {path}: not writable")
    return Path(path)


def save_checkpoint(path, state, **values):
    """Write the `state_dict()` of every object in `state`, and `values` as they are, to `path`, whole or not at all.

    The file is written under another name, forced to disk, then renamed: a crash leaves the old one or the new one.
    `values` are plain Python values, so that the file loads with `weights_only=True`. Raises ProcessError when the
    file cannot be written (no space, no permission).
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    content = {name: part.state_dict() for name, part in state.items()} | values
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)  # the new name is on disk only when the folder is
        os.fsync(directory)
        os.close(directory)
    except (OSError, RuntimeError) as error:  # torch's zip writer turns a full disk into a RuntimeError
        temporary.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise ProcessError(f"cannot save {path}: {reason}; what was saved before is whole") from None


def load_file(option, path):
    """Return what `torch.save` wrote to `path`, on the CPU: tensors and plain values only, no code is run.

    Raises UsageError, naming `option`, for a file that is missing, torn or of another kind.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"{option} {path}: no such file") from None
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None
    except pickle.UnpicklingError:
        raise UsageError(f"{option} {path}: not a file of tensors and plain values, so it is not loaded") from None
    except (RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        raise UsageError(f"{option} {path}: torn, or not written by torch.save") from None
    if not isinstance(content, dict):
        raise UsageError(f"{option} {path}: holds a {type(content).__name__}, not a checkpoint")
    return content


def resume(path, output_dir, state):
    """Restore the objects in `state` from a checkpoint; return (the next epoch, the best accuracy so far or -1).

    `path` is a file, None for nothing to resume, or "auto" for `last.pt` in `output_dir` if it is there. A checkpoint
    of any variant will do: one without a `scaler` leaves the scaler as it is. Raises UsageError for a checkpoint that
    does not fit.
    """
    if path == "auto":
        path = Path(output_dir, "last.pt")
        path = path if path.exists() else None
    if path is None:
        return 1, -1.0
    checkpoint = load_file("--resume", path)
    for name in [*state, "epoch", "accuracy", "best_accuracy"]:
        if name not in checkpoint and name != "scaler":
            raise UsageError(f"--resume {path}: has no {name!r}; to start from its weights alone use --weights")
    for name, part in state.items():
        if not checkpoint.get(name):  # a scaler that was not in use has no state
            continue
        try:
            part.load_state_dict(checkpoint[name])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"--resume {path}: its {name} is of another run: other --model, --dataset or"
                             " --freeze-layers?") from None
    if is_main_process():
        print(f"resume {path}: epoch {checkpoint['epoch']} is done, accuracy {checkpoint['accuracy']:.4f}")
    return checkpoint["epoch"] + 1, checkpoint["best_accuracy"]
