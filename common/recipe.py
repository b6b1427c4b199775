"""The default recipe: the metrics of classifiers, sums of any metrics, and the schedule of the learning rate."""
import math
from collections.abc import Callable, Mapping

from torch import Tensor

from .errors import UsageError


def top(k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a metric: is the label among the `k` highest outputs (N, classes)? UsageError if they do not fit."""
    def hit(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.ndim != 2 or targets.ndim != 1 or targets.is_floating_point():
            shapes = f"{tuple(outputs.shape)} and {tuple(targets.shape)} {targets.dtype}"
            raise UsageError(f"accuracy needs outputs (N, classes) and integer targets (N,); these are {shapes}; "
                             "put your own metric at '# yours: the metrics'")
        return (outputs.topk(min(k, outputs.shape[1])).indices == targets[:, None]).any(1)

    return hit


def sum_metrics(metrics: Mapping[str, Callable[..., Tensor]], outputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Return each metric's sum over a batch; raise UsageError if it does not return one value per sample."""
    sums = []
    for name, metric in metrics.items():
        values = metric(outputs, targets)
        if not isinstance(values, Tensor) or values.numel() != len(targets):
            what = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise UsageError(f"the metric {name!r} returned {what} for {len(targets)} samples; it must return a tensor "
                             "with one value per sample")
        sums.append(values.sum())
    return sums


def cosine(epochs: int, lrf: float) -> Callable[[int], float]:
    """Return a function from the epoch alone to the learning-rate factor: half a cosine, from 1 to `lrf`."""
    return lambda n: lrf + (1 - lrf) * (1 + math.cos(math.pi * min(n, epochs) / epochs)) / 2
