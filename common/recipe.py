"""Parts of a training recipe that work on one device as on many; train_combined.py uses them."""
import atexit
import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import ProfilerActivity, profile, schedule

from .errors import UsageError

SKIPPED, STEPS = 5, 5  # the first steps allocate and set up; the trace has the next ones


class WarmUp:
    """Raises the learning rate linearly over the first `updates` steps of an optimizer, to the scheduler's rate.

    Goyal et al. 2017 (https://arxiv.org/abs/1706.02677), section 2.2. It counts the steps that the optimizer takes: a
    GradScaler skips one whose gradients overflow, and the hooks here do not run. Resumes from its `state_dict()`.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler, updates: int) -> None:
        self.scheduler, self.updates, self.done = scheduler, updates, 0
        optimizer.register_step_pre_hook(self._set_rates)
        optimizer.register_step_post_hook(self._count)

    def _set_rates(self, optimizer: Optimizer, *_: Any) -> None:
        if self.done < self.updates:
            for group, rate in zip(optimizer.param_groups, self.scheduler.get_last_lr()):
                group["lr"] = rate * (self.done + 1) / self.updates

    def _count(self, *_: Any) -> None:
        self.done += 1

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def smooth(criterion: nn.Module, smoothing: float) -> nn.Module:
    """Return the loss `criterion` with label smoothing; raise UsageError if it has none."""
    if smoothing and not hasattr(criterion, "label_smoothing"):
        raise UsageError(f"--label-smoothing {smoothing:g}: {type(criterion).__name__} has none")
    smoothed: Any = copy.copy(criterion)
    if smoothing:
        smoothed.label_smoothing = smoothing
    return smoothed


def compress(parallel_model: DistributedDataParallel, kind: str) -> None:
    """Let DDP send smaller gradients: "bf16" halves them, "powersgd" sends low-rank approximations.

    PowerSGD (https://arxiv.org/abs/1905.13727) adds what it could not send to the next gradient. That error is part of
    no checkpoint, so a resumed run differs from one that was not interrupted.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if kind == "bf16":
        parallel_model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    else:  # the first steps send whole gradients: early ones change too fast
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        parallel_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def trace(folder: Path, device: torch.device, optimizer: Optimizer, rank: int) -> None:
    """Write a Chrome trace of steps 6 to 10 to `folder`/trace-RANK.json; on CUDA, also memory-RANK.pickle.

    Open the trace in https://ui.perfetto.dev and the other file in https://docs.pytorch.org/memory_viz. The ranges:
    enumerate(DataLoader), DistributedDataParallel.forward, autograd::engine, gloo: or nccl:, and Optimizer.step.
    """
    def export(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / f"trace-{rank}.json"))
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"memory-{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    if device.type == "cuda":
        torch.cuda.memory._record_memory_history()
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    profiler = profile(activities=kinds, schedule=schedule(wait=SKIPPED - 1, warmup=1, active=STEPS, repeat=1),
                       on_trace_ready=export)
    profiler.start()
    optimizer.register_step_post_hook(lambda *_: profiler.step())
    atexit.register(profiler.stop)
