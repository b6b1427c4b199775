"""How the scripts read any dataset: the DataLoader's options, and the seeds of order, augmentation and dropout."""
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, default_collate

from .errors import ProcessError, UsageError, reason
from .launch import cores_per_process, tie_worker

SPLIT_SEED = 0  # for splitting datasets that have no validation set; does not depend on --seed
PINNED = ("cuda", "xpu")  # device types that copy pinned memory while the CPU continues


def seed(*numbers: int) -> int:
    """Return a 63-bit seed that depends on all the numbers and on their order."""
    return random.Random(" ".join(map(str, numbers))).getrandbits(63)


def collate(batch: Any) -> Any:
    """Collate samples (input, target) into a batch, floats in torch's default dtype; return a whole batch unchanged."""
    if not isinstance(batch, list):
        return batch
    for sample in batch:
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise UsageError(f"a sample is {_describe(sample)}; the dataset must return a tuple (input, target)")
    sample = batch[0]
    try:
        parts = [default_collate([torch.tensor(float(part)) if isinstance(part, float) else part for part in column])
                 for column in zip(*batch)]
    except TypeError:
        what = " and ".join(map(_describe, sample))
        raise UsageError(f"a sample is {what}; the scripts need tensors, arrays or numbers (for PIL images, "
                         "transform=torchvision.transforms.ToTensor())") from None
    except RuntimeError as error:
        raise ProcessError(f"the samples of a batch differ in shape: {reason(error)}; crop or pad them, or pass "
                           "your own collate_fn to the loaders") from None
    if not all(isinstance(part, Tensor) for part in parts):
        raise UsageError(f"a sample is {' and '.join(map(_describe, sample))}; "
                         "the input and the target must be one tensor each")
    return parts


def _describe(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"a {name} of {len(value)}" if isinstance(value, (tuple, list, dict)) else f"a {name}"


def options(workers: int | None, device: torch.device, dataset: object) -> dict[str, Any]:
    """Return the DataLoader arguments for one dataset; training and validation sets can need different ones.

    By default, `workers` is this process's share of the host's cores minus one, but at most the dataset's
    `most_workers`, or 8 if the dataset has no such attribute. Workers stay alive between epochs, unless they would then
    miss `set_epoch`. Batches are pinned if the device can copy them while the CPU continues: on MPS, a `non_blocking`
    copy from an unpinned batch can read memory that has already been reused (pytorch issue 189690).
    """
    if workers is None:
        most = attribute(dataset, "most_workers")
        workers = max(0, min(8 if most is None else most, cores_per_process() - 1))
    epochs = [getattr(part, "epoch", None) for part in parts_of(dataset) if hasattr(part, "set_epoch")]
    stay = workers > 0 and all(isinstance(epoch, Tensor) and epoch.is_shared() for epoch in epochs)
    return {"num_workers": workers, "persistent_workers": stay, "pin_memory": device.type in PINNED,
            "collate_fn": collate, "worker_init_fn": tie_worker}


def parts_of(dataset: Any) -> Iterator[Any]:
    """Yield the dataset and, if it is a Subset or a ConcatDataset, the datasets inside it."""
    yield dataset
    inner = dataset.datasets if isinstance(dataset, ConcatDataset) else []
    for part in [dataset.dataset] if isinstance(dataset, Subset) else inner:
        yield from parts_of(part)


def attribute(dataset: Any, name: str) -> Any:
    """Return the attribute `name` of the dataset or of the first dataset inside it that has it; else None."""
    return next((found for part in parts_of(dataset) if (found := getattr(part, name, None)) is not None), None)


def split_by_class(labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return (training, validation) indices: 80 % and 20 % of each class, the same in every run."""
    labels = np.asarray(labels)
    shuffled = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
    val = np.concatenate([of_class[:round(len(of_class) / 5)] for of_class in
                          (shuffled[labels[shuffled] == label] for label in np.unique(labels))])
    return np.setdiff1d(np.arange(len(labels)), val), np.sort(val)
