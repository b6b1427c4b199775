"""Mean average precision (mAP) by COCO's definition. It is not a mean over images or processes.

`match` compares the detections of some images with their true boxes. `average_precision` computes the mAP from the
results for all images, from all processes.
"""
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.reduce import get_rank, get_world_size

THRESHOLDS = np.linspace(0.5, 0.95, 10)  # IoU thresholds
RECALLS = np.linspace(0, 1, 101)
BITS = 2 ** np.arange(20)  # the bits of a result: 10 for "correct" (one per threshold), then 10 for "ignored"


def match(detections: Tensor, labels: Tensor) -> Tensor:
    """Match `detections` (D, 7) with true boxes; return rows, `float32` (R, 3): class, score, result.

    `labels` (M, 6) are the true boxes of the same images. At each of COCO's ten IoU thresholds, the detections take
    their boxes in order of descending score. Each detection takes the free box of its class with the highest IoU, if
    this IoU reaches the threshold. Bit t of the result is set if the detection is correct at threshold t. Bit 10 + t is
    set if the detection is ignored at threshold t: it took no box, and the fraction of its area inside a region to
    ignore reaches the threshold. Several detections can lie in the same region. Detections that are ignored at every
    threshold have no row. These are the rules of COCOeval in pycocotools. VOC's rule for difficult boxes compares the
    IoU, not this fraction.
    """
    found, true = (part.detach().cpu().double().numpy() for part in (detections, labels))
    found = found[np.lexsort((*found[:, 1:5].T, -found[:, 5], found[:, 0]))]  # the input's order must not matter
    true = true[np.argsort(true[:, 0], kind="stable")]
    results = np.zeros((len(found), 20), bool)
    for place in np.unique(found[:, 0]):
        rows, boxes = (slice(*part[:, 0].searchsorted((place, place + 1))) for part in (found, true))
        _match_image(found[rows], true[boxes][::-1], results[rows])  # among equal IoUs, COCO takes the last box
    table = np.stack([found[:, 6], found[:, 5], results @ BITS], 1)[~results[:, 10:].all(1)]
    return torch.from_numpy(table).to(detections.device, torch.float32)


def _match_image(found: np.ndarray, true: np.ndarray, results: np.ndarray) -> None:
    """Fill in the results (D, 20) of one image's detections, which are sorted by score."""
    ignored = true[:, 1] < 0
    area, true_area = (found[:, 3:5] - found[:, 1:3]).prod(1)[:, None], (true[:, 4:] - true[:, 2:4]).prod(1)
    starts, ends = np.maximum(found[:, None, 1:3], true[:, 2:4]), np.minimum(found[:, None, 3:5], true[:, 4:])
    shared = (ends - starts).clip(0).prod(2)  # torchvision's box_iou does not return this area
    iou = shared / np.maximum(np.where(ignored, area, area + true_area - shared), np.finfo(float).tiny)
    iou[found[:, 6:] != np.where(ignored, -1 - true[:, 1], true[:, 1])] = 0
    free = np.tile(~ignored, (10, 1))
    for row in np.flatnonzero((iou >= THRESHOLDS[0]).any(1)):
        fits = iou[row] >= THRESHOLDS[:, None]
        candidates = np.where(fits & free, iou[row], 0)
        right = candidates.any(1)
        free[right, candidates.argmax(1)[right]] = False
        results[row] = np.concatenate([right, ~right & (fits & ignored).any(1)])


def gather_rows(rows: Tensor) -> Tensor:
    """Return the rows (N, C) of all processes, in the order of their ranks; every process must call it.

    The processes may have different numbers of rows. Each process pads its rows to the greatest number, because all
    tensors of an all_gather must have the same shape. all_gather_object would pickle them and, on NCCL, copy them to
    the GPU as bytes.
    """
    if not dist.is_initialized():
        return rows
    counts = rows.new_zeros(get_world_size(), dtype=torch.int64)
    counts[get_rank()] = len(rows)
    dist.all_reduce(counts)
    padded = rows.new_zeros(int(counts.max()), rows.shape[1])
    padded[:len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts.tolist())])


def average_precision(rows: Tensor, boxes: Tensor | Sequence[int]) -> dict[str, float]:
    """Return {"mAP50": mAP at IoU 0.5, "mAP": its mean over IoUs 0.5 to 0.95}; classes without true boxes are left out.

    `rows`, of shape (R, 3), are the rows that `match` returns for all images. Their order does not matter: ties in
    the score are broken by the result. `boxes`, of shape (num_classes,), holds the number of true boxes per class.
    Precision is interpolated at 101 recalls. Without true boxes, both values are 0.
    """
    table = rows.detach().cpu().double().numpy()
    table = table[np.lexsort((table[:, 2], -table[:, 1]))]
    values = [_precision(table[table[:, 0] == label, 2].astype(int), count)
              for label, count in enumerate(torch.as_tensor(boxes).tolist()) if count]
    means = np.mean(values or np.zeros((1, 10)), 0)
    return {"mAP50": float(means[0]), "mAP": float(means.mean())}


def _precision(results: np.ndarray, count: int) -> np.ndarray:
    """Return a class's average precision at each threshold, shape (10,); the class has `count` true boxes."""
    right, ignored = np.split((results[:, None] & BITS) > 0, 2, axis=1)
    hits, misses = right.cumsum(0), (~right & ~ignored).cumsum(0)
    # at each recall, take the best precision at this or a higher recall
    precision = np.maximum.accumulate((hits / np.maximum(hits + misses, 1))[::-1])[::-1]
    precision = np.append(precision, np.zeros((1, 10)), 0)  # 0 for recalls that are not reached
    return np.array([precision[np.searchsorted(hits[:, t] / count, RECALLS), t].mean() for t in range(10)])
