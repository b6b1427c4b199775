"""Run train_DDP.py's `main` as a few of 1,024 ranks, one after the other; check that they divide the work exactly.

    python -m benchmarks.scaling.ranks        # prints what each of these ranks read, sent and kept, as JSON

`python -m benchmarks.scaling` writes the result into docs/scaling.md, and tests/drills/test_scaling.py checks it again.

torch's fake process group completes every collective at once and moves no data. DDP's own hook needs a result that this
group does not return (torch 2.15). The hook used here records each bucket and returns the rank's own part.
"""
import contextlib
import functools
import json
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

import train_DDP
from benchmarks.scaling.inputs import transformer
from benchmarks.scaling.model import WORLD
from common import datasets, errors

RANKS, BATCH = (0, 1, 511, 1023), 8192


@contextlib.contextmanager
def fake_rank(rank: int):
    """Act as one of WORLD ranks."""
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def play(rank: int, folder: str, batch_size: int = BATCH) -> dict:
    """Train for one epoch as `rank`; return what it read, sent and kept."""
    loaders, buckets, optimizers = [], {}, []

    def make_loader(*args, **options):
        loaders.append(DataLoader(*args, **options))
        return loaders[-1]

    def wrap(*args, **options):
        parallel_model = DistributedDataParallel(*args, **options)
        parallel_model.register_comm_hook(None, note)
        return parallel_model

    def note(_, bucket):
        buckets[bucket.index()] = bucket.buffer()
        answer = torch.futures.Future()
        answer.set_result(bucket.buffer().div_(WORLD))
        return answer

    def size(tensors):  # of their storages, counting each once: a gradient may be a view into a bucket
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    register_optimizer_step_post_hook(lambda optimizer, *_: optimizers.append(optimizer))
    train_DDP.DataLoader, train_DDP.DistributedDataParallel = make_loader, wrap
    sys.argv = ["train_DDP.py", "--dataset", "fake", "--epochs", "1", "--workers", "0", "--device", "cpu",
                "--batch-size", str(batch_size), "--output-dir", f"{folder}/{rank}"]
    try:
        with fake_rank(rank):
            train_DDP.main(train_DDP.parse_args())
    except errors.UsageError as error:
        return {"refused": str(error)}
    train, val = loaders
    state = optimizers[-1].state
    kept = {"weights": list(state), "gradients": [weight.grad for weight in state],
            "momentum": [each["momentum_buffer"] for each in state.values()], "buckets": list(buckets.values())}
    kept["together"] = sum(kept.values(), [])
    return {"rank": rank, "share": train.batch_size, "steps": len(optimizers), "train": list(train.sampler),
            "val": list(val.sampler), "buckets": [buffer.nbytes for buffer in buckets.values()],
            "bytes": {name: size(tensors) for name, tensors in kept.items()}}


def shard(rank: int) -> int:
    """Return how many of the transformer's parameters FSDP2 gives to `rank`, without allocating memory."""
    with fake_rank(rank):
        mesh = init_device_mesh("cpu", (WORLD,))
        model = transformer()
        for unit in model:
            fully_shard(unit, mesh=mesh)
        return sum(parameter.to_local().numel() for parameter in model.parameters())


def simulate() -> dict:
    """Return the results of `play` and `shard` for some of the ranks."""
    torch.set_num_threads(1)  # more threads are slower for work this small
    datasets._fake = functools.cache(datasets._fake)  # make the images once for all ranks
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        return {"ranks": [play(rank, folder) for rank in RANKS],
                "refused": [play(0, folder, size)["refused"] for size in (BATCH + 8, 64 * WORLD)],
                "shards": {str(rank): shard(rank) for rank in (RANKS[0], RANKS[-1])}}


@functools.cache
def shares_of_all(samples: int = 50_000) -> tuple[list[int], list[list[int]]]:
    """Return the order of the samples in epoch 1 of train.py, and the share of each of WORLD ranks."""
    shares = []
    for rank in range(WORLD):
        sampler = DistributedSampler(range(samples), WORLD, rank, seed=datasets.mix(0), drop_last=True)
        sampler.set_epoch(1)
        shares.append(list(sampler))
    generator = torch.Generator().manual_seed(datasets.mix(0) + 1)
    return list(RandomSampler(range(samples), generator=generator)), shares


def check(found: dict) -> dict:
    """Check the results of `simulate` for WORLD ranks and summarize them; raise AssertionError if a check fails.

    A DistributedSampler with an explicit rank gives the share of each rank; the ranks that ran must match these shares.
    """
    order, shares = shares_of_all()
    val_samples, share, steps = 10_000, BATCH // WORLD, len(order) // BATCH
    first = found["ranks"][0]
    for one in found["ranks"]:
        assert one["train"] == shares[one["rank"]] and one["share"] == share and one["steps"] == steps
        assert one["val"] == list(range(one["rank"], val_samples, WORLD))
        assert one["bytes"] == first["bytes"] and one["buckets"] == first["buckets"]
    for step in range(steps):
        parts = [indices[step * share:(step + 1) * share] for indices in shares]
        dealt = [index for row in zip(*parts) for index in row]  # one sample from each rank in turn
        assert dealt == order[step * BATCH:(step + 1) * BATCH], f"step {step} is not the single process's batch"
    validated = sorted(index for rank in range(WORLD) for index in range(rank, val_samples, WORLD))
    assert validated == list(range(val_samples))
    return {"processes": WORLD, "ranks": list(RANKS), "batch_size": BATCH, "share": share, "steps": steps,
            "validation": len(validated), "bytes": first["bytes"], "buckets": first["buckets"],
            "refused": found["refused"], "shards": found["shards"]}


if __name__ == "__main__":
    print(json.dumps(simulate()))
