"""A program around a script, in which destroying the process group waits until every process does so.

    torchrun --nproc-per-node=2 tests/waiting_destroy.py FOLDER train_DDP.py --epochs 1

NCCL's documentation calls ncclCommDestroy collective within a node. FOLDER has a file for each process that has come.
"""
import os
import runpy
import sys
import time
from pathlib import Path

import torch.distributed as dist

folder, script = Path(sys.argv[1]), sys.argv[2]
destroy = dist.destroy_process_group


def wait_for_all_and_destroy():
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    destroy()


dist.destroy_process_group = wait_for_all_and_destroy
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
runpy.run_path(script, run_name="__main__")
