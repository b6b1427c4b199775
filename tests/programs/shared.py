"""Prints whether the processes of a launch share a device of this identity.

    PYTHONPATH=. torchrun --nproc-per-node=2 tests/programs/shared.py GPU-1
"""
import os
import sys

import torch.distributed as dist

from common import launch, reduce

os.environ.update(launch.launch_environment())
shared = reduce.devices_are_shared(sys.argv[1])
dist.init_process_group("gloo")
assert reduce.agree(shared) and not reduce.agree(dist.get_rank())
dist.destroy_process_group()
print("shared" if shared else "apart", flush=True)
