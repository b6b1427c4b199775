"""Runs a script as if Python had started it, after one of the functions here has prepared something.

    torchrun --nproc-per-node=2 tests/programs/around.py FUNCTION [ARGUMENTS] train_DDP.py --epochs 1
"""
import atexit
import inspect
import itertools
import json
import logging
import os
import runpy
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


def last_threads():
    """At the very end, print which threads of the process are left."""
    tasks = Path("/proc/self/task")

    @atexit.register
    def show():
        print("threads:", sorted((task / "comm").read_text().strip() for task in tasks.iterdir()))


def ahead(rank, seconds):
    """Let the clock of one rank be ahead."""
    if os.environ["RANK"] == rank:
        now = time.time
        time.time = lambda: now() + float(seconds)


def mirror(address, resources):
    """Use a mirror for Fashion-MNIST, whose files and MD5 sums are in JSON; FileLock logs when a process waits."""
    from torchvision.datasets import FashionMNIST

    logging.basicConfig()
    logging.getLogger("filelock").setLevel("DEBUG")
    FashionMNIST.mirrors, FashionMNIST.resources = [address], json.loads(resources)


def no_waiting():
    """After the third step and until the eighth, make a wait for the GPU an error."""
    steps = itertools.count(1)

    def note(*_):
        step = next(steps)
        if torch.cuda.is_available() and step in (3, 8):
            torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
        if step == 8:
            print("steps 4 to 8 are done")

    register_optimizer_step_post_hook(note)


def waiting_destroy(folder):
    """Let destroying the process group wait until every process does so and has written a file to `folder`.

    NCCL's documentation calls ncclCommDestroy collective within a node.
    """
    destroy = dist.destroy_process_group

    def wait_for_all_and_destroy():
        Path(folder, os.environ["RANK"]).touch()
        while len(list(Path(folder).iterdir())) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.02)
        destroy()

    dist.destroy_process_group = wait_for_all_and_destroy


def replicas(last):
    """After a step of train_TP.py, let rank 0 print how far apart the copies in a tensor group are.

    The copies are the weights outside the plan; nothing synchronizes them between the steps.
    """
    steps, size = itertools.count(1), int(sys.argv[sys.argv.index("--tensor-parallel") + 1])

    @torch.no_grad()
    def compare(optimizer, *_):
        if next(steps) != int(last):
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


def dropout():
    """Add a dropout layer to the network, which prints which outputs it keeps."""
    from common import models

    class Dropout(torch.nn.Dropout):
        def forward(self, inputs):
            kept = super().forward(torch.ones_like(inputs))
            if self.training:
                # torchrun starts `python -u`: print would write the end of the line separately, and lines would mix
                print(f"kept {dist.get_rank()} {zlib.crc32(kept.numpy().tobytes())}\n", end="")
            return inputs * kept

    def create_model(name, num_classes, image_shape, create=models.create_model):
        model = create(name, num_classes, image_shape)
        (model.hidden if name == "cnn" else model.blocks).append(Dropout())
        return model

    models.create_model = create_model


def sums(folder):
    """Let rank 0 print, in JSON, the types of the tensors that the second step adds up: {operation: types}."""
    steps, path = itertools.count(1), Path(folder, f"trace-{os.environ['RANK']}.json")
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)

    def note(*_):
        step = next(steps)
        if step == 1:
            profiler.start()
        if step != 2:
            return
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        found = {}
        for event in json.loads(path.read_text())["traceEvents"]:
            if event.get("name") in ("c10d::_reduce_scatter_base_", "_c10d_functional::all_reduce"):
                found.setdefault(event["name"], set()).add(event["args"]["Input type"][0])
        if dist.get_rank() == 0:
            print("sums", json.dumps({name: sorted(types) for name, types in found.items()}))

    register_optimizer_step_post_hook(note)


if __name__ == "__main__":
    prepare = globals()[sys.argv.pop(1)]
    prepare(*[sys.argv.pop(1) for _ in inspect.signature(prepare).parameters])
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
