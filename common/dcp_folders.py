"""Checkpoints of torch.distributed.checkpoint: one folder per checkpoint, with one file per process.

torch writes `.metadata` last: a folder without it is incomplete. `.metadata` is a pickle, which torch loads without
restrictions. So this module checks every folder first: `.metadata` may name only the classes in ALLOWED. All entries
must be tensors, because torch would unpickle any other entry. The rest of a run's state is in `values.json`.

    python -m common.dcp_folders runs/step-0000220 last.pt    # writes one file, which every other script can load
"""
import enum
import json
import pickle
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from . import checkpoint, shards
from .cli import report_errors
from .errors import ProcessError, UsageError, reason
from .reduce import is_main_process

ALLOWED = {
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING"))}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED or module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name}")


def _member(kind: Any, name: str) -> enum.Enum:
    # Python 3.11.2 (Debian 12) pickles an Enum member as a getattr call; allow no other getattr
    if not isinstance(kind, enum.EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError("builtins.getattr")
    return kind[name]


def create(output_dir: Path, steps: int, state: dict[str, Any], **values: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """Create the folder for a checkpoint after `steps` steps; return it and this process's tensors for async_save.

    It is called `snapshot-NUMBER` if `values` has a `step`, the position within an epoch, and `step-NUMBER` otherwise.
    Rank 0 writes everything that is not a tensor. Only rank 0 saves the model's unsharded tensors, because BatchNorm's
    statistics differ between processes within an epoch. A process skips its tensors on the meta device: another process
    saves them. All processes must call this.
    """
    path = output_dir / f"{'snapshot' if 'step' in values else 'step'}-{steps:07}"
    flat = dict(shards.flatten(checkpoint.collect(state, **values)))
    plain = [[key, value] for key, value in flat.items() if not isinstance(value, torch.Tensor)]
    if is_main_process():
        try:
            shutil.rmtree(path, ignore_errors=True)  # from an earlier run or an interrupted save
            path.mkdir(parents=True)
            (path / "values.json").write_text(json.dumps(plain))
        except OSError as error:
            raise ProcessError(f"cannot save {path}: {reason(error)}; earlier folders are intact") from None
    dist.barrier()
    return path, {"/".join(map(str, key)): value for key, value in flat.items()
                  if isinstance(value, torch.Tensor) and not value.is_meta
                  and (isinstance(value, DTensor) or key[0] == "optimizer" or is_main_process())}


def create_stager(device_type: str) -> Any:
    """Return a stager, which copies shards to host memory for async_save; keep it, so that it reuses its buffers."""
    class Stager(DefaultStager):
        def stage(self, *args: Any, **kwargs: Any) -> Any:
            if TorchVersion(torch.__version__) < "2.13":  # there, stage() runs only once (pytorch issue 183413)
                DefaultStager.__init__(self, self._config)
            return super().stage(*args, **kwargs)

    cuda = device_type == "cuda"  # copies into pinned memory, which is faster, and waits once for all copies
    return Stager(StagingOptions(use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False,
                                 use_non_blocking_copy=cuda))


def wait(saving: Any) -> None:
    """Wait until the last async_save, if any, has completed its folder; raise ProcessError if it failed."""
    try:
        if saving is not None:
            saving.result()
    except dcp.CheckpointException as error:
        causes = "; ".join(sorted({reason(cause) if isinstance(cause, OSError) else str(cause)
                                   for cause, _ in error.failures.values()}))
        raise ProcessError(f"cannot save: {causes}; earlier folders are intact") from None


def all_folders(output_dir: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first; a snapshot at the end of an epoch precedes the epoch's folder."""
    found = [path for path in output_dir.glob("s*-*") if re.fullmatch(r"(snapshot|step)-\d+", path.name)]
    return sorted(found, key=lambda path: (steps_of(path), path.name))


def whole_folders(output_dir: Path) -> list[Path]:
    """Return the complete folders, oldest first."""
    return [path for path in all_folders(output_dir) if (path / ".metadata").exists()]


def steps_of(path: Path) -> int:
    """Return the number in a folder's name."""
    return int(path.name.rpartition("-")[2])


def reject_newer(output_dir: Path, steps: int) -> None:
    """Raise UsageError if a complete folder is newer than step `steps`, at which this run starts.

    prune() would keep that folder (of another run, of a later checkpoint or of smaller batches), not one of this run.
    """
    if (found := whole_folders(output_dir)) and steps_of(found[-1]) > steps:
        raise UsageError(f"--output-dir {output_dir}: contains {found[-1].name}, newer than step {steps}, where this "
                         "run starts; pass --resume auto, or choose another folder")


def prune(output_dir: Path) -> None:
    """On rank 0, delete all folders older than the newest two complete ones, except the folder of the best epoch."""
    found = whole_folders(output_dir) if is_main_process() else []
    if len(found) < 3:
        return
    evaluated = [path for path in found if path.name.startswith("step-")]  # snapshots are not
    best = max(evaluated, key=lambda path: _values(path)[("score",)], default=None)
    everything = all_folders(output_dir)
    for path in everything[:everything.index(found[-2])]:
        if path != best:
            # delete this file first: if the deletion is interrupted, the folder counts as incomplete
            (path / ".metadata").unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _values(path: Path) -> dict[tuple, Any]:
    return {tuple(key): value for key, value in json.loads((path / "values.json").read_text())}


def check(path: Path) -> dict[str, torch.Tensor]:
    """Return {name: tensor without data} for a folder; raise UsageError if it is incomplete or could execute code."""
    try:
        with open(path / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        _values(path)
        for index, info in metadata.storage_data.items():
            if Path(info.relative_path).name != info.relative_path:
                raise UsageError(f"--resume {path}: rejected: {index.fqn} is in another folder, {info.relative_path}")
            if (path / info.relative_path).stat().st_size < info.offset + info.length:
                raise UsageError(f"--resume {path}: incomplete: {info.relative_path} is too short")
        return {name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                for name, entry in metadata.state_dict_metadata.items()}
    except FileNotFoundError as error:
        raise UsageError(f"--resume {path}: incomplete: {Path(error.filename).name} is missing") from None
    except pickle.UnpicklingError as error:
        raise UsageError(f"--resume {path}: rejected: its .metadata lists more than tensors ({error})") from None
    except (OSError, EOFError, ValueError, AttributeError, TypeError, IndexError, KeyError) as error:
        raise UsageError(f"--resume {path}: incomplete or not from torch.distributed.checkpoint ({error!r})") from None


def resume(path: str | None, output_dir: Path, state: dict[str, Any], progress: dict[str, Any],
           load: Any) -> tuple[int, float]:
    """Do what checkpoint.resume() does; `load` (dcp.load) reads folders, and "auto" is the newest complete one."""
    if path == "auto":
        path = next(map(str, reversed(whole_folders(output_dir))), None)

    def open_(path: str | Path) -> dict[str, Any]:
        return read(Path(path), state, load) if Path(path).is_dir() else checkpoint.load_file("--resume", path)

    return checkpoint.resume(path, output_dir, state, progress, take=shards.take, read=open_)


def read(path: Path, state: dict[str, Any], load: Any) -> dict[str, Any]:
    """Return a folder's content as a checkpoint file's, with this process's shards; UsageError if incomplete."""
    model, optimizer = state["model"].state_dict(), state["optimizer"]
    parameters = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    tensors, places = {}, _values(path)
    for name, outline in check(path).items():
        keys = _keys(name)
        like = model.get(keys[1]) if keys[0] == "model" else parameters.get(keys[2])
        if like is None or keys[0] == "model" and like.shape != outline.shape:
            raise UsageError(f"--resume {path}: its {keys[0]} does not fit; check --model, --dataset, --freeze-layers")
        like = like.detach() if like.shape == outline.shape else torch.empty(outline.shape)
        places[keys] = tensors[name] = torch.empty_like(like, dtype=outline.dtype)
    load({name: tensor for name, tensor in tensors.items() if not tensor.is_meta}, checkpoint_id=path)
    return shards.nest(places)


def _keys(name: str) -> tuple:
    """Return a tensor's keys in a nested checkpoint: ("model", NAME) or ("optimizer", "state", NUMBER, NAME)."""
    part, *rest = name.split("/")
    return (part, *rest) if part == "model" else (part, rest[0], int(rest[1]), *rest[2:])


def main(folder: str, file: str) -> None:
    """Write the checkpoint in `folder` to one file, `file`; this process needs memory for the whole checkpoint."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    tensors = {name: torch.empty_like(outline, device="cpu") for name, outline in check(Path(folder)).items()}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    places = {_keys(name): tensor for name, tensor in tensors.items()}
    checkpoint.save_checkpoint(file, shards.nest(_values(Path(folder)) | places))


if __name__ == "__main__":
    with report_errors():
        if len(sys.argv) != 3:
            raise UsageError("usage: python -m common.dcp_folders FOLDER FILE.pt")
        main(*sys.argv[1:])
