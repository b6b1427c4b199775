"""Parts of a training recipe that work on one device and on many; train_combined.py uses them."""
import atexit
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.torch_version import TorchVersion

from . import layers
from .errors import UsageError

SKIPPED, STEPS = 5, 5  # skip the first steps, which allocate memory; trace the next ones


def after_update(optimizer: Optimizer, action: Callable[[], object]) -> None:
    """Call `action()` after each step in which `optimizer` updates the weights.

    If gradients overflow, a GradScaler does not call the optimizer. It does call an optimizer with `fused=True`, but
    this optimizer skips the update itself and then has a nonzero `found_inf`.
    """
    def act(optimizer: Optimizer, *_: Any) -> None:
        if not getattr(optimizer, "found_inf", None):
            action()

    optimizer.register_step_post_hook(act)


class WarmUp:
    """Raises the learning rate linearly to the scheduler's rate, over an optimizer's first `updates` updates.

    See Goyal et al. 2017 (https://arxiv.org/abs/1706.02677), section 2.2. Only the step itself sees the reduced rate:
    the scheduler and checkpoints see the full one. `factor` is the fraction of the full rate that the last update used.
    A resumed run restores the `state_dict()`.
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

    `average.update_parameters(model)` gives the same weights, but waits for a GPU in each step, because it copies a
    counter there. It also copies each buffer.
    """
    weight = 1 - decay if average.n_averaged else 1.0
    torch._foreach_lerp_([*average.module.parameters()], [*model.parameters()], weight)
    average.n_averaged += 1


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of a model separately, so that equal blocks compile only once.

    By default, Dynamo splits a graph where DDP's buckets end, so that DDP sends their gradients earlier
    (https://docs.pytorch.org/docs/stable/notes/ddp.html). Here, each block stays one graph, and DDP can send
    gradients whenever a block's backward pass ends.

    Dynamo counts the graphs of blocks that share code together and stops compiling them after 8. A ResNet needs more:
    it has eight kinds of blocks, each compiled for training and for evaluation. Dynamo would also take a size in which
    two blocks differ for a size that varies, and compile slower code for all sizes (pytorch issue 102670). So if blocks
    of one class have weights of different shapes, every block is compiled once for each size of its inputs. Other
    models, such as transformers, keep Dynamo's default: a second graph, for all sizes, if the size of the inputs
    varies.

    Before torch 2.14, raises UsageError for an embedding that is split by tensor parallelism.
    """
    from torch._dynamo import config

    meshes = [getattr(module.weight, "device_mesh", None) for module in model.modules()
              if isinstance(module, nn.Embedding)]
    if TorchVersion(torch.__version__) < "2.14" and any("tensor" in mesh.mesh_dim_names for mesh in meshes if mesh):
        raise UsageError(f"--compile: torch {torch.__version__} cannot compile an embedding that is split by tensor "
                         "parallelism; use torch 2.14 or newer, or omit --compile")

    config.optimize_ddp = False
    blocks = layers.blocks(model)
    config.recompile_limit = max(config.recompile_limit, 8 * len(blocks))
    kinds = {(type(block), *[parameter.shape for parameter in block.parameters()]) for block in blocks}
    differ = len(kinds) > len({type(block) for block in blocks})
    for block in blocks:
        block.compile(dynamic=False if differ else None)


def smooth(criterion: nn.Module, smoothing: float) -> nn.Module:
    """Return a copy of the loss `criterion` with label smoothing; raise UsageError if the loss does not support it."""
    if smoothing and not hasattr(criterion, "label_smoothing"):
        raise UsageError(f"--label-smoothing {smoothing:g}: {type(criterion).__name__} does not support it")
    smoothed: Any = copy.copy(criterion)
    if smoothing:
        smoothed.label_smoothing = smoothing
    return smoothed


def compress(parallel_model: DistributedDataParallel, kind: str | None, scaled: bool) -> None:
    """Make DDP send smaller gradients: "bf16" halves them, "powersgd" sends low-rank approximations, None does nothing.

    PowerSGD (https://arxiv.org/abs/1905.13727) adds its error, the part that it did not send, to the next gradient.
    Checkpoints do not contain this error, so a resumed run differs from an uninterrupted one. After a `scaled` loss
    overflows, the error would stay infinite, and the scaler would skip all later steps. So "powersgd" with a `scaled`
    loss raises UsageError.
    """
    if scaled and kind == "powersgd":
        raise UsageError("--compress powersgd: not with --precision fp16: PowerSGD would keep an overflow; use bf16")
    if not kind:
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if kind == "bf16":
        try:
            parallel_model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        except TypeError:  # raised by builds of torch for CPUs only and for macOS
            raise UsageError("--compress bf16: this build of torch has neither NCCL nor XCCL, which torch's hook "
                             "requires; use --compress powersgd") from None
    else:  # the first ten steps send full gradients: early gradients change too fast
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        parallel_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def trace(folder: Path, device: torch.device, optimizer: Optimizer, rank: int) -> None:
    """Write a Chrome trace of optimizer steps 6 to 10 to `folder`/trace-RANK.json; on CUDA, also memory-RANK.pickle.

    Open the trace in https://ui.perfetto.dev and the other file in https://docs.pytorch.org/memory_viz. Names to look
    for in the trace: enumerate(DataLoader), DistributedDataParallel.forward, autograd::engine, gloo: or nccl:,
    Optimizer.step.
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
