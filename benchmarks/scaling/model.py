"""Predict a training step's time on 1 to 1,024 processes from the model's size, its time on one, and the links."""
import json
import math

from benchmarks.tables import ROOT

PROCESSES, WORLD = [1, 2, 8, 16, 64, 256, 1024], 1024
NODE = 8  # GPUs per host
FLOPS = 989e12 * 0.4  # the bfloat16 peak of an H100, and the fraction that training reaches: see docs/scaling.md
BUCKET = 25 * 2 ** 20  # bytes: DistributedDataParallel's bucket_cap_mb
LINKS = {  # bytes/s into and out of one host, and seconds per hop; docs/scaling.md cites the sources
    "10 Gb/s per host": {"bandwidth": 10e9 / 8, "latency": 50e-6},
    "100 Gb/s per host": {"bandwidth": 100e9 / 8, "latency": 14e-6},
    "400 Gb/s per GPU": {"bandwidth": NODE * 400e9 / 8, "latency": 14e-6}}
NVLINK = {"bandwidth": 450e9, "latency": 3.4e-6}  # bytes/s in each direction between the GPUs of one host
TCP_LATENCY = 50e-6  # gloo's latency, at any bandwidth
BACKWARD = 2 / 3  # fraction of a step
STEP = json.loads((ROOT / "benchmarks/results/step-amd-epyc-digits-cnn.json").read_text())
RESNET_FLOP = 24.3e9  # forward and backward of one 224x224 image, counted
MODELS = {  # a step takes 128 images on each CNN process, 256 images on each GPU, or 8 * 2,048 tokens
    "CNN": {"parameters": 84_778, "on_gpus": False,
            "step_seconds": STEP["steps"]["as in the scripts"]["milliseconds"]["median"] / 1000},
    "ResNet-50": {"parameters": 25_557_032, "on_gpus": True, "step_seconds": 256 * RESNET_FLOP / FLOPS},
    "1B transformer": {"parameters": 1_013_669_888, "on_gpus": True, "units": 21,  # 3 at the ends, 18 layers
                       "step_seconds": 6 * 1_013_669_888 * 8 * 2048 / FLOPS}}  # arXiv:2001.08361, section 2.1
REMEDIES = {"plain DDP": {}, "4 micro-batches": {"micro_batches": 4}, "bf16 gradients": {"compress": 2},
            "both": {"micro_batches": 4, "compress": 2}}


def ring(count: int, size: float, bandwidth: float, latency: float) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes over `count` members."""
    return 2 * (count - 1) / count * size / bandwidth + 2 * (count - 1) * latency


def tree(count: int, size: float, bandwidth: float, latency: float) -> float:
    """Return the seconds of a double binary tree: few hops, and each member sends all the bytes up and down."""
    return 2 * size / bandwidth + 2 * math.ceil(math.log2(count)) * latency


def all_reduce(processes: int, size: float, link: dict, on_gpus=True, trees=True, groups=1) -> float:
    """Return the seconds of an all-reduce of `size` bytes: one ring on CPUs; on GPUs, within hosts, then across.

    Across hosts, each GPU sends 1 / NODE of the bytes at the same time: together `size` bytes, over the host's share
    of the link. NCCL uses a tree if that is faster than the ring; gloo has only the ring. With `groups`,
    that many groups of `processes` processes share each host, and each reduces `size` bytes at the same time.
    """
    if not on_gpus:
        return ring(processes, size, link["bandwidth"], TCP_LATENCY)
    local, ways = min(processes, NODE // groups), (ring, tree) if trees else (ring,)
    hosts = processes // local
    across = min(way(hosts, groups * size, **link) for way in ways) if hosts > 1 else 0
    return ring(local, size, **NVLINK) + across


def bucket_time(model: dict, processes: int, link: dict, compress=1, trees=True) -> tuple[int, float]:
    """Return the number of DDP's buckets and the seconds of one bucket's all-reduce."""
    buckets = max(1, math.ceil(4 * model["parameters"] / BUCKET))
    size = 4 * model["parameters"] / compress / buckets
    return buckets, all_reduce(processes, size, link, model["on_gpus"], trees)


def step_time(model: dict, processes: int, link: dict, micro_batches=1, **options) -> float:
    """Return the seconds of one optimizer step of a model under DDP.

    Buckets fill evenly during the backward pass, and DDP sends one after another while that pass continues. The last
    one is full when the pass ends, so nothing hides its all-reduce.
    """
    seconds = model["step_seconds"]
    if processes == 1:
        return micro_batches * seconds
    buckets, one = bucket_time(model, processes, link, **options)
    computed = BACKWARD * seconds / buckets  # seconds of the backward pass per bucket
    last = (1 - BACKWARD) * seconds + computed + (buckets - 1) * max(computed, one) + one
    return (micro_batches - 1) * seconds + last


def sharded_pass(units: int, seconds: float, gather: float, scatter=0.0) -> float:
    """Return the seconds of FSDP2's forward or backward pass of `units` layers that compute for `seconds` in total.

    All but the first gather and the last scatter overlap with the computation of another unit.
    """
    return gather + (units - 1) * max(seconds / units, gather + scatter) + seconds / units + scatter


def sharded_step_time(model: dict, processes: int, link: dict) -> float:
    """Return the seconds of one step under FSDP2: a gather in forward, a gather and a scatter in backward.

    Each of these takes half the time of a ring all-reduce: NCCL has no tree for them across multi-GPU hosts.
    """
    seconds, units = model["step_seconds"], model["units"]
    half = all_reduce(processes, 4 * model["parameters"] / units, link, trees=False) / 2
    return sharded_pass(units, (1 - BACKWARD) * seconds, half) + sharded_pass(units, BACKWARD * seconds, half, half)


def shortest_step(model: dict, processes: int, link: dict, wanted=0.9) -> float:
    """Return the seconds of computation per step that plain DDP needs for an efficiency of `wanted`."""
    buckets, one = bucket_time(model, processes, link)
    behind = buckets * one / (1 / wanted - (1 - BACKWARD) - BACKWARD / buckets)  # if sending is slower than backward
    return max(one / (1 / wanted - 1), behind)


def efficiency(model: dict, processes: int, link: dict, micro_batches=1, **options) -> float:
    """Return t(1) / t(p) in weak scaling: every process has the same work at any number of processes."""
    return micro_batches * model["step_seconds"] / step_time(model, processes, link, micro_batches, **options)
