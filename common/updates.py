"""What happens at each update of the weights: a warm-up of the learning rate, and an average of the weights."""
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel


def after_update(optimizer: Optimizer, action: Callable[[], object]) -> None:
    """Call `action()` after each step in which `optimizer` updates the weights.

    If gradients overflow, a GradScaler skips the step; a `fused` optimizer skips the update itself and has `found_inf`.
    """
    def act(optimizer: Optimizer, *_: Any) -> None:
        if not getattr(optimizer, "found_inf", None):
            action()

    optimizer.register_step_post_hook(act)


class WarmUp:
    """Raises the learning rate linearly to the scheduler's rate, during the first `updates` steps of an optimizer.

    See Goyal et al. 2017 (https://arxiv.org/abs/1706.02677), section 2.2. Only the step itself sees the reduced rate:
    the scheduler and checkpoints see the full one. `factor` is the fraction of the full rate that the last update used.
    """

    def __init__(self, optimizer: Optimizer, updates: int) -> None:
        self.updates, self.done, self._rates = updates, 0, list[Any]()
        optimizer.register_step_pre_hook(self._reduce_rates)
        after_update(optimizer, self._count)
        optimizer.register_step_post_hook(self._restore_rates)

    @property
    def factor(self) -> float:
        return self.done / self.updates if self.done < self.updates else 1.0

    def _reduce_rates(self, optimizer: Optimizer, *_: Any) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups if self.done < self.updates else []:
            group["lr"] = group["lr"] * (self.done + 1) / self.updates

    def _restore_rates(self, optimizer: Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates):
            group["lr"] = rate

    def _count(self) -> None:
        self.done += 1

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


@torch.no_grad()
def update_average(average: AveragedModel, model: nn.Module, decay: float) -> None:
    """Move the weights of an average toward those of `model`; the first call copies them.

    `average.update_parameters(model)` does the same, but also copies buffers and a counter, which waits for a GPU.
    """
    weight = 1 - decay if average.n_averaged else 1.0
    torch._foreach_lerp_([*average.module.parameters()], [*model.parameters()], weight)
    average.n_averaged += 1
