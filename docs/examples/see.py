"""Demonstrate the ideas of how-it-works.md, each in a few seconds on a CPU.

    python docs/examples/see.py          # all of them
    python docs/examples/see.py ring     # one: traffic, ring, average, batchnorm, half, accumulate, shares, boxes,
                                         # held, columns, pipeline, folder or ways
"""
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler


def in_processes(count, work):
    """Run `work(rank, count)` in `count` processes that form a group."""
    with tempfile.TemporaryDirectory() as folder:
        method = "fork" if sys.platform == "linux" else "spawn"
        arguments = count, f"file://{folder}/store", work.__name__
        mp.start_processes(_member, arguments, count, start_method=method)


def _member(rank, count, store, name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=count)
    globals()[name](rank, count)
    dist.destroy_process_group()


def traffic():
    """What one step sends, for a ResNet-18 of 11.2 million float32 parameters (calculated, not measured)."""
    model = 11_181_642 * 4 / 1e6
    print("devices   in all, either way   DataParallel: to and from device 0   DDP: from each device")
    for count in (2, 4, 8, 64):
        everything = 2 * (count - 1) * model
        print(f"{count:7} {everything:15,.0f} MB {everything:28,.0f} MB {everything / count:25,.0f} MB")


def ring():
    """All-reduce in a ring, written by hand: how much each of 4 processes sends for 4 MB of gradients."""
    in_processes(4, ring_of)


def ring_of(rank, count):
    gradients = torch.full((1_000_000,), float(rank + 1))
    expected = gradients.clone()
    dist.all_reduce(expected)
    chunks, sent = list(gradients.chunk(count)), 0
    for lap in ("add", "copy"):
        for step in range(count - 1):
            outgoing = chunks[(rank - step + (lap == "copy")) % count]
            arriving = (rank - step - 1 + (lap == "copy")) % count
            received = torch.empty_like(chunks[arriving])
            request = dist.isend(outgoing, (rank + 1) % count)
            dist.recv(received, (rank - 1) % count)
            request.wait()
            sent += outgoing.nbytes
            chunks[arriving].copy_(chunks[arriving] + received if lap == "add" else received)
    share, right = sent / gradients.nbytes, torch.equal(gradients, expected)
    in_turn(rank, count, f"rank {rank} sent {sent / 1e6:.1f} MB, {share:.2f} times its gradients; "
                         f"the sum is right: {right}")


def average():
    """Gradients: the mean over 4 processes of 16 samples each, and the gradient of all 64 on one."""
    in_processes(4, average_of)


def average_of(rank, count):
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(20, 5), torch.randn(64, 20), torch.randint(5, (64,))
    parallel_model = DistributedDataParallel(model)
    nn.functional.cross_entropy(parallel_model(inputs[rank::count]), targets[rank::count]).backward()
    averaged = model.weight.grad.clone()
    whole, = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), model.weight)
    if rank == 0:
        difference = (averaged - whole).abs().max().item()
        print(f"largest gradient {whole.abs().max():.4f}, largest difference {difference:.1e}")


def batchnorm():
    """BatchNorm: the mean that 4 processes of 8 samples each normalise by, and the one over all 32."""
    torch.manual_seed(0)
    samples = 3 + 2 * torch.randn(32, 1)
    shares = {f"process {rank} alone": samples[rank::4] for rank in range(4)}
    for name, share in [*shares.items(), ("over all (SyncBN)", samples)]:
        print(f"{name:20} mean {share.mean():.2f}   deviation {share.std(correction=0):.2f}")


def half():
    """Half precision: how both formats store small, large and nearly equal numbers."""
    print(f"{'':22} {'float16':>12} {'bfloat16':>12}")
    numbers = {"1e-8, a gradient": 1e-8, "1e-8 x 65536": 1e-8 * 65536, "70000": 70_000.0,
               "1 + 1/256": 1 + 1 / 256}
    for what, value in numbers.items():
        low, brain = torch.tensor(value).half().item(), torch.tensor(value).bfloat16().item()
        print(f"{what:22} {low:12.8g} {brain:12.8g}")


def accumulate():
    """Accumulation: how often 2 processes send their gradients in a step of 4 micro-batches."""
    in_processes(2, accumulate_in)


def accumulate_in(rank, count):
    model = nn.Linear(1000, 100)
    parallel_model = DistributedDataParallel(model)
    sent = []

    def send(_, bucket):
        sent.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer() / count, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    parallel_model.register_comm_hook(None, send)
    for careful in (False, True):
        sent.clear()
        for micro_batch in range(4):
            with parallel_model.no_sync() if careful and micro_batch < 3 else contextlib.nullcontext():
                parallel_model(torch.randn(8, 1000)).sum().backward()
        if rank == 0:
            name = "with no_sync()" if careful else "without no_sync()"
            print(f"{name:18} all-reduces: {len(sent)}, together {sum(sent) / 1e6:.1f} MB")


def shares():
    """Samples: how DistributedSampler divides 10 samples among 4 processes, and how range() does."""
    for name, options in [("padded", {}), ("drop_last", {"drop_last": True})]:
        dealt = [list(DistributedSampler(range(10), 4, rank, shuffle=False, **options)) for rank in range(4)]
        print(f"{name:10} {dealt}")
    print(f"{'range':10} {[list(range(rank, 10, 4)) for rank in range(4)]}")


def boxes():
    """Boxes: the gradient of 2 processes with 1 and 9 boxes, and that of one process with all 10."""
    torch.manual_seed(0)
    weights, samples, targets = torch.zeros(20, requires_grad=True), torch.randn(10, 20), torch.randn(10)

    def gradient(share, count):
        losses = (samples[share] @ weights - targets[share]).square()
        return torch.autograd.grad(losses.sum() / count, weights)[0]

    whole = gradient(slice(0, 10), 10)
    for name, counts in [("its own boxes", (1, 9)), ("all boxes / 2", (10 / 2, 10 / 2))]:
        averaged = (gradient(slice(0, 1), counts[0]) + gradient(slice(1, 10), counts[1])) / 2  # as DDP does
        error = (averaged - whole).norm() / whole.norm()
        print(f"each divides by {name}: relative error {error:.1e}")


def held():
    """Memory: the tensors of 8 layers with Adam on each of 4 processes, and FSDP2's weights while a layer computes."""
    in_processes(4, held_by)


def held_by(rank, count):
    for name in ("DDP", "ZeRO-1", "FSDP2"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        computing = []
        if name == "FSDP2":
            mesh = init_device_mesh("cpu", (count,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
                layer.register_forward_pre_hook(lambda *_, model=model, computing=computing: computing.append(
                    megabytes(model.parameters())))
        parallel_model = (fully_shard(model, mesh=mesh) if name == "FSDP2" else
                          DistributedDataParallel(model, gradient_as_bucket_view=True))
        optimizer = (ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam) if name == "ZeRO-1" else
                     torch.optim.Adam(model.parameters()))
        parallel_model(torch.randn(2, 512)).sum().backward()
        optimizer.step()
        local = optimizer.optim if name == "ZeRO-1" else optimizer
        parts = {"weights": megabytes(model.parameters()),
                 "gradients": megabytes(parameter.grad for parameter in model.parameters()),
                 "optimizer": megabytes(value for state in local.state.values() for value in state.values())}
        if rank == 0:
            print(f"{name:7} " + "  ".join(f"{part} {size:5.1f} MB" for part, size in parts.items())
                  + (f"; weights while a layer computes: up to {max(computing):.1f} MB" if computing else ""))


def megabytes(tensors):
    tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in tensors) / 1e6


def columns():
    """Tensor parallelism: 4 processes in a grid of 2 x 2; a pair of layers, cut by columns and then by rows."""
    in_processes(4, columns_of)


def columns_of(rank, count):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    group, part = grid["tensor"].get_group(), grid["tensor"].get_local_rank()
    torch.manual_seed(0)
    first, second, samples = torch.randn(64, 256), torch.randn(256, 64), torch.randn(8, 64)
    hidden = nn.functional.gelu(samples @ first.chunk(2, dim=1)[part])  # no message: each column is complete
    outputs = hidden @ second.chunk(2, dim=0)[part]
    dist.all_reduce(outputs, group=group)  # the only one
    whole = nn.functional.gelu(samples @ first) @ second
    error = (outputs - whole).abs().max() / whole.abs().max()
    groups = {name: dist.get_process_group_ranks(grid[name].get_group()) for name in ("tensor", "data")}
    in_turn(rank, count, f"rank {rank}: tensor group {groups['tensor']}, data group {groups['data']}, "
                         f"difference from whole layers {error:.0e}")


def pipeline():
    """A pipeline: when 4 stages work on M micro-batches (0 to 7: forward; B: backward), and how long they wait."""
    for micro_batches in (4, 8, 32):
        rows = one_f_one_b(4, micro_batches)
        slots = max(map(len, rows))
        idle = 1 - sum(len(row) - row.count(" ") for row in rows) / slots / 4
        formula = 3 / (micro_batches + 3)
        print(f"M = {micro_batches}: idle {idle:.3f}, (S - 1) / (M + S - 1) = {formula:.3f}")
        for stage, row in enumerate(rows if micro_batches == 8 else []):
            print(f"  stage {stage}  {row}")


def one_f_one_b(stages, micro_batches):
    """Return the work of each stage, one character per slot of time, in the order of the schedule 1F1B."""
    todo = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)
        order = [("F", number) for number in range(ahead)]
        for number in range(micro_batches):
            order += [("F", number + ahead)] * (number + ahead < micro_batches) + [("B", number)]
        todo.append(order)
    done, rows = {}, [""] * stages
    for slot in range(4 * (stages + micro_batches)):
        for stage, order in enumerate(todo):
            if not order:
                continue
            kind, number = order[0]
            before = stage - 1 if kind == "F" else stage + 1
            ready = not 0 <= before < stages or done.get((kind, number, before), slot) < slot
            rows[stage] += (str(number % 10) if kind == "F" else "B") if ready else " "
            if ready:
                done[kind, number, stage] = slot
                order.pop(0)
    return rows


def folder():
    """A distributed checkpoint: 2 processes write a folder, one reads it; without .metadata, it is incomplete."""
    in_processes(2, folder_of)


def folder_of(rank, count):
    paths = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(paths)
    weights = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (count,)), [Shard(0)])
    saving = dcp.async_save({"weights": weights}, checkpoint_id=paths[0])
    weights.to_local().zero_()  # training continues: the copy is complete
    saving.result()
    if rank == 0:
        print(f"files: {', '.join(sorted(os.listdir(paths[0])))}")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        content = {"weights": torch.zeros(6)}
        dcp.load(content, checkpoint_id=paths[0], no_dist=True)
        print(f"one process reads {content['weights'].tolist()}")
        os.remove(os.path.join(paths[0], ".metadata"))
        logging.disable()  # of the tracebacks of two missing files
        try:
            dcp.load(content, checkpoint_id=paths[0], no_dist=True)
        except CheckpointException:
            print("without .metadata: CheckpointException")
        shutil.rmtree(paths[0])


def ways():
    """What each of 2 processes communicates in one step of a GPT, if they cut it in one of four ways."""
    in_processes(2, ways_of)


class Calls(TorchDispatchMode):
    """Count the calls of each collective by the size of its whole tensor."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # first, let it become collectives of plain tensors
        result = function(*args, **kwargs or {})
        kind = function.__name__.split(".")[0].strip("_").replace("allg", "all_g").replace("allr", "all_r")
        for name in ("all_gather", "reduce_scatter", "all_reduce", "send"):
            if function.namespace in ("c10d", "_c10d_functional") and kind.startswith(name):
                sizes = [sum(x.nbytes for x in tree_leaves(part) if isinstance(x, torch.Tensor)) for part in
                         (*args[:2], result)]
                self.found[name.replace("_", "-"), max(sizes)] += 1
        return result


def ways_of(rank, count):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from language import context, gpt, stages
    from language import train_4D as script

    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("tensor",))
    group, order = mesh.get_group(), context.order(128, count, torch.device("cpu"))
    tokens, targets = torch.randint(256, (2, 4, 128)).unbind()
    for way in ("data", "tensor", "context", "pipeline"):
        model, loss = gpt.GPT(gpt.Size(64, 2, 4, 4, 192), 256, end=0), gpt.loss
        part = tokens[rank::count] if way == "data" else tokens
        for block in [*model.model.layers, model] if way == "data" else []:
            fully_shard(block, mesh=mesh)
        if way == "tensor":
            loss = script.criterion
            parallelize_module(model, mesh, script.tensor_parallel.check_plan(model, script.PLAN, mesh))
        if way == "context":
            model.positions, model.attend = order[rank], lambda *inputs: script.attend(group, order, *inputs)
        parts = stages.cut(model, count, count)[rank:rank + 1]
        schedule = script.create_schedule(parts, 2, torch.device("cpu"), group, loss)
        for _ in range(2):  # the first step of a pipeline also exchanges shapes
            with loss_parallel(), Calls() as calls:
                if way == "pipeline":
                    schedule.step(*([tokens] if rank == 0 else []), tokens=tokens, target=targets)
                else:
                    loss(model(part), model.part(targets[:len(part)])).backward()
        for (name, size), times in sorted(calls.found.items()) if rank == 0 else []:
            print(f"{way:9} {times:3} x {name:15} {size / 1000:7.1f} kB", flush=True)
        dist.barrier()


def in_turn(rank, count, line):
    """Print a line per process, in the order of their ranks."""
    for turn in range(count):
        if turn == rank:
            print(line, flush=True)
        dist.barrier()


def main():
    ideas = [traffic, ring, average, batchnorm, half, accumulate, shares, boxes, held, columns, pipeline,
             folder, ways]
    chosen = [idea for idea in ideas if idea.__name__ in sys.argv[1:] or len(sys.argv) == 1]
    if not chosen:
        sys.exit(__doc__.strip())
    for idea in chosen:
        print(f"{idea.__name__}: {idea.__doc__}", flush=True)
        idea()
        print(flush=True)


if __name__ == "__main__":
    main()
