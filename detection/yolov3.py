"""YOLOv3 (Redmon & Farhadi 2018, arXiv:1804.02767): the network, its loss, its detections and the authors' file format.

A label is a row (index of the image in the batch, class, x1, y1, x2, y2), with coordinates in pixels. A class below 0
marks a region to ignore.
"""
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import batched_nms, box_iou, complete_box_iou_loss

from common import cli, models, recipe
from common.checkpoint import load_file
from common.errors import UsageError, reason
from common.reduce import is_main_process

MODELS = ["tiny", "tiny-bn", "yolov3"]
STRIDES = (8, 16, 32)  # pixels per cell; three anchors each, the smallest at stride 8
ANCHORS = ((10, 13), (16, 30), (33, 23), (30, 61), (62, 45), (59, 119), (116, 90), (156, 198), (373, 326))  # for COCO
BOX_WEIGHT, OBJECT_WEIGHT, CLASS_WEIGHT = 5.0, 1.0, 5.0  # CLASS_WEIGHT is high because "tiny" learns classes last
MOST_IOUS = 2 ** 21  # the most IoUs that the loss computes at once; this limits its memory to about 150 MB
Norm = Callable[[int], nn.Module]
Outputs = tuple[tuple[Tensor, ...], Tensor]


def _conv(inputs: int, outputs: int, kernel: int, norm: Norm, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), norm(outputs),
                         nn.LeakyReLU(0.1, inplace=True))


class Residual(nn.Sequential):
    """Layers whose output is added to their input."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + super().forward(inputs)


class Backbone(nn.Module):
    """Darknet-53 (section 2.4): a first layer of `width` channels, then stages of `depths` residual blocks.

    Each stage halves the height and width and doubles the channels. With four stages instead of five, the first layer
    also halves the height and width. Returns the outputs of the last three stages, at strides 8, 16 and 32.
    """

    def __init__(self, depths: Sequence[int], width: int, norm: Norm) -> None:
        super().__init__()
        self.stem = _conv(3, width, 3, norm, stride=32 >> len(depths))
        self.stages = nn.ModuleList(
            nn.Sequential(_conv(width << n, width << n + 1, 3, norm, stride=2), *(
                Residual(_conv(width << n + 1, width << n, 1, norm), _conv(width << n, width << n + 1, 3, norm))
                for _ in range(depth))) for n, depth in enumerate(depths))

    def forward(self, images: Tensor) -> list[Tensor]:
        features = [self.stem(images)]
        for stage in self.stages:
            features.append(stage(features[-1]))
        return features[-3:]


class YOLOv3(nn.Module):
    """Maps images (N, 3, S, S), with S a multiple of 32, to (predictions at strides 8, 16 and 32; `anchors`).

    Predictions are (N, S / stride, S / stride, 3 anchors, 5 + classes): x, y, width, height, objectness, classes.
    """

    classes: int | list[str]
    def __init__(self, num_classes: int, anchors: Tensor, depths: Sequence[int], width: int, pairs: int,
                 norm: Norm) -> None:
        super().__init__()
        self.num_classes = num_classes
        # not a buffer, because by default, DDP broadcasts buffers in every step
        self.anchors = nn.Parameter(anchors.to(torch.get_default_dtype(), copy=True), requires_grad=False)
        self.backbone = Backbone(depths, width, norm)
        self.heads = nn.ModuleList()  # three per stride, 32 to 8: input from the coarser head, body, output
        for n in range(3):
            channels, half = width << len(depths) - n, width << len(depths) - n - 1
            coarser = nn.Sequential(_conv(channels, half, 1, norm), nn.Upsample(scale_factor=2)) if n else nn.Identity()
            body = nn.Sequential(_conv(channels + half if n else channels, half, 1, norm))
            for _ in range(pairs - 1):
                body.extend([_conv(half, channels, 3, norm), _conv(channels, half, 1, norm)])
            output = nn.Conv2d(channels, 3 * (5 + num_classes), 1)
            # not in the paper: an object starts with probability 0.01 (arXiv:1708.02002, section 3.3), a class with 1/C
            priors = [0.0] * 4 + [-math.log(99)] + [-math.log(max(1, num_classes - 1))] * num_classes
            output.bias = nn.Parameter(torch.tensor(priors).repeat(3))
            self.heads.extend([coarser, body, nn.Sequential(_conv(half, channels, 3, norm), output)])

    def forward(self, images: Tensor) -> Outputs:
        predictions: list[Tensor] = []
        above: list[Tensor] = []
        for coarser, body, output, features in zip(*(self.heads[n::3] for n in range(3)), self.backbone(images)[::-1]):
            features = body(torch.cat([*map(coarser, above), features], 1))
            above = [features]
            predictions.append(output(features).permute(0, 2, 3, 1).unflatten(3, (3, -1)))
        return tuple(predictions[::-1]), self.anchors


def create_model(name: str, classes: int | list[str], anchors: Tensor) -> YOLOv3:
    """Return the network `name` (one of MODELS) with `anchors` (9, 2) in pixels, smallest area first.

    `classes` is their number, or their names, which the model's checkpoints then contain. "yolov3" is the network of
    the paper. "tiny", for small images on a CPU, has GroupNorm (Wu & He 2018, arXiv:1803.08494), so that processes can
    share a batch without changing its gradient. "tiny-bn" is "tiny" with BatchNorm.
    """
    num_classes = classes if isinstance(classes, int) else len(classes)
    if name == "yolov3":
        model = YOLOv3(num_classes, anchors, (1, 2, 8, 8, 4), 32, 3, nn.BatchNorm2d)
    else:
        norm = nn.BatchNorm2d if name == "tiny-bn" else lambda channels: nn.GroupNorm(8, channels)
        model = YOLOv3(num_classes, anchors, (0, 1, 1, 1), 16, 1, norm)
    model.classes = classes
    return model


def _flatten(outputs: Outputs) -> tuple[Tensor, Tensor]:
    """Return the predictions (N, K, 5 + classes) at all K places, in at least float32, and the places (K, 5).

    A place is its cell's x and y, its stride, and its anchor's width and height. Stride 8 comes first; the places of
    a stride are in the order (rows, columns, anchors).
    """
    predictions, anchors = outputs
    dtype = torch.promote_types(predictions[0].dtype, torch.float32)
    places = []
    for stride, part, sizes in zip(STRIDES, predictions, anchors.to(dtype, copy=True).split(3)):
        ranges = [torch.arange(size, device=part.device) for size in part.shape[1:4]]
        y, x, anchor = torch.meshgrid(*ranges, indexing="ij")
        cells = torch.stack([x, y, torch.full_like(x, stride)], 3).to(dtype)
        places.append(torch.cat([cells, sizes[anchor]], 3).flatten(0, 2))
    return torch.cat([part.flatten(1, 3) for part in predictions], 1).to(dtype), torch.cat(places)


def _decode(predictions: Tensor, places: Tensor) -> Tensor:
    """Convert predictions (..., 5 + classes) to boxes (..., 4): x1, y1, x2, y2 in pixels. See section 2.1."""
    centers = (predictions[..., :2].sigmoid() + places[..., :2]) * places[..., 2:3]
    halves = predictions[..., 2:4].exp() * places[..., 3:] / 2
    return torch.cat([centers - halves, centers + halves], -1)


def _assign(boxes: Tensor, anchors: Tensor, size: int) -> Tensor:
    """Return the place of each box (M, 4): the cell of its center, and the anchor whose shape has the best IoU."""
    shapes = boxes[:, None, 2:] - boxes[:, None, :2]
    common = torch.minimum(shapes, anchors).prod(2)
    anchor = (common / (shapes.prod(2) + anchors.prod(1) - common)).argmax(1)
    stride = STRIDES[0] * 2 ** (anchor // 3)
    cells = size // stride  # cells per row
    x, y = ((boxes[:, :2] + boxes[:, 2:]) / 2 / stride[:, None]).long().unbind(1)
    x, y = (cell.clamp(min=0).minimum(cells - 1) for cell in (x, y))  # a center may be on the image's border
    before = 4 * ((size // STRIDES[0]) ** 2 - cells ** 2)  # number of places at smaller strides: a geometric series
    return before + (y * cells + x) * 3 + anchor % 3


def loss(outputs: Outputs, labels: Tensor) -> Tensor:
    """Return the SUM of the loss over the boxes of a batch; `labels` has the shape (M, 6), where M may be 0.

    The loss has three terms: one for each box, one for each class of each box (a box may have several classes), and one
    for the objectness of every place. A place without a box does not count if its prediction has an IoU above 0.5 with
    a box or an ignored region of its image. The loss differs from section 2.1 in three ways. As in the authors'
    program, the IoU is that of the prediction, not that of its anchor. The box term is the complete IoU loss (Zheng et
    al. 2019, arXiv:1911.08287) instead of squared errors. The terms have weights.
    """
    predictions, places = _flatten(outputs)
    labels = labels.to(predictions.dtype)
    overlaps = torch.zeros_like(predictions[..., 4])  # how many boxes each prediction overlaps
    found = _decode(predictions.detach(), places)
    for part in labels.split(max(1, MOST_IOUS // len(places))):
        image = part[:, 0].long()
        iou = box_iou(part[:, None, 2:], found[image])[:, 0]
        overlaps.index_add_(0, image, (iou > 0.5).to(overlaps.dtype))  # small integers add up exactly in any order
    image, classes, boxes = labels[:, 0].long(), labels[:, 1].long(), labels[:, 2:]
    real = (classes >= 0).to(labels.dtype)  # 0 for a region to ignore; dropping its row would wait for the GPU
    place = _assign(boxes, outputs[1], outputs[0][0].shape[1] * STRIDES[0])
    positive = torch.zeros_like(overlaps).index_put_((image, place), real, accumulate=True).clamp(max=1)
    counted = torch.where(overlaps > 0, positive, 1)
    bce = F.binary_cross_entropy_with_logits
    own = predictions[image, place]  # the prediction for each box; two boxes may share a place
    targets = F.one_hot(classes.clamp(min=0), own.shape[1] - 5).to(own.dtype)
    return (BOX_WEIGHT * (complete_box_iou_loss(_decode(own, places[place]), boxes) * real).sum()
            + OBJECT_WEIGHT * bce(predictions[..., 4], positive, counted, reduction="sum")
            + CLASS_WEIGHT * bce(own[:, 5:], targets, real[:, None], reduction="sum"))


def detect(outputs: Outputs, threshold: float = 0.01, most: int = 100) -> Tensor:
    """Return the detections (D, 7): index of the image in the batch, x1, y1, x2, y2 in pixels, score, class.

    The score is objectness times class probability. There are at most `most` detections per image, with scores above
    `threshold`, sorted by image and then by descending score. Each place reports only its best class; the authors'
    program can report several.
    """
    predictions, places = _flatten(outputs)
    best, classes = predictions[..., 5:].max(2)
    scores, order = (predictions[..., 4].sigmoid() * best.sigmoid()).sort(dim=1, descending=True, stable=True)
    image, rank = (scores[:, :1000] > threshold).nonzero(as_tuple=True)  # at most 1,000 per image, to limit the work
    place = order[image, rank]
    boxes = _decode(predictions[image, place], places[place]).clamp(0, outputs[0][0].shape[1] * STRIDES[0])
    rows = torch.cat([image[:, None], boxes, scores[image, rank, None], classes[image, place, None]], 1)
    # batched_nms adds an offset to each group: in float32, rounding would depend on the batch. MPS has no float64
    exact = (rows.cpu() if rows.is_mps else rows).double()
    groups = exact[:, 0] * (predictions.shape[2] - 5) + exact[:, 6]
    rows = rows[batched_nms(exact[:, 1:5], exact[:, 5], groups.long(), 0.45).sort().values.to(rows.device)]
    image = rows[:, 0].contiguous()
    return rows[torch.arange(len(rows), device=rows.device) - torch.searchsorted(image, image) < most]


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors of the module in the order of the authors' files (parser.c of github.com/pjreddie/darknet)."""
    tensors: list[Tensor] = []
    for layer in module.modules():
        if isinstance(layer, nn.GroupNorm):
            raise UsageError("the authors' format has no GroupNorm: use --model tiny-bn or yolov3")
        if isinstance(layer, nn.Conv2d):
            tensors += [layer.weight] if layer.bias is None else [layer.bias, layer.weight]
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # BatchNorm's tensors precede the convolution's weight
            tensors += [layer.bias, layer.weight, *list(layer.buffers())[:2], tensors.pop()]
    return tensors


def load_weights(model: YOLOv3, path: str) -> None:
    """Load the authors' `yolov3.weights` or `darknet53.conv.74`, or any file that `models.load_weights` takes.

    `yolov3.weights` has no anchors, so the model gets the published ones. `save_weights` writes the model's own anchors
    to a second file, which this function also reads. Raises UsageError if the file's size does not fit the model.
    """
    try:
        header = np.fromfile(path, "<i4", 5)  # the version, then the number of images seen, in 64 bits
    except OSError as error:
        raise UsageError(f"--weights {path}: {reason(error)}") from None
    if len(header) < 5 or header[:3].min() < 0 or header[:3].max() > 999:  # torch's files start with letters
        return models.load_weights(model, path)
    parts = {20 + 4 * sum(map(torch.numel, part)): part for part in map(_tensors, (model, model.backbone))}
    size, (whole, backbone) = Path(path).stat().st_size, parts
    if size not in parts:
        raise UsageError(f"--weights {path}: {size:,} bytes; for {model.num_classes} classes, the model has {whole:,}, "
                         f"its backbone {backbone:,}")
    floats = torch.from_numpy(np.fromfile(path, "<f4", offset=20))
    for tensor, values in zip(parts[size], floats.split([tensor.numel() for tensor in parts[size]])):
        tensor.data.copy_(values.view_as(tensor))
    beside = Path(f"{path}.anchors")
    if size == whole and (beside.is_file() or header[3:].any()):
        found = np.loadtxt(beside, ndmin=2) if beside.is_file() else ANCHORS
        model.anchors.data.copy_(torch.as_tensor(found).view_as(model.anchors))
    if is_main_process():
        print(f"weights {path}: loaded {'all layers' if size == whole else 'the backbone'}")


def save_weights(model: YOLOv3, path: str) -> None:
    """Write the model to `path` in the authors' format, and the anchors for the authors' cfg file to `path`.anchors."""
    parts = [np.array([0, 2, 0, 0, 0], "<i4")]  # version 0.2.0, 0 images seen
    parts += [tensor.numpy(force=True).astype("<f4") for tensor in _tensors(model)]
    try:
        Path(path).write_bytes(b"".join(part.tobytes() for part in parts))
        np.savetxt(f"{path}.anchors", model.anchors.numpy(force=True).reshape(-1, 2), "%.9g")  # pixels
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}") from None


def schedule(name: str, epochs: int, lrf: float, warmup_epochs: int) -> Callable[[int], float]:
    """Return a function that maps the epoch, counted from 0, to the learning-rate factor.

    The factor rises linearly over `warmup_epochs`. "cosine" is `recipe.cosine`; "step" multiplies the rate by
    `lrf` ** 0.5 at 80 % and 90 % of the epochs. In the authors' cfg, this factor is 0.1.
    """
    cosine = recipe.cosine(epochs, lrf)
    rate = {"cosine": cosine, "step": lambda n: lrf ** (((n >= 0.8 * epochs) + (n >= 0.9 * epochs)) / 2)}[name]
    return lambda n: rate(n) * min(1, (n + 1) / (warmup_epochs + 1))


def main() -> None:
    """Write a model in the authors' format: python -m detection.yolov3 CHECKPOINT.pt FILE.weights"""
    parser = cli.ArgumentParser(main.__doc__ or "")
    parser.add_argument("checkpoint", help="checkpoint of a script of this folder with --model tiny-bn or yolov3")
    parser.add_argument("file", help="the file to write")
    args = parser.parse_args()
    tensors = load_file("CHECKPOINT", args.checkpoint).get("model", {})
    for name in MODELS if "anchors" in tensors else ():
        model = create_model(name, list(tensors.values())[-1].numel() // 3 - 5, tensors["anchors"])
        if model.state_dict().keys() == tensors.keys():
            model.load_state_dict(tensors)
            save_weights(model, args.file)
            return print("anchors =", ", ".join(f"{x:.1f},{y:.1f}" for x, y in model.anchors.tolist()))
    raise UsageError(f"CHECKPOINT {args.checkpoint}: not a checkpoint of a detector")


if __name__ == "__main__":
    with cli.report_errors():
        main()
