"""Scaling on paper: how DDP's efficiency falls from 1 to 1,024 processes, and what the scripts do among 1,024 ranks.

    pip install -r requirements.txt -r benchmarks/requirements.txt
    python benchmarks/scaling.py                                   # half a minute: measures, simulates, writes it all
    python benchmarks/scaling.py --render                          # the tables and the plot anew, from the same inputs
    python benchmarks/scaling.py --parameters 25.6e6 --step 0.12   # the efficiency of a model of your own

The inputs and their sources stand in `measure`, LINKS and ASSUMED; the model is `all_reduce` and `step_time`, forty
lines of arithmetic. Written are benchmarks/results/scaling.json and scaling.png, and the marked parts of
docs/scaling.md. With --simulate the file is the subprocess that runs train_DDP.py's own `main` as some of 1,024 ranks.
"""
import argparse
import functools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULT = ROOT / "benchmarks/results/scaling.json"
PAGE = ROOT / "docs/scaling.md"

PROCESSES = [1, 2, 8, 16, 64, 256, 1024]
WORLD, PLAYED, BATCH = 1024, (0, 1, 511, 1023), 8192  # the simulated world, the ranks that run, their --batch-size
NODE = 8  # GPUs of one host
BUCKET = 25 * 2 ** 20  # bytes: DistributedDataParallel's bucket_cap_mb
MEMORY = 80e9  # bytes of an H100

# bytes/s into and out of one host, and the seconds of one hop; docs/scaling.md has the sources
LINKS = {
    "10 Gb/s a host": {"bandwidth": 10e9 / 8, "latency": 50e-6},
    "100 Gb/s a host": {"bandwidth": 100e9 / 8, "latency": 14e-6},
    "400 Gb/s a GPU": {"bandwidth": NODE * 400e9 / 8, "latency": 14e-6},
}
NVLINK = {"bandwidth": 450e9, "latency": 3.4e-6}  # bytes/s in each direction between the GPUs of one host
TCP_LATENCY = 50e-6  # of gloo, whatever the bandwidth
ASSUMED = {"peak_flops": 989e12, "utilisation": 0.4, "backward_share": 2 / 3, "resnet50_images": 256,
           "transformer_tokens": 8 * 2048, "cnn_images": 64}


# --- the model -------------------------------------------------------------------------------------------------------

def ring(count, size, bandwidth, latency):
    """Return the seconds of a ring all-reduce of `size` bytes over `count` members."""
    return 2 * (count - 1) / count * size / bandwidth + 2 * (count - 1) * latency


def tree(count, size, bandwidth, latency):
    """Return the seconds of a double binary tree: few hops, and each member sends all the bytes up and down."""
    return 2 * size / bandwidth + 2 * math.ceil(math.log2(count)) * latency


def all_reduce(processes, size, link, on_gpus=True, trees=True):
    """Return the seconds of an all-reduce of `size` bytes: flat on CPUs, within hosts of NODE and then across on GPUs.

    Across hosts each GPU carries one NODE-th of the bytes, all of them at once: together `size`, through what the host
    has of the link. NCCL takes a tree where that is faster than the ring; gloo has the ring.
    """
    if not on_gpus:
        return ring(processes, size, link["bandwidth"], TCP_LATENCY)
    seconds = ring(min(processes, NODE), size, **NVLINK)
    if processes > NODE:
        hosts = processes // NODE
        seconds += min(way(hosts, size, **link) for way in ((ring, tree) if trees else (ring,)))
    return seconds


def step_time(model, processes, link, micro_batches=1, compress=1, trees=True):
    """Return the seconds of one optimizer step of a model on some processes, under DDP.

    Buckets become full evenly through the backward pass, and are sent one after the other while it goes on; the last
    one is full when the pass ends, and nothing is left to hide it behind.
    """
    seconds, share = model["step_seconds"], ASSUMED["backward_share"]
    if processes == 1:
        return micro_batches * seconds
    buckets = max(1, math.ceil(4 * model["parameters"] / BUCKET))
    size = 4 * model["parameters"] / compress / buckets
    one = all_reduce(processes, size, link, model["on_gpus"], trees)
    computed = share * seconds / buckets  # of the backward pass, for each bucket
    last = (1 - share) * seconds + computed + (buckets - 1) * max(computed, one) + one
    return (micro_batches - 1) * seconds + last


def sharded_step_time(model, processes, link):
    """Return the seconds of one step under FSDP2: a gather in the forward pass, another and a scatter in the backward.

    Each is half an all-reduce, and a ring: NCCL has no tree for them across hosts of several GPUs. The next unit's
    weights arrive while this one computes; the first gather and the last scatter hide behind nothing.
    """
    seconds, share, units = model["step_seconds"], ASSUMED["backward_share"], model["units"]
    if processes == 1:
        return seconds
    half = all_reduce(processes, 4 * model["parameters"] / units, link, trees=False) / 2
    forward, backward = (1 - share) * seconds / units, share * seconds / units
    return (half + (units - 1) * max(forward, half) + forward
            + half + (units - 1) * max(backward, 2 * half) + backward + half)


def shortest_step(model, processes, link, wanted=0.9):
    """Return the seconds that a process must compute in a step for an efficiency of `wanted` under plain DDP."""
    buckets = max(1, math.ceil(4 * model["parameters"] / BUCKET))
    one = all_reduce(processes, 4 * model["parameters"] / buckets, link, model["on_gpus"])
    share = ASSUMED["backward_share"]
    behind = buckets * one / (1 / wanted - (1 - share) - share / buckets)  # where sending takes longer than backward
    return max(one / (1 / wanted - 1), behind)


def efficiency(model, processes, link, micro_batches=1, **options):
    """Return t(1) / t(p) in weak scaling: every process has the same work, however many there are."""
    return micro_batches * model["step_seconds"] / step_time(model, processes, link, micro_batches, **options)


def compute(found):
    """Return all figures that follow from the inputs `found` (of `measure`)."""
    tables = {"efficiency": {}, "remedies": {}, "ninety": {}, "rings_alone": {}}
    for name, model in found["models"].items():
        for where, link in LINKS.items():
            if not model["on_gpus"] and "GPU" in where:
                continue
            row = f"{name}, {where}"
            tables["efficiency"][row] = [efficiency(model, count, link) for count in PROCESSES]
            options = {"plain": {}, "accumulate": {"micro_batches": 4}, "bf16": {"compress": 2},
                       "both": {"micro_batches": 4, "compress": 2}}
            tables["remedies"][row] = {key: efficiency(model, WORLD, link, **value) for key, value in options.items()}
            if "units" in model:
                sharded = model["step_seconds"] / sharded_step_time(model, WORLD, link)
                tables["remedies"][row]["sharded"] = sharded
            tables["ninety"][row] = [shortest_step(model, count, link) for count in (8, 64, 1024)]
            if model["on_gpus"]:
                tables["rings_alone"][row] = efficiency(model, WORLD, link, trees=False)
    sizes = {name: model["parameters"] for name, model in found["models"].items()}
    sizes |= {"3 billion parameters": 3e9, "7 billion parameters": 7e9}
    # weights 4, gradients, which are views into DDP's buckets, 4; momentum 4, or Adam's two averages 8
    tables["memory"] = {name: {"ddp_sgd": 12 * size, "ddp_adam": 16 * size,
                               **{f"fsdp_adam_{count}": 16 * size / count for count in (8, 64, 1024)}}
                        for name, size in sizes.items()}
    return tables


# --- the inputs ------------------------------------------------------------------------------------------------------

def transformer():
    """Return a transformer of 1.01 billion parameters without memory, a list of its units for FSDP2: GPT-2's shape."""
    import torch
    from torch import nn

    width, context, vocabulary = 2048, 2048, 50304  # the output layer shares the weights of the input's
    with torch.device("meta"):
        layers = [nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, norm_first=True)
                  for _ in range(18)]
        ends = [nn.Embedding(vocabulary, width), nn.Embedding(context, width), nn.LayerNorm(width)]
        return nn.Sequential(*ends, *layers)


def measure(seconds=6):
    """Return the inputs: the CNN's step as timed here, on one thread; parameters and operations of all as counted."""
    import torch
    import torch.nn.functional as F
    from torch.utils.flop_counter import FlopCounterMode
    from torchvision.models import resnet50

    from benchmarks.turns import machine, spread
    from common import datasets, models

    torch.set_num_threads(1)
    train_set, _ = datasets.create_datasets("fake", "", 0, "")
    normalize = datasets.Normalize(train_set)
    cnn = models.create_model("cnn", train_set.num_classes, train_set.image_shape)
    cnn.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(models.parameter_groups(cnn, 1e-4), 0.001, 0.9)
    times, backward = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        images, labels = train_set.__getitems__(torch.randint(len(train_set), (ASSUMED["cnn_images"],)))
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(cnn(normalize(images)), labels)
        middle = time.perf_counter()
        loss.backward()
        backward.append(time.perf_counter() - middle)
        optimizer.step()
        times.append(time.perf_counter() - start)
    times, backward = times[20:], backward[20:]  # the first ones choose kernels

    with torch.device("meta"):
        resnet, images = resnet50(), torch.empty(1, 3, 224, 224)
        with FlopCounterMode(display=False) as counter:
            resnet(images).sum().backward()
    big = transformer()
    count = {name: sum(parameter.numel() for parameter in model.parameters())
             for name, model in (("CNN", cnn), ("ResNet-50", resnet), ("transformer", big))}
    rate = ASSUMED["peak_flops"] * ASSUMED["utilisation"]
    flops = {"ResNet-50": counter.get_total_flops() * ASSUMED["resnet50_images"],
             "transformer": 6 * count["transformer"] * ASSUMED["transformer_tokens"]}  # arXiv:2001.08361, section 2.1
    return {"machine": machine(torch.device("cpu")), "cnn_step": spread(times), "cnn_steps": len(times),
            "cnn_backward_share": statistics.median(b / t for b, t in zip(backward, times)),
            "resnet50_flops_per_image": counter.get_total_flops(),
            "models": {
                "CNN": {"parameters": count["CNN"], "step_seconds": statistics.median(times), "on_gpus": False},
                "ResNet-50": {"parameters": count["ResNet-50"], "step_seconds": flops["ResNet-50"] / rate,
                              "on_gpus": True},
                "1B transformer": {"parameters": count["transformer"], "step_seconds": flops["transformer"] / rate,
                                   "on_gpus": True, "units": len(big)}}}


# --- the simulated world ---------------------------------------------------------------------------------------------

def play(rank, folder, batch_size=BATCH):
    """Run train_DDP.py's `main` for one epoch as `rank` of WORLD; return what it read, sent and kept.

    torch's fake process group says "done" to every collective and moves nothing. DDP's own hook wants an answer from
    it that it does not give (torch 2.15), so one that notes each bucket and hands back the rank's own part stands in.
    """
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import train_DDP
    from common import errors

    loaders, wrapped, buckets, optimizers = [], [], {}, []

    class Loader(torch.utils.data.DataLoader):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            loaders.append(self)

    class Parallel(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            wrapped.append(self)
            self.register_comm_hook(None, note)

    def note(_, bucket):
        buffer = bucket.buffer()
        buckets[bucket.index()] = buffer
        answer = torch.futures.Future()
        answer.set_result(buffer.div_(WORLD))
        return answer

    argv, sys.argv = sys.argv, ["train_DDP.py", "--dataset", "fake", "--epochs", "1", "--workers", "0", "--device",
                                "cpu", "--batch-size", str(batch_size), "--output-dir", f"{folder}/{rank}"]
    seen = register_optimizer_step_post_hook(lambda one, *_: optimizers.append(one))
    originals = train_DDP.DataLoader, train_DDP.DistributedDataParallel
    train_DDP.DataLoader, train_DDP.DistributedDataParallel = Loader, Parallel
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        train_DDP.main(train_DDP.parse_args())
    except errors.UsageError as error:
        return {"refused": str(error)}
    finally:
        dist.destroy_process_group()
        train_DDP.DataLoader, train_DDP.DistributedDataParallel = originals
        seen.remove()
        sys.argv = argv

    def total(tensors):  # storages, each once: a gradient that is a view into a bucket would not count again
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    (train, val), (model,), optimizer = loaders, wrapped, optimizers[-1]
    weights = list(model.parameters())
    gradients = [weight.grad for weight in weights]
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    return {"rank": rank, "share": train.batch_size, "steps": len(optimizers), "train": list(train.sampler),
            "val": list(val.sampler), "buckets": [buffer.nbytes for buffer in buckets.values()],
            "bytes": {"weights": total(weights), "gradients": total(gradients), "momentum": total(momentum),
                      "buckets": total(buckets.values()),
                      "together": total([*weights, *gradients, *momentum, *buckets.values()])}}


def shard(rank):
    """Return how many of the transformer's parameters FSDP2 gives to `rank` of WORLD (no memory is taken)."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        model = transformer()
        for unit in model:
            fully_shard(unit, mesh=mesh)
        return sum(parameter.to_local().numel() for parameter in model.parameters())
    finally:
        dist.destroy_process_group()


def simulate():
    """Print as JSON what `play` and `shard` find for some of the ranks; this is the subprocess's whole work."""
    import contextlib

    from common import datasets

    datasets._fake = functools.cache(datasets._fake)  # the same bytes for each rank: made once, read by all
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        ranks = [play(rank, folder) for rank in PLAYED]
        refused = [play(0, folder, size)["refused"] for size in (BATCH + 8, 64 * WORLD)]
        shards = {rank: shard(rank) for rank in (PLAYED[0], PLAYED[-1])}
    print(json.dumps({"ranks": ranks, "refused": refused, "shards": shards}))


@functools.cache
def dealt_out():
    """Return the order of one process's samples in epoch 1, and what each of WORLD ranks has of them."""
    import torch
    from torch.utils.data import DistributedSampler, RandomSampler

    from common.datasets import mix

    samples = range(50_000)
    shares = []
    for rank in range(WORLD):
        sampler = DistributedSampler(samples, WORLD, rank, seed=mix(0), drop_last=True)
        sampler.set_epoch(1)
        shares.append(list(sampler))
    return list(RandomSampler(samples, generator=torch.Generator().manual_seed(mix(0) + 1))), shares  # as in train.py


def check_world(found):
    """Return what holds among WORLD ranks, from what `simulate` printed for a few; AssertionError where it does not.

    The ranks that did not run are DistributedSamplers that are told their rank; those that ran must equal theirs.
    """
    order, shares = dealt_out()
    val_samples = 10_000
    share = BATCH // WORLD
    steps = len(order) // BATCH
    for one in found["ranks"]:
        assert one["train"] == shares[one["rank"]] and one["share"] == share and one["steps"] == steps
        assert one["val"] == list(range(one["rank"], val_samples, WORLD))
    for step in range(steps):
        parts = [indices[step * share:(step + 1) * share] for indices in shares]
        dealt = [index for row in zip(*parts) for index in row]  # one of each rank, in turn
        assert dealt == order[step * BATCH:(step + 1) * BATCH], f"step {step} is not the single process's batch"
    validated = sorted(index for rank in range(WORLD) for index in range(rank, val_samples, WORLD))
    assert validated == list(range(val_samples))
    first = found["ranks"][0]
    assert all(one["bytes"] == first["bytes"] and one["buckets"] == first["buckets"] for one in found["ranks"])
    return {"processes": WORLD, "ranks": list(PLAYED), "batch_size": BATCH, "share": share, "steps": steps,
            "validation": len(validated), "bytes": first["bytes"], "buckets": first["buckets"],
            "refused": found["refused"], "shards": found["shards"]}


# --- what is shown ---------------------------------------------------------------------------------------------------

def time_of(seconds):
    """Return a time for people: 0.34 ms, 15.9 ms, 1.25 s."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def size_of(size):
    """Return a number of bytes for people: 480 kB, 4.05 GB."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def table(head, rows):
    """Return a Markdown table, all columns but the first to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def render(result):
    """Return the generated parts of docs/scaling.md, in their order, from what scaling.json holds."""
    found, tables, world = result["inputs"], result["tables"], result["world"]
    names = {"plain": "plain DDP", "accumulate": "4 micro-batches", "bf16": "bf16 gradients", "both": "both",
             "sharded": "FSDP2"}
    answer = table([f"at {WORLD:,} processes", *names.values()],
                   [[row, *(f"{values[key]:.0%}" if key in values else "-" for key in names)]
                    for row, values in tables["remedies"].items()])
    curves = table(["plain DDP, processes", *(f"{count:,}" for count in PROCESSES)],
                   [[row, *(f"{value:.0%}" for value in values)] for row, values in tables["efficiency"].items()])
    needed = table(["", "step assumed here", "8", "64", "1,024"],
                   [[row, time_of(found["models"][row.split(", ")[0]]["step_seconds"]), *map(time_of, values)]
                    for row, values in tables["ninety"].items()])
    heads = {"ddp_sgd": "DDP, SGD", "ddp_adam": "DDP, Adam", "fsdp_adam_8": "FSDP2, Adam, 8",
             "fsdp_adam_64": "64", "fsdp_adam_1024": "1,024"}
    memory = table(["", *heads.values()],
                   [[name, *(size_of(values[key]) + (" (!)" if values[key] > MEMORY else "") for key in heads)]
                    for name, values in tables["memory"].items()])

    where, models, cnn = found["machine"], found["models"], found["cnn_step"]
    count = {name: model["parameters"] for name, model in models.items()}
    rings = tables["rings_alone"]["1B transformer, 400 Gb/s a GPU"]
    inputs = "\n".join([
        f"- CNN: {count['CNN']:,} parameters, {size_of(4 * count['CNN'])} of gradients; {time_of(cnn['median'])} for a "
        f"step on {ASSUMED['cnn_images']} images of 3x32x32 (`measure`: median of {found['cnn_steps']}, "
        f"{time_of(cnn['lowest'])} to {time_of(cnn['highest'])}), one thread of {where['cpu']} ({where['vectors']}, "
        f"{where['cores']} cores, shared), torch {where['torch']}, {where['date']}. Backward takes "
        f"{found['cnn_backward_share']:.0%} of it; with one bucket that changes nothing.",
        f"- ResNet-50: {count['ResNet-50']:,} parameters, {size_of(4 * count['ResNet-50'])}; "
        f"{found['resnet50_flops_per_image'] / 1e9:.1f} GFLOP for forward and backward of one image of 224 pixels, "
        f"both counted on torchvision's model; {ASSUMED['resnet50_images']} images for each GPU.",
        f"- 1B transformer: {count['1B transformer']:,} parameters (18 layers of width 2,048, counted), "
        f"{size_of(4 * count['1B transformer'])}; 6 FLOP for each parameter and token ([Kaplan et al. 2020]"
        f"(https://arxiv.org/abs/2001.08361), section 2.1; attention's own products, 7 % more, are left out), "
        f"{ASSUMED['transformer_tokens']:,} tokens for each GPU. With rings alone, without trees, it would be at "
        f"{rings:.0%} on {WORLD:,} GPUs with 400 Gb/s each.",
    ])
    parts, shards = world["bytes"], list(world["shards"].values())
    simulated = "\n".join([
        f"- `train_DDP.main` ran as ranks {', '.join(map(str, world['ranks']))} of {world['processes']:,} with "
        f"`--dataset fake --batch-size {world['batch_size']}`: {world['share']} images in each of {world['steps']} "
        "steps.",
        f"- Their samplers equal those that are told their rank, and the shares of all {world['processes']:,} ranks, "
        "one image of each in turn, are the batches of `train.py`, image by image, in all "
        f"{world['steps']} steps. Each of the {world['validation']:,} samples for validation is on exactly one rank.",
        f"- What a rank keeps of the CNN: {parts['weights']:,} bytes of weights, {parts['gradients']:,} of gradients, "
        f"{parts['momentum']:,} of momentum, {parts['together']:,} together: 12 bytes for each parameter, since the "
        f"gradients are views into DDP's buckets. It sends {len(world['buckets'])} bucket in a step.",
        f"- Refused: {' and '.join(f'`{line}`' for line in world['refused'])}.",
        f"- FSDP2 gives {shards[0]:,} of the transformer's parameters to rank {PLAYED[0]} and {shards[1]:,} to rank "
        f"{PLAYED[-1]}; an even split would be {count['1B transformer'] / WORLD:,.0f}.",
    ])
    return [answer, curves, needed, memory, inputs, simulated]


def fill(page, parts):
    """Return the text of a page with the generated parts between its marks."""
    parts = iter(parts)
    page = re.sub(r"<!-- scaling -->\n.*?<!-- /scaling -->",
                  lambda _: f"<!-- scaling -->\n{next(parts)}\n<!-- /scaling -->", page, flags=re.S)
    assert next(parts, None) is None, "the page has fewer marks than there are parts"
    return page


def plot(result, path):
    """Draw the efficiency over the number of processes: a picture for each model, a line for each link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = result["inputs"]["models"]
    counts = [2 ** power for power in range(11)]
    figure, axes = pyplot.subplots(1, len(models), figsize=(11, 3.6), sharey=True, layout="constrained")
    for axis, (name, model) in zip(axes, models.items()):
        for colour, (where, link) in zip(("#c2691a", "#2f6fb3", "#2e8547"), LINKS.items()):
            if model["on_gpus"] or "GPU" not in where:
                axis.plot(counts, [efficiency(model, n, link) for n in counts], color=colour, label=where)
                axis.plot(counts, [efficiency(model, n, link, compress=2) for n in counts], color=colour, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 8, 64, 1024], ["1", "8", "64", "1,024"])
        axis.minorticks_off()
        axis.set_title(f"{name}, {time_of(model['step_seconds'])} a step")
        axis.set_xlabel("processes")
        axis.grid(alpha=0.3)
        axis.set_ylim(0, 1.03)
    axes[0].set_ylabel("efficiency, t(1) / t(p)")
    axes[-1].plot([], [], color="grey", linestyle=":", label="bf16 gradients")
    axes[-1].legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="from the inputs in scaling.json; measures nothing")
    parser.add_argument("--simulate", action="store_true", help="run some of the ranks here, and print what they did")
    parser.add_argument("--parameters", type=float, help="of your model; with --step: print its efficiency")
    parser.add_argument("--step", type=float, help="seconds of its step on one GPU")
    args = parser.parse_args()
    if (args.parameters is None) != (args.step is None):
        parser.error("--parameters and --step go together")
    if args.simulate:
        return simulate()
    if args.parameters:
        model = {"parameters": args.parameters, "step_seconds": args.step, "on_gpus": True}
        print(table(["GPUs", *PROCESSES], [[where, *(f"{efficiency(model, n, link):.0%}" for n in PROCESSES)]
                                           for where, link in LINKS.items()]))
        return
    if args.render:
        result = json.loads(RESULT.read_text())
    else:
        done = subprocess.run([sys.executable, __file__, "--simulate"], cwd=ROOT, stdout=subprocess.PIPE, check=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        result = {"inputs": measure(), "world": check_world(json.loads(done.stdout))}
    result["tables"] = compute(result["inputs"])
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(fill(PAGE.read_text(), render(result)))
    plot(result, RESULT.with_suffix(".png"))


if __name__ == "__main__":
    main()
