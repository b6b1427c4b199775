"""Run two commands that train with torch, and report whether they train the same model; or check one command alone.

    python -m verify "python train.py --epochs 2" "torchrun --nproc-per-node=2 train_DDP.py --epochs 2"
    python -m verify --watch "torchrun --nproc-per-node=2 train_DDP.py --epochs 2"

The programs need no changes. This folder needs only torch, so you can copy it anywhere. Exit code 0 means the same
model. Exit code 1 means different models; the output names the first step and parameter that differ, and the likely
cause. Exit code 2 means that the runs are not comparable, or that the usage is wrong.

A hook runs in every Python process that imports torch (`recording.py`). The hook makes float64 the default type, and
replaces float32 with float64 in batches and casts. Within optimizer steps, the hook also turns casts to 16 bits into
casts to float64. So two correct programs differ by only about 1e-15, and autocast and loss scaling cause no rounding.
At each optimizer step, the hook on each rank records the learning rates, and digests of all parameters, gradients,
buffers and samples. The samples come from the batches of the DataLoader or, without a DataLoader, from the inputs of
the outermost module.

The models differ if the relative difference at a step exceeds both 1e-9 and 1000 times the greatest earlier difference,
or if it exceeds 1e-4 (`comparing.py`). Rounding errors grow slowly, but a mistake appears at once. If a program fails
in float64, or still computes in lower precision, both programs run again in their own precision. The limits are then
1e-4, 1000 and 0.1 (with 16 bits: 0.05, 1000 and 0.5). `explaining.py` looks for the cause. If randomness may be the
cause, command A runs a second time, to check that it is reproducible.

If all parameters are the same, `verify` also compares buffers, averages of the weights, and the metrics that both
commands print equally often as NAME NUMBER, where a part of NAME is "loss", "accuracy" or a similar word. Metrics that
differ cause only a note, because in many programs, each process prints the loss of its own share.

`--watch` runs one command, in its own precision, and checks rules that hold for any correct run (`watching.py`):
replicas, learning rates and numbers of steps are equal on all ranks; no two ranks read the same samples; each epoch has
a different order; all parameters change and stay finite.

The commands must start from scratch with fixed seeds, and neither may read files that the other writes. No rank may
restart. The hook does not see steps in a CUDA graph, optimizers that do not derive from torch.optim.Optimizer, or
processes that run Python with `-E`, `-I` or `-S`. The hook gathers DTensors. `verify` uses the initial weights to match
pipeline stages, and parts of tensors, with the whole tensors of the other command. `verify` cannot match the flat
parameters of FSDP1. The cause that `verify` names is an informed guess.
"""
from .comparing import compare
from .recording import Recorder
from .running import environment, record

__all__ = ["Recorder", "compare", "environment", "record"]
