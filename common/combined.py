"""Options of both `train_combined.py`: smaller gradients, and a trace."""
import atexit
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import profile, schedule

from .errors import UsageError

SKIPPED, STEPS = 5, 5  # skip the first steps, which allocate memory; trace the next ones


def compress(parallel_model: DistributedDataParallel, kind: str | None, scaled: bool) -> None:
    """Make DDP send smaller gradients: "bf16" halves them, "powersgd" sends low-rank approximations, None does nothing.

    PowerSGD (https://arxiv.org/abs/1905.13727) adds its error, the part that it did not send, to the next gradient.
    Checkpoints do not contain this error, so a resumed run differs from an uninterrupted one. After a `scaled` loss
    overflows, the error would stay infinite, and the scaler would skip all later steps: this raises UsageError.
    """
    if scaled and kind == "powersgd":
        raise UsageError("--compress powersgd: not with --precision fp16: PowerSGD would keep an overflow; use bf16")
    if kind == "bf16":
        try:
            parallel_model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        except TypeError:  # raised by builds of torch for CPUs only and for macOS
            raise UsageError("--compress bf16: this build of torch has neither NCCL nor XCCL, which torch's hook "
                             "requires; use --compress powersgd") from None
    elif kind == "powersgd":  # the first ten steps send full gradients: early gradients change too fast
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        parallel_model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def trace(folder: Path, device: torch.device, optimizer: Optimizer, rank: int) -> None:
    """Write a Chrome trace of optimizer steps 6 to 10 to `folder`/trace-RANK.json; on CUDA, also memory-RANK.pickle.

    Open the trace in https://ui.perfetto.dev and the other file in https://docs.pytorch.org/memory_viz.
    """
    def export(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / f"trace-{rank}.json"))
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"memory-{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    if device.type == "cuda":
        torch.cuda.memory._record_memory_history()
    profiler = profile(schedule=schedule(wait=SKIPPED - 1, warmup=1, active=STEPS, repeat=1), on_trace_ready=export)
    profiler.start()
    optimizer.register_step_post_hook(lambda *_: profiler.step())
    atexit.register(profiler.stop)
