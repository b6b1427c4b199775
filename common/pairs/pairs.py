"""Pairs of images, for all loaders: find and check them, choose their crops, show them, and make samples.

A pair is two files, DATA/SPLIT/IMG_DIR/SUBDIR/NAME and DATA/SPLIT/GT_DIR/SUBDIR/NAME, each with an extension of
`images.EXTENSIONS`, with subfolders of any depth or none.
"""
import math
import os
import random
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch.utils.data import get_worker_info
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import save_image

from ..errors import ProcessError, UsageError, reason
from ..images import EXTENSIONS, decode, find_files, orientation, read
from ..images import decode_reduced as decode_reduced  # re-exported for the loaders
from ..reduce import get_world_size

SAMPLES = Path("data", "pairs")  # the default set


def find_pairs(data_source: str | Path | None, split: str, img_dir: str, gt_dir: str) -> list[tuple[str, str]]:
    """Return the pairs of a split, `[(image path, target path), ...]`, sorted by name.

    By default, they are samples, which the first call creates. Raises UsageError, naming a file, for mismatched pairs.
    """
    if data_source is None:
        create_once(SAMPLES, make_samples)
        data_source = SAMPLES
    folder = Path(data_source, split)
    inputs, targets = (_by_name(folder / name, data_source) for name in (img_dir, gt_dir))
    for files, others, other_dir in ((inputs, targets, gt_dir), (targets, inputs, img_dir)):
        orphans = sorted(files.keys() - others.keys())
        if orphans:
            more = f" (nor do {len(orphans) - 1} other files)" if len(orphans) > 1 else ""
            raise UsageError(f"{files[orphans[0]]}: has no partner in {folder / other_dir}{more}")
    if not inputs:
        raise UsageError(f"--data-source {data_source}: no {' '.join(EXTENSIONS)} in {folder / img_dir}")
    return [(inputs[name], targets[name]) for name in sorted(inputs)]


def _by_name(folder: Path, data_source: str | Path) -> dict[str, str]:
    if not folder.is_dir():
        raise UsageError(f"--data-source {data_source}: there is no folder {folder}")
    files: dict[str, str] = {}
    for path in find_files(folder):
        name = Path(path).relative_to(folder).with_suffix("").as_posix()
        name = unicodedata.normalize("NFC", name)  # macOS writes e and an accent where other systems write one letter
        if name in files:
            raise UsageError(f"{path}: differs from {files[name]} only in its extension; remove one of them")
        files[name] = path
    return files


class Cut(NamedTuple):
    """How to cut a pair: resize it to `size` (height, width), crop it at `top` and `left`, then flip it or not."""
    size: tuple
    top: int
    left: int
    horizontal_flip: bool
    vertical_flip: bool


class Cuts:
    """Chooses how to resize, crop and flip each pair, with the same values for both images.

    With `train`, the crop and the flips depend only on `(seed, epoch, index)`; without, it crops the center. The
    shorter side becomes `resize` pixels (0: unchanged), and the longer one is scaled in proportion and rounded down.
    """

    def __init__(self, resize: int, crop: int, seed: int, train: bool) -> None:
        self.resize, self.crop, self.seed, self.train = resize, crop, seed, train

    def choose(self, epoch: int, index: int, paths: Sequence[str], sizes: Sequence[tuple[int, int]]) -> Cut:
        """Return the Cut of pair `index` with `sizes`, each (height, width); raise ProcessError if they do not fit."""
        (height, width), other = sizes
        if (height, width) != tuple(other):
            raise ProcessError(f"{paths[0]}: {width}x{height} pixels; {paths[1]} has {other[1]}x{other[0]}")
        shorter = min(height, width)
        if self.resize:
            height, width = (side * self.resize // shorter for side in (height, width))
        if min(height, width) < self.crop:
            raise ProcessError(f"{paths[0]}: {width}x{height} pixels after resizing, less than --crop {self.crop}")
        rooms = height - self.crop, width - self.crop
        if not self.train:
            return Cut((height, width), round(rooms[0] / 2), round(rooms[1] / 2), False, False)
        draw = random.Random(f"{self.seed} {epoch} {index}").random  # like loading.seed(), but with a single generator
        places = draw(), draw()
        top, left = (int(place * (room + 1)) for place, room in zip(places, rooms, strict=True))  # 0 to room
        return Cut((height, width), top, left, draw() < 0.5, draw() < 0.5)


class Ring:
    """Shared memory that `workers` loader workers reuse for all batches, each `uint8` of shape (2, N, 3, crop, crop).

    Allocating memory for each batch would add about a fifth to the decoding time. A worker fills its slots in turn and
    is at most two batches (`prefetch_factor`) ahead, so with three slots, it never overwrites a batch in use.
    """

    SLOTS = 3  # per worker

    def __init__(self, workers: int, batch_size: int, crop: int) -> None:
        shape = max(1, workers) * self.SLOTS, 2, batch_size, 3, crop, crop
        slots = torch.empty(shape, dtype=torch.uint8)  # without workers, in this process's own memory
        self.slots, self.turn = slots.share_memory_() if workers else slots, 0

    def take(self, count: int) -> tuple[int, torch.Tensor]:
        """Return the number of this worker's next slot, and that slot for `count` pairs."""
        worker = get_worker_info()
        slot = (worker.id if worker else 0) * self.SLOTS + self.turn
        self.turn = (self.turn + 1) % self.SLOTS
        return slot, self.slots[slot, :, :count]


def whole_batches(skip: int, local_batch_size: int) -> int:
    """Return how many batches of all processes `skip` pairs fill; raise UsageError if a batch is incomplete."""
    batches, rest = divmod(skip, local_batch_size * get_world_size())
    if rest or skip < 0:
        raise UsageError(f"set_epoch: {skip} pairs are not a multiple of {local_batch_size * get_world_size()}")
    return batches


def read_encoded(path: str | Path) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the bytes of an image for DALI to decode, `uint8` (size,), and its upright (height, width).

    The bytes are the file itself or a bitmap of its pixels (PPM): DALI 2.4 rejects GIF and WebP with EXIF, and a GPU
    decoder may read CMYK and damaged EXIF differently. Raises ProcessError, naming the file, as `decode` does.
    """
    content, image = read(path)
    if turn := orientation(content, image):
        return content, image.size if turn > 4 else image.size[::-1]
    pixels = decode(path)
    height, width = pixels.shape[1:]
    bitmap = b"P6 %d %d 255\n" % (width, height) + pixels.permute(1, 2, 0).numpy().tobytes()
    return np.frombuffer(bitmap, np.uint8), (height, width)


def save_preview(path: str | Path, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Write the first 8 pairs of a batch to a PNG: the inputs in the upper row, their targets below."""
    shown = torch.cat([inputs[:8], targets[:8]])
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_image(shown, path, "PNG", nrow=len(shown) // 2, normalize=True, value_range=(-1, 1))
    except OSError as error:
        raise UsageError(f"--preview {path}: cannot be written ({reason(error)})") from None


def create_once(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fill a draft of `folder` and rename it, unless `folder` exists: one process does so, and the others wait."""
    if folder.is_dir():  # the folder around it may be read-only
        return
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                shutil.rmtree(draft, ignore_errors=True)
                fill(draft)
                os.replace(draft, folder)
    except OSError as error:
        raise UsageError(f"no --data-source, and cannot create samples in {folder}: {reason(error)}") from None


def make_samples(folder: Path) -> None:
    """Write synthetic scenes to `folder`, sharp and with motion blur: 29 pairs to train and 7 to test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on images this small, threads cost more than they save
    for number in range(36):
        generator = torch.Generator().manual_seed(number)
        sharp = scene(*[(320, 480), (480, 320), (360, 360)][number % 3], generator)
        for side, image in (("gt", sharp), ("img", motion_blur(sharp, generator))):
            path = folder / ("train" if number < 29 else "test") / side / "abc"[number % 3] / f"{number:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            to_pil_image((image * 255).round().to(torch.uint8)).save(path, quality=92)
    torch.set_num_threads(threads)


def scene(height: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Return a scene (3, H, W) in [0, 1] of clouds, sharp boxes and noise; its JPEG is about as large as a photo's."""
    gray = 0.07 * torch.rand(1, height, width, generator=generator)
    for octave in range(1, 8):
        grid = torch.rand(1, 1, 2**octave, 2**octave, generator=generator) - 0.5
        gray.add_(F.interpolate(grid, (height, width), mode="bilinear")[0], alpha=1.6**-octave)
    image = gray + torch.rand(3, 1, 1, generator=generator) / 2 + 0.22
    for top, left, *color in torch.rand(12, 5, generator=generator).tolist():
        box = image[:, int(top * height):int((top + 0.2) * height), int(left * width):int((left + 0.2) * width)]
        box += torch.tensor(color)[:, None, None] - 0.5
    return image.clamp(0, 1)


def motion_blur(image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return an image (3, H, W) averaged along a line of 9 to 21 pixels in a random direction."""
    length = 9 + 2 * int(torch.randint(7, (), generator=generator))
    angle = math.pi * torch.rand((), generator=generator).item()
    reach, (height, width) = length // 2, image.shape[1:]
    padded = F.pad(image, (reach,) * 4, mode="replicate")
    blurred = torch.zeros_like(image)
    for step in range(-reach, reach + 1):  # on a CPU, this loop is ten times as fast as a convolution
        top, left = round(reach + step * math.sin(angle)), round(reach + step * math.cos(angle))
        blurred += padded[:, top:top + height, left:left + width]
    return blurred / length
