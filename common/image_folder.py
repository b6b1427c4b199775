"""Labeled images in a folder, with one subfolder per class; for `--dataset folder`."""
import os
import re
from collections.abc import Sequence
from pathlib import Path
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from . import loading
from .errors import UsageError
from .images import EXTENSIONS, decode, find_files, is_hidden
from .reduce import is_main_process

TRAINS = {"train", "training"}
SPLITS = TRAINS | {"val", "valid", "validation", "test", "testing", "dev", "eval", "pred", "unlabeled"}
PARTS = SPLITS | {"images", "masks", "labels", "annotations"}  # names of folders that are no classes
WORDS = re.compile("[A-Z]*[a-z]+|[A-Z]+")  # those of `TrainImages`, `seg_train` and `test1`, too


class FolderDataset:
    """Labeled image files, decoded on access: batches of images, `uint8` (N, 3, 224, 224), and labels, `int64` (N,).

    With `augment`, it takes a random resized crop and flips it at random, as in torchvision's reference training;
    without, it resizes the image to 256 pixels and crops its center. Raises ProcessError if a file cannot be decoded.
    """

    image_shape = (3, 224, 224)

    def __init__(self, samples: list[tuple[str, int]], classes: list[str], mean: Sequence[float], std: Sequence[float],
                 seed: int, augment: bool = False) -> None:
        # Arrays, not lists: workers would update a list's reference counts, which copies its memory page by page
        self.paths = np.array([os.fsencode(path) for path, _ in samples])
        self.labels = torch.tensor([label for _, label in samples])
        self.classes, self.mean, self.std = classes, mean, std
        self.seed, self.augment = seed, augment
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.transform = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()] if augment else
                                    [v2.Resize(256), v2.CenterCrop(224)])

    def __len__(self) -> int:
        return len(self.paths)

    def set_epoch(self, epoch: int) -> None:
        """Select the augmentation of this epoch; call it before the loader workers start the epoch."""
        self.epoch.fill_(epoch)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images = torch.stack([self._read(index) for index in indices])
        return images, self.labels[torch.as_tensor(indices)]

    def _read(self, index: int) -> Tensor:
        image = decode(os.fsdecode(self.paths[index]))
        with torch.random.fork_rng(devices=[]):  # so that any random transform is reproducible
            torch.default_generator.manual_seed(loading.seed(self.seed, int(self.epoch), index))  # only the CPU's
            return self.transform(image)


def check_classes(where: str, names: Sequence[str]) -> None:
    """Raise UsageError if a name is empty; the main process warns of two names that differ only in case or spaces."""
    alike: dict[str, int] = {}
    for place, name in enumerate(names):
        if not name.strip():
            raise UsageError(f"{where}: class {place} has an empty name; correct it")
        first = alike.setdefault(name.strip().casefold(), place)
        if first != place and is_main_process():
            print(f"{where}: two classes are called {names[first]!r} and {name!r}; if they are one, merge them")


def create_datasets(path: Path, mean: Sequence[float], std: Sequence[float],
                    seed: int) -> tuple[FolderDataset, FolderDataset]:
    """Return the training and validation sets of a folder with one subfolder of images per class, or with train/ and
    val/, which have these. `mean` and `std` are those of the pixels in [0, 1], per channel. Raises UsageError.
    """
    if not path.is_dir():
        raise UsageError(f"--data-path {path}: no such folder")
    split = (path / "train").is_dir() and (path / "val").is_dir()
    root = path / "train" if split else path
    classes = _subfolders(root)
    if len(classes) < 2:
        found = f"only one subfolder, {classes[0]!r}" if classes else "no subfolders"
        raise UsageError(f"--data-path: {root} has {found}; --dataset folder needs one per class, at least two, or "
                         "train/ and val/ with these")
    if parts := _parts(classes):
        raise UsageError(f"--data-path {path}: {' and '.join(parts[:4])} are no classes; --dataset folder needs one "
                         "subfolder per class, or train/ and val/ with these")
    check_classes(f"--data-path {path}", classes)
    if split:
        if unknown := set(_subfolders(path / "val")) - set(classes):
            raise UsageError(f"--data-path {path}: val/ has classes that train/ lacks: {', '.join(sorted(unknown))}")
        train, val = _samples(path / "train", classes), _samples(path / "val", classes)
    else:
        samples = _samples(path, classes)
        train, val = ([samples[index] for index in part] for part in
                      loading.split_by_class([label for _, label in samples]))
    if not val:
        raise UsageError(f"--data-path {path}: too few images to keep a fifth of each class for validation")
    return FolderDataset(train, classes, mean, std, seed, augment=True), FolderDataset(val, classes, mean, std, seed)


def _parts(names: Sequence[str]) -> list[str]:
    """Return two or more names that are no classes: those in PARTS, or `train1` and `test1` if most are like these.

    A single one may be a class, such as a train among other vehicles.
    """
    words = {name: {word.lower() for word in WORDS.findall(name)} & SPLITS for name in names}
    found, used = [name for name in names if words[name]], set().union(*words.values())
    # freight_train and passenger_train may be classes
    if not used & TRAINS or not used - TRAINS or len(found) <= len(names) / 2:
        found = [name for name in names if name.lower() in PARTS]
    return found if len(found) > 1 else []


def _subfolders(path: Path) -> list[str]:
    return sorted(normalize("NFC", each.name) for each in path.iterdir() if each.is_dir() and not is_hidden(each.name))


def _samples(path: Path, classes: list[str]) -> list[tuple[str, int]]:
    labels = {name: label for label, name in enumerate(classes)}
    files, first = find_files(path), len(os.path.join(path, ""))
    samples, inner = [], set()
    for file in files:
        name, *below = file[first:].split(os.sep, 2)
        name = normalize("NFC", name)  # macOS: an accent is a letter
        if name in labels:
            samples.append((file, labels[name]))
            inner.update(below[:-1])
    if len(samples) < len(files) and is_main_process():
        print(f"{path}: {len(files) - len(samples)} images are in no class folder, so not used")
    if inner:
        if parts := _parts(sorted(inner)):
            raise UsageError(f"--data-path {path}: classes are divided into {' and '.join(parts[:4])}; --dataset "
                             "folder needs one subfolder per class, or train/ and val/ with these")
        if is_main_process():
            print(f"{path}: images in subfolders of the classes are used, too: {', '.join(sorted(inner)[:8])}")
    if empty := set(range(len(classes))) - {label for _, label in samples}:
        raise UsageError(f"--data-path {path}: class {classes[min(empty)]!r} has no images ({' '.join(EXTENSIONS)})")
    return samples
