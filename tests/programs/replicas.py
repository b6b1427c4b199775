"""A program around train_TP.py: rank 0 prints how far apart the copies are that the ranks of a tensor group hold.

    torchrun --nproc-per-node=2 tests/programs/replicas.py STEP train_TP.py --model vit --tensor-parallel 2

The copies are the weights outside the plan; nothing synchronizes them between the steps. It compares after step STEP.
"""
import itertools
import sys

import torch
import torch.distributed as dist
from around import run_script
from torch.optim.optimizer import register_optimizer_step_post_hook

last = int(sys.argv.pop(1))
size = int(sys.argv[sys.argv.index("--tensor-parallel") + 1])
steps = itertools.count(1)


@torch.no_grad()
def compare(optimizer, *_):
    if next(steps) != last:
        return
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    copies = [weight for weight in weights if "tensor" not in (weight.device_mesh.mesh_dim_names or ())]
    assert 0 < len(copies) < len(weights), "the layers of the plan are not on the mesh of the tensor groups"
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, torch.cat([copy.to_local().flatten().cpu() for copy in copies]))
    drift = max((every[rank] - every[rank // size * size]).abs().max().item() for rank in range(len(every)))
    if dist.get_rank() == 0:
        print(f"step {last}: {len(copies)} of {len(weights)} tensors are copies, {drift:.3g} apart")


register_optimizer_step_post_hook(compare)
run_script()
