"""Sequence parallelism: between the split layers, each process of a tensor group has a part of every sequence."""
from collections.abc import Callable
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, parallel

from common.errors import UsageError


class SequenceParallel(parallel.SequenceParallel):
    """torch's SequenceParallel, but a frozen weight stays frozen. In torch 2.14, the original makes it trainable."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        module = super()._apply(module, device_mesh)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)
        return module


def require_multiple(option: str, value: int, size: int) -> None:
    """Raise UsageError, naming the `option`, unless its `value` is a multiple of the `size` of a group."""
    if value % size:
        raise UsageError(f"{option} {value}: not a multiple of the {size} processes that divide it")


def whole(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[DTensor, Tensor], Tensor]:
    """Wrap `function`, a loss or a metric: accept outputs that are a DTensor, and return a plain, full tensor."""
    def of_parts(outputs: DTensor, targets: Tensor) -> Tensor:
        targets = DTensor.from_local(targets, outputs.device_mesh, [Replicate()], run_check=False)
        return cast(DTensor, function(outputs, targets)).full_tensor()

    return of_parts
