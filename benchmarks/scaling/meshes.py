"""Predict a transformer's step on a mesh of GPUs: FSDP2 shards x tensor parallel x pipeline stages."""
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.scaling.model import FLOPS, LINKS, NODE, NVLINK, all_reduce, ring, sharded_pass

BATCH = 2 ** 22  # tokens of a step over all GPUs, as for Llama 2
GPUS = [8, 64, 256, 1024]
LIMIT = 72e9  # bytes: assumes that CUDA, NCCL and fragmentation take the rest of 80 GB
SUMS = 2, 2  # all-reduces of a block in forward and backward under train_TP.py's plan
MODELS = {  # `keys`: the width of keys and values; `gated`: an MLP of three matrices
    "1B": {"parameters": 1_013_669_888, "layers": 18, "width": 2048, "keys": 2048, "hidden": 8192, "gated": False,
           "vocabulary": 50304, "sequence": 2048},
    "7B": {"parameters": 6_738_415_616, "layers": 32, "width": 4096, "keys": 4096, "hidden": 11008, "gated": True,
           "vocabulary": 32000, "sequence": 4096},
    "70B": {"parameters": 68_976_648_192, "layers": 80, "width": 8192, "keys": 1024, "hidden": 28672, "gated": True,
            "vocabulary": 32000, "sequence": 4096}}

PUBLISHED = {"parameters": 8_030_261_248, "layers": 32, "width": 4096, "keys": 1024, "hidden": 14336, "gated": True,
             "vocabulary": 128_256, "sequence": 8192}  # Llama 3.1 8B


class Plan(NamedTuple):
    """A mesh, the sequences of a micro-batch, and whether backward() recomputes the blocks' activations."""
    data: int
    tensor: int
    stages: int
    sequences: int = 1
    recompute: bool = False

    def share(self, model: dict) -> tuple[int, int, int, float]:
        """Return a micro-batch's tokens, their number per step, and the layers and parameters of a GPU's stage."""
        tokens = self.sequences * model["sequence"]
        return (tokens, BATCH // tokens // self.data, model["layers"] // self.stages,
                model["parameters"] / self.stages / self.tensor)


def bubble(stages: int, micro_batches: int) -> float:
    """Return the fraction of a step in which a stage of a 1F1B pipeline waits."""
    return (stages - 1) / (micro_batches + stages - 1)


def saved(model: dict, tensor: int) -> float:
    """Return the bytes that one block saves per token for backward(), in bfloat16 and without dropout.

    Whole on each GPU: the inputs of the norms and what they return. Split: queries, keys, values, the attention's
    output, and in the MLP, what the activation function reads and returns; a gate adds two more.
    """
    split = 4 * model["width"] + 4 * model["keys"] + (8 if model["gated"] else 4) * model["hidden"]
    return 8 * model["width"] + split / tensor


def memory(model: dict, plan: Plan) -> float:
    """Return the bytes of a GPU of the first or the last stage, whichever needs more."""
    tokens, micro_batches, layers, own = plan.share(model)
    block, kept = tokens * saved(model, plan.tensor), 2 * tokens * model["width"] if plan.recompute else 0
    stage, once = (layers * kept, block) if plan.recompute else (layers * block, 0)
    flight = min(plan.stages, micro_batches)  # micro-batches of which the first stage keeps the activations
    logits = 4 * tokens * model["vocabulary"] / plan.tensor
    # gathered: weights 2 bytes; gradients 4, or, before the first reduction, 2 and a buffer of 4
    gathered = 6 * own if plan.stages > 1 else (2 * 2 + 2 + 4) * own / layers
    return 16 * own / plan.data + gathered + once + max(flight * stage, stage + logits)


def step_time(model: dict, plan: Plan, link: dict) -> float:
    """Return the seconds of one optimizer step."""
    tokens, micro_batches, layers, own = plan.share(model)
    size = 2 * tokens * model["width"]  # bytes of the activations between two layers
    sums = [layers * count * ring(plan.tensor, size, **NVLINK) for count in SUMS]
    forward = 2 * own * tokens / FLOPS + sums[0]
    backward = 4 * own * tokens / FLOPS + sums[1] + (forward if plan.recompute else 0)
    gather, scatter = (all_reduce(plan.data, bytes_ * own / layers, link, trees=False, groups=plan.tensor) / 2
                       for bytes_ in (2, 4))  # bfloat16 weights, float32 gradients
    if plan.stages == 1:  # each micro-batch gathers and scatters
        return micro_batches * (sharded_pass(layers, forward, gather) + sharded_pass(layers, backward, gather, scatter))
    apart = plan.data * plan.tensor  # GPUs between neighboring stages; stages of one host send at the same time
    one_host = apart * plan.stages <= NODE
    send = (size / NVLINK["bandwidth"] + NVLINK["latency"] if one_host
            else min(NODE, apart) * size / link["bandwidth"] + link["latency"])
    busy = micro_batches * (forward + backward + 2 * send)
    return (busy / (1 - bubble(plan.stages, micro_batches)) + sharded_pass(layers, forward, gather) - forward
            + sharded_pass(layers, backward, 0, scatter) - backward)


def efficiency(model: dict, plan: Plan, link: dict) -> float:
    """Return the time of the computation alone, without recomputing, relative to the step's."""
    gpus = plan.data * plan.tensor * plan.stages
    return 6 * model["parameters"] * BATCH / gpus / FLOPS / step_time(model, plan, link)


def plans(model: dict, gpus: int) -> Iterator[Plan]:
    """Yield all plans in powers of two: tensor groups within a host, and a micro-batch per stage or more."""
    powers = [2 ** power for power in range(12)]
    for tensor in powers[:4]:
        for stages in (count for count in powers if tensor * count <= gpus and model["layers"] % count == 0):
            data = gpus // tensor // stages
            for sequences in powers:
                if stages * sequences * data * model["sequence"] <= BATCH:
                    yield from (Plan(data, tensor, stages, sequences, recompute) for recompute in (False, True))


def choose(model: dict, gpus: int, link: dict) -> dict[str, dict]:
    """Return the fastest plan that fits of each kind, or the smallest one if none fits."""
    best: dict[str, dict] = {}
    for plan in plans(model, gpus):
        kind = "FSDP2" + ", TP" * (plan.tensor > 1) + ", PP" * (plan.stages > 1)
        found = {"plan": plan, "bytes": memory(model, plan), "efficiency": efficiency(model, plan, link)}
        found["fits"] = found["bytes"] <= LIMIT
        if kind not in best or rank(found) > rank(best[kind]):
            best[kind] = found
    return best


def rank(found: dict) -> tuple[bool, float]:
    return found["fits"], found["efficiency"] if found["fits"] else -found["bytes"]


def torchtitan() -> dict[str, float]:
    """Return the speed of 128 GPUs relative to 8, and how many GiB less each needs, for Llama 3.1 8B."""
    few, many = Plan(8, 1, 1, sequences=2), Plan(128, 1, 1, sequences=2)
    speed = [efficiency(PUBLISHED, plan, LINKS["400 Gb/s per GPU"]) for plan in (few, many)]
    less = memory(PUBLISHED, few) - memory(PUBLISHED, many)
    return {"speed": speed[1] / speed[0], "less": less / 2 ** 30}
