"""Place a transformer on a mesh of 1,024 simulated ranks with train_TP.py's plan, and count what meshes.py predicts.

    python -m benchmarks.scaling.placement        # prints what rank 0 holds, sends and saves, as JSON

The group is torch's fake one and the tensors have no data, so nothing is timed.
"""
import json
import warnings

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import train_TP
from benchmarks.scaling.meshes import CHECKED
from benchmarks.scaling.ranks import WORLD, fake_rank
from common import models, vit

TENSOR, TOKENS = 8, 1024  # no width has this size
ENDS = {"embedding": RowwiseParallel(input_layouts=Replicate()), "output": ColwiseParallel()}


class Transformer(nn.Sequential):
    """The blocks of --model vit, between an embedding and an output layer for the words of the 7B model."""

    def __init__(self, blocks: int, shape: dict) -> None:
        super().__init__()
        width, words = shape["width"], shape["vocabulary"]
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(vit.Block(width, width // 128) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, words, bias=False)


def play(rank: int, blocks: int) -> dict:
    """Train for one step as `rank` of shards x tensor; return what the rank holds, and what each collective counts."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    saved = {}

    def note(tensor):
        if TOKENS in tensor.shape:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            saved[storage._cdata] = storage  # and keep it, so that no other storage gets its address
        return tensor

    with fake_rank(rank):
        mesh = init_device_mesh("cpu", (WORLD // TENSOR, TENSOR), mesh_dim_names=("data", "tensor"))
        with torch.device("meta"):
            model = Transformer(blocks, CHECKED)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        plan = {name: style for name, style in train_TP.PLAN.items() if name.startswith("blocks")}
        parallelize_module(model, mesh["tensor"], plan | ENDS)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        for unit in [*models.blocks(model), model]:
            fully_shard(unit, mesh=mesh["data"], mp_policy=policy)
        with FakeTensorMode(allow_non_fake_inputs=True), CommDebugMode() as counted:
            model.to_empty(device="cpu")
            optimizer = torch.optim.Adam(model.parameters())
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = model(torch.zeros(1, TOKENS, dtype=torch.long)).sum()
            loss.backward()
            optimizer.step()
        state = [value for each in optimizer.state.values() for value in each.values() if value.ndim]
        held = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)] + state
        counts = {str(name).split(".")[1].strip("_"): number for name, number in counted.get_comm_counts().items()}
        return {"parameters": parameters, "held": sum(tensor.to_local().nbytes for tensor in held),
                "saved": sum(storage.nbytes() for storage in saved.values()), "counts": counts}


def check() -> dict:
    """Return what rank 0 holds with two blocks, and what one more block adds."""
    two, three = play(0, 2), play(0, 3)
    added = {name: three["counts"][name] - number for name, number in two["counts"].items()}
    return {"tensor": TENSOR, "parameters": three["parameters"], "held": three["held"], "block": added,
            "saved": (three["saved"] - two["saved"]) / TOKENS}


if __name__ == "__main__":
    print(json.dumps(check()))
