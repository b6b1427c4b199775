"""Low-rank adapters (LoRA, arXiv:2106.09685): add them to a model, export them for peft, or merge them into weights.

    python -m language.lora runs/best.pt FOLDER
    python -m language.lora runs/best.pt merged.pt --weights PATH

The first command writes adapter_config.json and adapter_model.safetensors, which `peft` loads. The second adds the
adapters to the weights in PATH, the --weights of the training, and writes a file for --weights and for language.llama.
"""
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common import checkpoint, cli
from common.errors import UsageError

from . import llama

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Adapters(nn.Module):
    """Gives each linear layer named in `targets` two matrices: its output is now W x + alpha / rank * B A x.

    This module has only these matrices, under the names that they have in the model. Every process draws all of them,
    from the seed alone. They are in float32, whatever the model's type is.
    """

    def __init__(self, model: nn.Module, rank: int, alpha: float, targets: list[str], seed: int) -> None:
        super().__init__()
        generator, weights = torch.Generator().manual_seed(seed), []
        for name, layer in [*model.named_modules()]:
            if name.rpartition(".")[2] in targets and isinstance(layer, nn.Linear):
                layer.lora_A = nn.Linear(layer.in_features, rank, bias=False)
                layer.lora_B = nn.Linear(rank, layer.out_features, bias=False)
                bound = layer.in_features ** -0.5  # as peft does
                nn.init.uniform_(layer.lora_A.weight, -bound, bound, generator)
                nn.init.zeros_(layer.lora_B.weight)  # so the model starts as it was
                layer.register_forward_hook(functools.partial(add, alpha / rank))
                weights.append(layer.weight)
                place: Any = self
                for word in name.split("."):
                    if not hasattr(place, word):
                        place.add_module(word, nn.Module())
                    place = getattr(place, word)
                place.lora_A, place.lora_B = layer.lora_A, layer.lora_B
        self.about = {"rank": rank, "alpha": alpha, "targets": sorted(targets), "base": digest(weights)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.about

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state | {"base": ""} != self.about | {"base": ""}:
            raise UsageError(f"--resume: its adapters have --rank {state['rank']} --alpha {state['alpha']:g} --targets "
                             f"{' '.join(state['targets'])}; pass these")
        if state != self.about:
            raise UsageError("--resume: pass the --weights with which its adapters were trained")


def add(scale: float, layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """A forward hook: return the layer's output with its adapter's."""
    return output + layer.lora_B(layer.lora_A(*inputs) * scale)


def digest(weights: Iterable[Tensor]) -> str:
    """Return a hash of the first 100 numbers of each tensor, rounded to bfloat16."""
    first = [weight.detach().flatten()[:100].bfloat16() for weight in weights if not weight.is_meta]
    return hashlib.sha256(b"".join(part.view(torch.int16).numpy().tobytes() for part in first)).hexdigest()[:16]


def main() -> None:
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("checkpoint", help="a file that train_LoRA.py wrote")
    parser.add_argument("output", help="a folder for peft or, with --weights, a file for the merged weights")
    parser.add_argument("--weights", metavar="PATH", help="merge into these weights, those of the training")
    args = parser.parse_args()
    adapters = checkpoint.load_file("checkpoint", args.checkpoint).get("model", {})
    about = adapters.pop("_extra_state", None)
    if not about:
        raise UsageError(f"{args.checkpoint}: contains no adapters; train_LoRA.py writes them")
    layers = [name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")]
    rank = len(adapters[f"{layers[0]}.lora_A.weight"])
    if args.weights:
        published = Path(args.weights).is_dir() or args.weights.endswith(".safetensors")
        weights: Any = llama.read(args.weights) if published else checkpoint.load_file("--weights", args.weights)
        weights = weights.get("model", weights)
        if digest(weights[f"{name}.weight"] for name in layers if f"{name}.weight" in weights) != about["base"]:
            raise UsageError(f"--weights {args.weights}: not the weights with which the adapters were trained")
        for name in layers:
            product = adapters[f"{name}.lora_B.weight"] @ adapters[f"{name}.lora_A.weight"]
            weights[f"{name}.weight"] = weights[f"{name}.weight"].float() + about["alpha"] / rank * product
        checkpoint.save_checkpoint(args.output, {"model": weights})
    else:
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": about["alpha"],
                  "target_modules": sorted({name.rpartition(".")[2] for name in layers})}
        named = {f"base_model.model.{name}": tensor for name, tensor in adapters.items()}
        llama.write(args.output, {"adapter_config.json": config}, {"adapter_model.safetensors": named})
    print(f"{args.output}: {len(layers)} adapters of rank {rank}")


if __name__ == "__main__":
    with cli.report_errors():
        main()
