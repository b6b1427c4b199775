"""Datasets: `create_datasets` returns the training and the validation set for any name in DATASETS.

The scripts accept any dataset with a length and one of these methods:

- `__getitem__(index)` returns a sample: a tuple (input, target) of tensors, arrays or numbers.
- `__getitems__(indices)` returns a list of samples, as torch expects, or a whole batch: a tuple of two tensors.

The datasets here return whole batches: `uint8` images (N, C, H, W), a quarter of the bytes of `float32`, and `int64`
labels (N,). On the device, `Normalize` converts `uint8` images to floats.

A dataset may have these attributes; the scripts also find them inside torch's Subset and ConcatDataset:

- `set_epoch(epoch)`: the scripts call it before each epoch. Loader workers stay alive between epochs only if they can
  read the new epoch from a tensor `epoch` in shared memory. Here, augmentation depends only on `(seed, epoch, index)`.
- `mean` and `std`, per channel, for pixels in [0, 1].
- `num_classes` or `classes`, and `image_shape`, for the models in `common/models.py`.
- `most_workers`, the largest useful number of loader workers.
"""
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from . import loading
from .errors import UsageError, reason
from .reduce import is_main_process


class Kind(NamedTuple):
    """A kind of dataset; `mean` and `std` are those of the training set, per channel, for pixels in [0, 1]."""
    classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool = False
    torchvision: str | None = None  # the name of torchvision's class


DATASETS = {
    "digits": Kind(10, (0.3058,), (0.3250,)),
    "mnist": Kind(10, (0.1307,), (0.3081,), torchvision="MNIST"),
    "fashion-mnist": Kind(10, (0.2860,), (0.3530,), torchvision="FashionMNIST"),
    "cifar10": Kind(10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), True, "CIFAR10"),
    "cifar100": Kind(100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), True, "CIFAR100"),
    "folder": Kind(None, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), True),  # mean and std of ImageNet
    "fake": Kind(100, (0.5, 0.5, 0.5), (0.29, 0.29, 0.29), True),
}


def create_datasets(name: str, path: str | Path, seed: int) -> tuple[Any, Any]:
    """Return the training and validation sets of `name`, one of DATASETS, in `path`; raise UsageError if missing."""
    kind = DATASETS[name]
    if name == "folder":
        from .image_folder import create_datasets as of_folder  # not at the top: importing torchvision takes long

        return of_folder(Path(path), kind.mean, kind.std, seed)
    if kind.torchvision:
        train, val = _torchvision(kind.torchvision, name, path)
    elif name == "digits":
        train, val = digits()
    else:
        draw = torch.Generator().manual_seed(1)
        train, val = ((torch.randint(256, (size, 3, 32, 32), dtype=torch.uint8, generator=draw),
                       torch.randint(100, (size,), generator=draw)) for size in (50_000, 10_000))
    return ArrayDataset(name, *train, seed, augment=kind.augment), ArrayDataset(name, *val, seed)


class ArrayDataset:
    """A dataset in memory: `images`, `uint8` of shape (N, C, H, W), and `labels`, `int64` of shape (N,).

    With `augment`, it pads each side with 4 black pixels, crops and flips at random (arXiv:1512.03385, section 4.2).
    """

    def __init__(self, name: str, images: Tensor, labels: Tensor, seed: int, augment: bool = False) -> None:
        self.images, self.labels = images, labels
        self.seed, self.augment = seed, augment
        self.num_classes, self.mean, self.std = DATASETS[name][:3]
        self.image_shape = tuple(images.shape[1:])
        # One core copies 500,000 images/s (more than workers can send), but augments only 65,000 images/s
        self.most_workers = 2 if augment else 0
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # so that live workers can read each new epoch
        self.draws: tuple[int, tuple[Tensor, Tensor]] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def set_epoch(self, epoch: int) -> None:
        """Select the augmentation of this epoch; call it before the loader workers start the epoch."""
        self.epoch.fill_(epoch)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        indices = torch.as_tensor(indices)
        images = self.images[indices]
        return self._augmented(images, indices) if self.augment else images, self.labels[indices]

    def _augmented(self, images: Tensor, indices: Tensor) -> Tensor:
        epoch = int(self.epoch)
        if self.draws is None or self.draws[0] != epoch:  # draw for all samples at once: 50,000 draws take 1 ms
            generator = torch.Generator().manual_seed(loading.seed(self.seed, epoch))
            self.draws = epoch, (torch.randint(9, (2, len(self)), generator=generator),
                                 torch.rand(len(self), generator=generator) < 0.5)
        (top, left), flip = self.draws[1][0][:, indices], self.draws[1][1][indices]
        height, width = images.shape[2:]
        windows = F.pad(images, (4, 4, 4, 4)).unfold(2, height, 1).unfold(3, width, 1)  # views, not copies
        images = windows[torch.arange(len(indices)), :, top, left]
        images[flip] = images[flip].flip(-1)
        return images


class Normalize(nn.Module):
    """Converts `uint8` images (N, C, H, W) to floats on their device; returns any other input unchanged.

    The floats have mean 0 and standard deviation 1 per channel, or are in [0, 1] if the dataset lacks `mean` and `std`.
    """

    scale: Tensor
    shift: Tensor
    def __init__(self, dataset: Any) -> None:
        super().__init__()
        mean, std = _statistics(dataset) or (torch.zeros(1), torch.ones(1))
        self.register_buffer("scale", 1 / (255 * std).reshape(1, -1, 1, 1))
        self.register_buffer("shift", (-mean / std).reshape(1, -1, 1, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dtype != torch.uint8 or inputs.ndim != 4:
            return inputs
        if self.scale.shape[1] not in (1, inputs.shape[1]):
            raise UsageError(f"the dataset's mean and std have {self.scale.shape[1]} values; its images have "
                             f"{inputs.shape[1]} channels")
        return torch.addcmul(self.shift, inputs.to(self.scale.dtype), self.scale)


def _statistics(dataset: Any) -> tuple[Tensor, Tensor] | None:
    """Return the dataset's mean and std if each has one number per channel for pixels in [0, 1], else None."""
    try:
        mean, std = (torch.as_tensor(loading.attribute(dataset, name), dtype=torch.get_default_dtype()).reshape(-1)
                     for name in ("mean", "std"))
    except (TypeError, ValueError, RuntimeError):  # the attributes are absent or not numbers
        return None
    fits = len(mean) == len(std) and ((mean >= 0) & (mean <= 1) & (std > 0) & (std <= 1)).all()
    return (mean, std) if fits else None


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call `set_epoch(epoch)`, where defined, on the dataset and on the datasets inside a Subset or ConcatDataset."""
    for part in loading.parts_of(dataset):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def require_samples(train_set: Any, val_set: Any, batch_size: int) -> None:
    """Raise UsageError unless both sets have a length, `train_set` fills a batch, and `val_set` is not empty."""
    for dataset in train_set, val_set:
        if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
            raise UsageError(f"{type(dataset).__name__}: the scripts need map-style datasets with a length")
    if batch_size > len(train_set):
        raise UsageError(f"--batch-size {batch_size}: there are only {len(train_set)} samples")
    if not len(val_set):
        raise UsageError("the validation set has no samples")


def save_classes(dataset: Any, folder: Path) -> None:
    """If the dataset has `classes`, their names, the main process writes them to `class_indices.json` in `folder`."""
    names = loading.attribute(dataset, "classes")
    if names and is_main_process():
        text = json.dumps(dict(enumerate(names)), indent=4, ensure_ascii=False)
        Path(folder, "class_indices.json").write_text(text + "\n", "utf-8", "backslashreplace")  # names are any bytes


def classes_and_shape(dataset: Any) -> tuple[int | list[str], tuple[int, ...]]:
    """Return (the names of the classes or their number, (C, H, W) of an image); raise UsageError if unknown."""
    count, names, shape = (loading.attribute(dataset, name) for name in ("num_classes", "classes", "image_shape"))
    if shape is None:
        first = dataset.__getitems__([0]) if hasattr(dataset, "__getitems__") else [dataset[0]]
        shape = tuple(loading.collate(first)[0].shape[1:])
    if len(shape) != 3 or shape[2] <= 4 < shape[0]:  # the second test detects (H, W, C)
        raise UsageError(f"--model needs inputs of shape (C, H, W); those of this dataset are {tuple(shape)}; permute "
                         "them, or put your own model at '# yours: the model'")
    if count is None and names is None:
        raise UsageError("the dataset does not specify its number of classes; set train_set.num_classes = NUMBER")
    named = names is not None and count in (None, len(names))
    return list(map(str, names)) if named else count, tuple(shape)


def digits() -> list[tuple[Tensor, Tensor]]:
    """Return the training and the validation digits: images, `uint8` (N, 1, 28, 28), and labels, `int64` (N,)."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]).long()
    images = F.interpolate(images[:, None] * (255 / 16), size=28, mode="bilinear", align_corners=False)
    images = images.round().to(torch.uint8)
    return [(images[part], labels[part]) for part in loading.split_by_class(labels)]


def _torchvision(kind: str, name: str, path: str | Path) -> list[tuple[Tensor, Tensor]]:
    from torchvision import datasets  # not at the top: importing torchvision takes half a second

    def read(download: bool) -> list[Any]:
        return [getattr(datasets, kind)(path, train=train, download=download) for train in (True, False)]

    lock, sets = Path(path, f".{name}.lock"), None
    try:
        if not lock.exists() or not os.access(path, os.W_OK):  # no process downloads: write nothing into a whole set
            with contextlib.suppress(RuntimeError):  # not found
                sets = read(download=False)
        if not sets:
            Path(path).mkdir(parents=True, exist_ok=True)
            with FileLock(lock):  # one process downloads; the others wait, then find the files
                sets = read(download=True)
    except (URLError, RuntimeError) as error:
        raise UsageError(f"--dataset {name}: not in --data-path {path}; download failed ({reason(error)})") from None
    except OSError as error:
        raise UsageError(f"--data-path {path}: cannot read or download {name}: {reason(error)}") from None
    images = [torch.as_tensor(part.data) for part in sets]
    images = [part[:, None] if part.ndim == 3 else part.permute(0, 3, 1, 2).contiguous() for part in images]
    return [(part, torch.as_tensor(each.targets)) for part, each in zip(images, sets)]
