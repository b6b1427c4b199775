"""Object detection: datasets with boxes, anchors, sizes for multi-scale training, and pictures of the boxes.

The datasets return whole batches, like those of `common/datasets.py`: `uint8` images (N, 3, S, S) and `float32` labels
(M, 6). Labels have one row per box: the index of its image in the batch, its class, and x1, y1, x2, y2 in pixels of
that image. Class `-1 - c` marks a region to ignore: its objects of class c are not labeled one by one (COCO's crowds)
or are too difficult (VOC). Detections in such a region count neither as correct nor as wrong.
"""
import contextlib
import functools
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unicodedata import normalize
from xml.etree import ElementTree

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes
from torchvision.utils import draw_bounding_boxes, make_grid

from common import loading
from common.datasets import digits
from common.errors import ProcessError, UsageError, reason
from common.image_folder import check_classes
from common.images import EXTENSIONS, ORIENTATION, decode
from common.reduce import is_main_process

DATASETS = ["scenes", "lines", "coco", "voc"]
GRAY = 128  # gray level of the bars around a letterboxed image, as in darknet, the YOLO authors' program
SIDE = 96  # height and width of a scene, in pixels
INK = 96  # a digit's box encloses the pixels of at least this gray level


def create_datasets(name: str, path: str | Path, image_size: int, seed: int) -> tuple[Any, Any]:
    """Return the training and validation sets of `name`, one of DATASETS, with images of `image_size` pixels.

    The folder `path` contains these files, where PART is train or val:

    - "lines": PART.txt, with a line `image x1,y1,x2,y2,class x1,y1,...` per image. Paths are relative to the folder.
    - "coco": annotations/instances_PART*.json, and images in the folder PART* of the same name.
    - "voc": names in ImageSets/Main/PART.txt, Annotations/NAME.xml, and images in JPEGImages.

    "voc" also accepts paths of images, and an XML without a file name, whose image has the XML's name. classes.txt may
    name the classes of "lines" and "voc", one per line; otherwise, all classes must occur in train.
    Raises UsageError, naming the file and, if possible, the line, for missing or malformed files, unknown classes,
    boxes without area and boxes in fractions of the image. COCO has a few boxes with a width or height of 0: "coco"
    leaves them out and prints how many. Prints how many boxes reach outside their images. Reading an image raises
    ProcessError if its boxes are for another size, which "coco" and "voc" declare.
    """
    if image_size % 32:
        raise UsageError(f"--image-size {image_size}: not a multiple of 32")
    if name == "scenes":
        train_digits, val_digits = digits()
        return Scenes(*train_digits, 1024, image_size, seed, True), Scenes(*val_digits, 256, image_size, seed, False)
    if not Path(path).is_dir():
        raise UsageError(f"--data-path {path}: no such folder")
    (train, known), (val, other) = (READERS[name](Path(path), part) for part in ("train", "val"))
    for title, found in (("train lists no images", train), ("val lists no images", val),
                         ("train has no boxes", known or any(objects for _, _, objects, *_ in train))):
        if not found:
            raise UsageError(f"--data-path {path}: {title}; add some")
    check_classes(f"--data-path {path}", [*known.values()])
    if moved := [label for label in known.keys() & other.keys() if known[label] != other[label]]:
        names = f"{known[moved[0]]!r} in train and {other[moved[0]]!r} in val"
        raise UsageError(f"--data-path {path}: category {moved[0]} is {names}; use the same categories in both")
    for part in train, val:
        _require_unique(part)
    index, options = {label: place for place, label in enumerate(known)}, ([*known.values()], image_size, seed)
    train, val = ([_encode(name, index, *sample) for sample in part] for part in (train, val))
    if is_main_process():
        for title, part in ("train", train), ("val", val):
            _report_outside(f"--data-path {path}: {title}", part)
    return Files(train, *options, True), Files(val, *options, False)


class BoxDataset:
    """Base class; a subclass's `_read(index)` returns an image (3, S, S) and its rows (m, 5): class, x1, y1, x2, y2."""

    _read: Callable[[int], tuple[Tensor, Tensor]]

    def __init__(self, count: int, classes: list[str], image_size: int, seed: int, train: bool) -> None:
        self.count, self.classes, self.num_classes = count, classes, len(classes)
        self.image_size, self.seed, self.train = image_size, seed, train
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # so that live workers can read each new epoch

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        """Select the scenes or the augmentation of this epoch; call it before the loader workers start the epoch."""
        self.epoch.fill_(epoch)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images, rows = zip(*[self._read(int(index)) for index in indices])
        places = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(each) for each in rows]))
        return torch.stack(images), torch.cat([places[:, None], torch.cat(rows)], 1)


class Scenes(BoxDataset):
    """Scenes of 1 to 6 digits, 18 to 64 pixels high, on a dark, noisy canvas of 96 x 96 pixels.

    Two boxes overlap by at most a quarter of the smaller box's area, and each box is tight around its digit. In
    training, a scene depends only on `(seed, epoch, index)`; in validation, only on `index`.
    """

    most_workers = 0  # no workers needed: one core draws 1,500 scenes/s

    def __init__(self, images: Tensor, labels: Tensor, count: int, image_size: int, seed: int, train: bool) -> None:
        super().__init__(count, [str(digit) for digit in range(10)], image_size, seed, train)
        self.digits = [(label, image[0, ys.min():ys.max() + 1, xs.min():xs.max() + 1].float())
                       for label, image in zip(labels.tolist(), images) for ys, xs in [torch.where(image[0] >= INK)]]

    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        fixed = loading.seed(loading.SPLIT_SEED, index)
        seed = loading.seed(self.seed, int(self.epoch), index) if self.train else fixed
        draw = random.Random(seed)
        noise = torch.frombuffer(bytearray(draw.randbytes(SIDE * SIDE)), dtype=torch.uint8) >> 3
        canvas = noise.reshape(SIDE, SIDE).expand(3, -1, -1).contiguous()
        rows: list[tuple[int, ...]] = []
        for _ in range(draw.randint(1, 6)):
            label, digit = draw.choice(self.digits)
            height = draw.randint(18, 64)
            width = round(height * digit.shape[1] / digit.shape[0])
            tint = digit.new_tensor([draw.uniform(0.5, 1) for _ in range(3)]).reshape(3, 1, 1)
            for _ in range(20):  # if no place is free, the scene has one digit fewer
                left, top = int(draw.random() * (SIDE + 1 - width)), int(draw.random() * (SIDE + 1 - height))
                box = left, top, left + width, top + height
                if any(_overlap(box, other) > 0.25 for _, *other in rows):
                    continue
                ink = F.interpolate(digit[None, None], (height, width), mode="bilinear", align_corners=True)[0] * tint
                window = canvas[:, top:top + height, left:left + width]
                torch.maximum(window, ink.to(torch.uint8), out=window)
                rows.append((label, *box))
                break
        return letterbox(canvas, torch.tensor(rows, dtype=torch.float32), self.image_size)


def _overlap(box: Sequence[int], other: Sequence[int]) -> float:
    width, height = min(box[2], other[2]) - max(box[0], other[0]), min(box[3], other[3]) - max(box[1], other[1])
    areas = [(each[2] - each[0]) * (each[3] - each[1]) for each in (box, other)]
    return max(width, 0) * max(height, 0) / min(areas)


Sample = tuple[Path, np.ndarray, tuple[int, int] | None]  # an image, its rows (m, 5), its declared width and height


class Files(BoxDataset):
    """Image files with boxes, decoded on access. In validation, images are letterboxed.

    In training, images are scaled by 0.7 to 1.4, cropped or padded at a random place, flipped and jittered in color.
    This augmentation depends only on `(seed, epoch, index)`. Boxes are clipped to the image; boxes outside it are
    dropped.
    """

    def __init__(self, samples: list[Sample], classes: list[str], image_size: int, *rest: Any) -> None:
        super().__init__(len(samples), classes, image_size, *rest)
        self.samples = samples
        self.transform = v2.Compose([
            v2.ScaleJitter((image_size, image_size), (0.7, 1.4)), v2.RandomHorizontalFlip(),
            v2.RandomCrop(image_size, pad_if_needed=True, fill=GRAY), v2.ColorJitter(0.3, 0.3, 0.3),
            v2.SanitizeBoundingBoxes()])

    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        path, boxes, declared = self.samples[index]
        image = decode(path)
        height, width = image.shape[1:]
        # boxes that do not fit the declared size are not made for it: then, the declaration is wrong
        if declared and max(abs(declared[0] - width), abs(declared[1] - height)) > 1 and len(boxes) and not _outside(
                boxes, declared).any():
            raise ProcessError(f"{path}: {width}x{height} pixels, but its boxes are for {declared[0]}x{declared[1]}; "
                               "scale the boxes, or correct the declared size")
        rows = torch.from_numpy(boxes).clone()
        rows[:, 1:] = rows[:, 1:].clamp(min=0).minimum(torch.tensor([width, height, width, height]))
        rows = rows[(rows[:, 1:3] < rows[:, 3:]).all(1)]
        if not self.train:
            return letterbox(image, rows, self.image_size)
        canvas = BoundingBoxes(rows[:, 1:], format="XYXY", canvas_size=(height, width))
        with torch.random.fork_rng(devices=[]):
            seed = loading.seed(self.seed, int(self.epoch), index)
            torch.default_generator.manual_seed(seed)  # seeds only the CPU's generator
            parts = self.transform({"image": image, "boxes": canvas, "labels": rows[:, :1]})
        return parts["image"], torch.cat([parts["labels"], parts["boxes"].as_subclass(Tensor)], 1)


def letterbox(image: Tensor, rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Scale an image (3, H, W) to fit `size` x `size` pixels, add gray bars, and return it with scaled rows (m, 5)."""
    height, width = image.shape[1:]
    if height == width == size:
        return image, rows
    new_height, new_width = (max(1, round(side * size / max(height, width))) for side in (height, width))
    left, top = (size - new_width) // 2, (size - new_height) // 2
    image = v2.functional.resize(image, [new_height, new_width])
    image = v2.functional.pad(image, [left, top, size - new_width - left, size - new_height - top], fill=GRAY)
    scale = rows.new_tensor([1, *[new_width / width, new_height / height] * 2])
    return image, rows * scale + rows.new_tensor([0, *[left, top] * 2])


def _encode(name: str, index: dict[Any, int], image: Path, where: str, objects: list, *size: Any) -> Sample:
    """Check an image and its `objects`, each (class, ignored, *box); `size` is its declared width and height."""
    rows = np.zeros((len(objects), 5))
    shown = [",".join(map(str, [*box, label])) for label, _, *box in objects]
    for row, (_, _, *box), said in zip(rows, objects, shown):
        try:
            row[1], row[2], row[3], row[4] = map(float, box)
            if not np.isfinite(row).all():
                raise ValueError
        except (TypeError, ValueError):
            raise UsageError(f"{where}: {said} is not a box (four numbers) and a class; correct it") from None
    if ((rows >= 0) & (rows <= 1)).all() and (rows % 1).any():
        raise UsageError(f"{where}: box {shown[0]} is in fractions of the image; multiply by its width and height")
    for row, (label, ignored, *_), said in zip(rows, objects, shown):
        if label not in index:
            title = "without a name" if label in (None, "") else label
            raise UsageError(f"{where}: class {title} is unknown; correct it, or add it to classes.txt or categories")
        if name == "coco":
            row[3:] += row[1:3]  # COCO's boxes are x, y, width, height
        elif name == "voc":
            row[1:3] -= 1  # VOC counts from 1, and includes the last pixel
        if not (row[1:3] < row[3:]).all():
            raise UsageError(f"{where}: box {said} has no area; correct it")
        row[0] = -1 - index[label] if ignored else index[label]
    declared = None
    with contextlib.suppress(TypeError, ValueError):  # some programs write no size, or 0
        width, height = (int(float(side)) for side in size)
        declared = (width, height) if width > 0 and height > 0 else None
    return image, rows.astype(np.float32), declared


def _outside(rows: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return which boxes reach outside an image of this width and height by more than a pixel."""
    beyond = (rows[:, 1:3] < -1) | (rows[:, 3:] > np.add(size, 1))
    return beyond[:, 0] | beyond[:, 1]


def _report_outside(title: str, samples: list[Sample]) -> None:
    """Print how many boxes reach outside their images; read the sizes that are not declared from the files.

    It leaves out images that cannot be read, which decode() reports.
    """
    count, first = 0, None
    for path, rows, size in samples:
        with contextlib.suppress(OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError):
            if len(rows) and (size is None or _outside(rows, size).any()):  # a declared size may be wrong
                with Image.open(path) as image:
                    size = image.size[::-1] if image.getexif().get(ORIENTATION) in (5, 6, 7, 8) else image.size
        if size and (outside := _outside(rows, size).sum()):
            count, first = count + outside, first or path
    if count:
        boxes = sum(len(rows) for _, rows, _ in samples)
        print(f"{title}: {count} of {boxes} boxes reach outside their images and are clipped or dropped; first {first}")


def _require_unique(samples: Iterable[tuple]) -> None:
    """Raise UsageError if two entries of one image have different boxes."""
    seen: dict[Path, tuple] = {}
    for image, where, objects, *_ in samples:
        first, known = seen.setdefault(image, (where, objects))
        if known != objects:
            raise UsageError(f"{where}: {first} lists other boxes for {image}; list an image once, with all boxes")


def _find(folder: Path, name: str, endings: Sequence[str] = ("", *EXTENSIONS)) -> Path | None:
    """Return the file with this name, or None if there is none.

    Some programs leave out the extension of an image. macOS writes e and an accent where other systems write one
    letter, so try both forms.
    """
    names = name, normalize("NFC", name), normalize("NFD", name)
    paths = (f"{folder / each}{ending}" for ending in endings for each in names)
    return next((Path(path) for path in paths if os.path.isfile(path)), None)


def _image(where: str, folder: Path, name: str) -> Path:
    if not (found := _find(folder, name)):
        raise UsageError(f"{where}: no image {folder / name}; correct the name or add the file")
    return found


def _read(file: Path, parse: Callable[[bytes], Any] = lambda content: content.decode("utf-8-sig").splitlines()) -> Any:
    try:
        return parse(file.read_bytes())  # XML and JSON name or show their encoding
    except (OSError, ValueError, LookupError, SyntaxError) as error:  # JSON and XML errors name the line
        raise UsageError(f"{file}: {reason(error)}; correct the file, or --data-path") from None


def _classes(folder: Path, default: Iterable[Any]) -> list[str]:
    file = folder / "classes.txt"
    return "\n".join(map(str.strip, _read(file))).rstrip().split("\n") if file.is_file() else [*map(str, default)]


def _read_lines(folder: Path, part: str) -> tuple[list[tuple], dict[Any, str]]:
    file, samples = folder / f"{part}.txt", []
    for number, line in enumerate(_read(file), 1):
        # A path may contain spaces: the boxes are the last words, which consist only of numbers and commas
        image, *boxes = re.split(r"\s+(?=(?:[-+.\deE]*,[-+.\deE,]*(?:\s+|$))+$)", line.strip())
        objects = [(label, False, *corners) for *corners, label in (box.split(",") for box in boxes)]
        where = f"{file}, line {number}"
        if "," in image and not _find(folder, image):  # its end may be a box
            raise UsageError(f"{where}: no image {folder / image}; correct the name or add the file; a box is a space "
                             "and five numbers, x1,y1,x2,y2,class")
        samples += [(_image(where, folder, image), where, objects)] if image else []
    if (folder / "classes.txt").is_file():
        return samples, {str(label): name for label, name in enumerate(_classes(folder, ()))}
    used = {int(label) for *_, objects in samples for label, *_ in objects if label.isdecimal()}
    absent = [label for label in range(len(used)) if label not in used]
    if part == "train" and absent:
        raise UsageError(f"{file}: class {absent[0]} has no boxes, and class {max(used)} has; the class is the last "
                         "of five numbers; name all classes in classes.txt")
    return samples, {str(label): str(label) for label in sorted(used)}


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("1", "1.0", "true")


def _without_outlines(each: dict) -> dict:
    """Remove an annotation's polygon, and return the rest: COCO's polygons would take gigabytes on every rank."""
    each.pop("segmentation", None)
    return each


def _checked(file: Path, content: Any, kind: str, *fields: str) -> list[dict]:
    """Return one of the lists in a COCO file; raise UsageError if a field is missing or an id is there twice.

    Different annotations may have the same id, which nothing here uses: some programs number those of each image.
    """
    seen: dict[Any, dict] = {}
    for number, each in enumerate(content[kind]):
        for field in ("id", *fields):
            if each.get(field) is None:
                raise UsageError(f"{file}: {kind}[{number}] has no {field}; see cocodataset.org/#format-data")
        first = seen.setdefault(each["id"], each)
        if first is not each and (kind != "annotations" or first == each):
            raise UsageError(f"{file}: two {kind} have the id {each['id']!r}; make the ids unique")
    return content[kind]


def _read_coco(folder: Path, part: str) -> tuple[list[tuple], dict[Any, str]]:
    files = list((folder / "annotations").glob(f"instances_{part}*.json"))
    if len(files) != 1:
        raise UsageError(f"{folder}: {len(files)} files match annotations/instances_{part}*.json; keep exactly one")
    file, images, where = files[0], folder / files[0].stem.removeprefix("instances_"), "the file"
    content = _read(file, functools.partial(json.loads, object_hook=_without_outlines))
    try:
        categories = _checked(file, content, "categories", "name")
        known = {each["id"]: str(each["name"]).strip() for each in sorted(categories, key=lambda each: each["id"])}
        samples: dict[Any, tuple] = {
            each["id"]: (_image(title := f"{file}, image {each['id']}", images, each["file_name"]), title, [],
                         each.get("width"), each.get("height"))
            for each in _checked(file, content, "images", "file_name")}
        annotations, empty = _checked(file, content, "annotations", "image_id", "category_id", "bbox"), []
        for each in annotations:
            where = f"annotation {each['id']}"
            for field, kind, ids in ("image_id", "images", samples), ("category_id", "categories", known):
                if each[field] not in ids:
                    alike = [f" ({kind} has {label!r})" for label in ids if str(label) == str(each[field])]
                    raise UsageError(f"{file}, {where}: {field} {each[field]!r} is not the id of one of the {kind}"
                                     f"{''.join(alike)}; correct it")
            if len(each["bbox"]) == 4 and 0 in each["bbox"][2:]:  # COCO has a few
                empty.append(each["id"])
            else:
                box = each["category_id"], _is_true(each.get("iscrowd")), *each["bbox"]
                samples[each["image_id"]][2].append(box)
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"{file}, {where}: {error!r}; see cocodataset.org/#format-data") from None
    if empty and is_main_process():
        print(f"{file}: {len(empty)} of {len(annotations)} boxes have a width or height of 0 and are left out; "
              f"first: annotation {empty[0]}")
    return [*samples.values()], known


def _text(file: Path, element: ElementTree.Element, path: str) -> str | None:
    """Return the text at `path` below an element without the spaces around it; None if there is no such element."""
    found = element.findall(path)
    if len(found) > 1:
        raise UsageError(f"{file}: one {element.tag} has {len(found)} times {path}; keep one")
    return (found[0].text or "").strip() if found else None


def _read_voc(folder: Path, part: str) -> tuple[list[tuple], dict[Any, str]]:
    samples, annotations = [], folder / "Annotations"
    for line in filter(None, map(str.strip, _read(folder / "ImageSets" / "Main" / f"{part}.txt"))):
        name = re.sub(r"\s+(-1|0|1)$", "", line)  # the lists of one class have a second column
        short = os.path.splitext(name)[0] if name.lower().endswith(EXTENSIONS) else name  # darknet lists images
        paths = (_find(annotations, f"{each}.xml", [""]) for each in (line, name, short, Path(short).name))
        file = next(filter(None, paths), annotations / f"{Path(short).name}.xml")
        root = _read(file, ElementTree.fromstring)
        objects = [(_text(file, each, "name"), _is_true(_text(file, each, "difficult")),
                    *[_text(file, each, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")])
                   for each in root.findall("object")]
        image = _image(str(file), folder / "JPEGImages", _text(file, root, "filename") or file.stem)
        samples.append((image, str(file), objects, _text(file, root, "size/width"), _text(file, root, "size/height")))
    used = {label for _, _, objects, *_ in samples for label, *_ in objects if label}
    return samples, {name: name for name in _classes(folder, sorted(used))}


READERS = {"lines": _read_lines, "coco": _read_coco, "voc": _read_voc}


def anchors(train_set: Any) -> Tensor:
    """Return 9 anchors (9, 2), widths and heights in pixels, smallest area first, from k-means over the training boxes.

    The distance is 1 - IoU of two boxes with the same center (YOLO9000, arXiv:1612.08242, section 2). The boxes are
    those of at most 1,024 evenly spaced samples, as the network sees them. Raises UsageError if these samples have no
    boxes.
    """
    indices = torch.linspace(0, len(train_set) - 1, min(1024, len(train_set))).long().tolist()
    labels = torch.cat([train_set[index][1] for index in indices]).double()
    sizes = (labels[:, 4:] - labels[:, 2:4])[labels[:, 1] >= 0]
    if not len(sizes):
        raise UsageError(f"{len(indices)} evenly spaced training images have no boxes; check --data-path")
    sizes = sizes[sizes.prod(1).argsort()]
    # start from the medians of nine equal parts, which needs no seed
    centers = sizes[((torch.arange(9) + 0.5) * len(sizes) / 9).long()]
    for _ in range(50):  # on the scenes, k-means converges in 17 iterations
        width, height = (torch.minimum(sizes[:, None, side], centers[:, side]) for side in (0, 1))
        nearest = (width * height / (sizes.prod(1)[:, None] + centers.prod(1) - width * height)).argmax(1)
        centers = torch.stack([sizes[nearest == k].mean(0) if (nearest == k).any() else centers[k] for k in range(9)])
    return centers[centers.prod(1).argsort()].float()


def resize(images: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the batch resized to `size` x `size` pixels, on the same device."""
    labels = labels.clone()
    labels[:, 2:6] *= size / images.shape[-1]
    return v2.functional.resize(images, [size, size]), labels


def rescale(images: Tensor, labels: Tensor, seed: int, epoch: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the batch at a random size, a multiple of 32 that changes every 10 steps and is equal on all processes.

    For images of 416 pixels, the range is 320 to 608, as in YOLO9000 (arXiv:1612.08242, section 2). For other sizes,
    the range is scaled in proportion.
    """
    low, high = (max(1, round(images.shape[-1] * side / 416 / 32)) for side in (320, 608))
    size = 32 * random.Random(loading.seed(seed, epoch, step // 10)).randint(low, high)
    return resize(images, labels, size)


def count_boxes(labels: Tensor, num_classes: int) -> Tensor:
    """Return the number of boxes per class, `int64` (num_classes,), excluding regions to ignore."""
    classes = labels[:, 1].long()
    return torch.bincount(classes[classes >= 0], minlength=num_classes)


def save_preview(path: str | Path, dataset: Any) -> None:
    """Write the first 16 images of a dataset with their boxes to a PNG, in the main process only."""
    if is_main_process():
        save_detections(path, dataset, lambda images: torch.zeros(0, 7))
        print(f"preview: {path}")


@torch.inference_mode()
def save_detections(path: str | Path, dataset: Any, find: Callable[[Tensor], Tensor]) -> None:
    """Write the first 16 images of a dataset to a PNG, with true boxes in green and the detections of `find` in red.

    `find` takes `uint8` images (N, 3, S, S) and returns detections (D, 7). Detections with
    scores below 0.3 are not drawn.
    """
    images, labels = dataset.__getitems__(range(min(16, len(dataset))))
    found = find(images).cpu()
    found = found[found[:, 5] >= 0.3][:, [0, 6, 1, 2, 3, 4, 5]]
    rows = torch.cat([F.pad(labels, (0, 1), value=-1), found])  # a score of -1 marks a true box
    images, rows = resize(images, rows, max(320, images.shape[-1]))  # enlarge small images: the text needs room
    names, pictures = [*dataset.classes, *(f"ignored {name}" for name in reversed(dataset.classes))], []
    for place, image in enumerate(images):
        own = rows[rows[:, 0] == place]
        shown = [(names[int(label)], score) for _, label, *_, score in own.tolist()]  # names[-1 - c]: class c, ignored
        texts = [f"{name} {score:.2f}" if score >= 0 else name for name, score in shown]
        colors = ["red" if score >= 0 else "lime" for _, score in shown]
        pictures.append(draw_bounding_boxes(
            image, own[:, 2:6], texts, colors, width=2, label_colors="black", fill_labels=True) if texts else image)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        v2.functional.to_pil_image(make_grid(pictures, nrow=4)).save(path, "PNG")
    except OSError as error:
        raise ProcessError(f"{path}: cannot be written ({reason(error)})") from None
