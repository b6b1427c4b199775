"""A program around a script, in which destroying the process group waits until every process does so.

    torchrun --nproc-per-node=2 tests/programs/waiting_destroy.py FOLDER train_DDP.py --epochs 1

NCCL's documentation calls ncclCommDestroy collective within a node. FOLDER gets a file from each process that arrives.
"""
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from around import run_script

folder = Path(sys.argv.pop(1))
destroy = dist.destroy_process_group


def wait_for_all_and_destroy():
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    destroy()


dist.destroy_process_group = wait_for_all_and_destroy
run_script()
