"""Lightning Fabric's quick start, with the scripts' model and batches, plain SGD and usual_ddp.py's data.

    torchrun --nproc-per-node=2 -m benchmarks.loops.fabric_loop --model cnn --batch-size 64 --epochs 5
"""
import os

import torch
from lightning_fabric import Fabric

from benchmarks import loops
from common import launch


def prepare(args):
    torch.set_num_threads(launch.cores_per_process())
    world_size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator=args.device or "auto", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
                    strategy="ddp" if world_size > 1 else "auto")
    fabric.launch()
    model, optimizer, loader = loops.load_usual(args, world_size)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    return *loops.quick_start(model, optimizer, loader, fabric.backward), fabric.is_global_zero


if __name__ == "__main__":
    loops.run(__doc__, prepare)
