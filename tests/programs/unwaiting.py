"""A program around a script: after its third step and until its eighth, a wait for the GPU is an error.

    python tests/programs/unwaiting.py train.py --log-every 10
"""
import itertools

import torch
from around import run_script
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = itertools.count(1)


def note(*_):
    step = next(steps)
    if torch.cuda.is_available() and step in (3, 8):
        torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
    if step == 8:
        print("steps 4 to 8 are done")


register_optimizer_step_post_hook(note)
run_script()
