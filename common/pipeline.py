"""How a pipeline divides its work, and the backend through which its stages communicate."""
import math
from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import nn

from . import models
from .errors import UsageError
from .layers import layers_of
from .vit import ViT


class Bf16(nn.Module):
    """A stage that computes in bfloat16; the stored weights and their gradients stay in float32, as under FSDP2."""

    def __init__(self, stage: nn.Sequential, last: bool) -> None:
        super().__init__()
        self.stage, self.last = stage, last

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights = {name: weight.to(torch.bfloat16) for name, weight in self.stage.named_parameters()}
        outputs = torch.func.functional_call(self.stage, weights, inputs.to(torch.bfloat16))
        return outputs.float() if self.last else outputs


def cut(model: nn.Module, count: int, bf16: bool = False) -> Sequence[nn.Module]:
    """Cut a model into `count` stages of about equal size (`bf16`: see Bf16); raise UsageError if it cannot be cut."""
    if not isinstance(model, (models.CNN, ViT, nn.Sequential)):
        raise UsageError("--model: a pipeline needs a chain of layers: cnn, vit, vit_base or your own nn.Sequential")
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise UsageError("--model: BatchNorm would see micro-batches, not batches; use LayerNorm or GroupNorm")
    layers = layers_of(model) if not isinstance(model, nn.Sequential) else [*model]
    starts = [number for number, layer in enumerate(layers) if [*layer.parameters()]]
    if count > len(starts):
        raise UsageError(f"{count} pipeline stages: the model has only {len(starts)} layers with parameters; "
                         "start fewer processes")
    before = [0, *accumulate(sum(each.numel() for each in layer.parameters()) for layer in layers)]
    ends: list[int] = []
    for stage in range(1, count):  # cut closest to an equal share; each stage gets a layer with parameters
        possible = [start for start in starts[stage:len(starts) - count + stage + 1] if start > max(ends, default=0)]
        ends.append(min(possible, key=lambda start: abs(before[start] - before[-1] * stage / count)))
    stages = [nn.Sequential(*layers[start:end]) for start, end in zip([0, *ends], [*ends, len(layers)])]
    return [Bf16(stage, stage is stages[-1]) for stage in stages] if bf16 else stages


def split_batch(batch_size: int, micro_batches: int | None, processes: int, chunks: int) -> int:
    """Return the number of micro-batches of a pipeline with `chunks` stages per process; by default, two per stage.

    With one stage per process, this is rounded up to a power of two. Raises UsageError if it does not fit the batch.
    """
    number = micro_batches or (2 * processes * chunks if chunks > 1 else 2 ** math.ceil(math.log2(2 * processes)))
    if batch_size % number:
        raise UsageError(f"--batch-size {batch_size}: not a multiple of the {number} micro-batches of --micro-batches")
    if chunks == 1 and number < processes:
        raise UsageError(f"--micro-batches {number}: fewer than the {processes} pipeline stages, so some would be idle")
    if chunks > 1 and number % processes:
        raise UsageError(f"--micro-batches {number}: not a multiple of the {processes} processes of interleaved stages")
    return number


def peer_backend(backend: str, available: Collection[str]) -> str | None:
    """Return a backend that suits messages between stages better than the default group's `backend`, or None."""
    # with nccl, messages to all peers share one queue (torch 2.15 warns); nccl-lazy has a communicator for each peer
    return "nccl-lazy" if backend in ("nccl", "nccl2") and "nccl-lazy" in available else None
