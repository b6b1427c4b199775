"""Hugging Face Accelerate's quick start, with the scripts' model and batches, plain SGD and usual_ddp.py's data.

    torchrun --nproc-per-node=2 -m benchmarks.loops.accelerate_loop --model cnn --batch-size 64 --epochs 5
"""
import atexit

import torch
from accelerate import Accelerator

from benchmarks import loops
from common import launch


def prepare(args):
    # without an accelerator and without cpu=True, each process would silently train a separate model
    accelerator = Accelerator(cpu=args.device == "cpu" or not torch.accelerator.is_available())
    atexit.register(accelerator.end_training)
    torch.set_num_threads(launch.cores_per_process())  # after Accelerator(), which changes this number
    prepared = accelerator.prepare(*loops.load_usual(args, accelerator.num_processes))
    return *loops.quick_start(*prepared, accelerator.backward), accelerator.is_main_process


if __name__ == "__main__":
    loops.run(__doc__, prepare)
