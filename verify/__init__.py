"""Run two commands that train with torch, and report whether they train the same model; or check one command alone.

    python -m verify "python train.py --epochs 2" "torchrun --nproc-per-node=2 train_DDP.py --epochs 2"
    python -m verify --watch "torchrun --nproc-per-node=2 train_DDP.py --epochs 2"
    python -m verify --resume --fresh runs "torchrun --nproc-per-node=2 train_elastic.py --epochs 2 --resume auto"

Exit code 0 means the same model, 1 different models, 2 that the runs are not comparable or that the usage is wrong, and
3 that the models are alike, but in too low a precision to prove more.
README.md in this folder says what is compared, which causes are named, and what cannot be seen.

`running.py` starts a command so that each of its processes that imports torch runs `recording.py`, which computes in
float64 and records the `digests.py` of tensors at each optimizer step. It watches the program's `modules.py`, the
`samples.py` that it reads and the random numbers that it draws (`draws.py`). `comparing.py` finds the first difference
between the `records.py` of two commands, or between the ranks of one (`ranks.py`). `difference.py` collects what is
known of it, and the rules of `explaining.py` name its likely cause. Those of `tracing.py` read one step's `values.py`.
`watching.py` checks the records of a single command. `resuming.py` kills a command, resumes it, and names what the
resumed run has lost.
"""
from .comparing import compare
from .running import environment, record

__all__ = ["compare", "environment", "record"]
