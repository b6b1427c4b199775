"""Hugging Face's format for Llama: load published weights, and export a checkpoint for transformers.

    python -m language.llama runs/last.pt FOLDER --model gpt_tiny

This command writes config.json and model.safetensors, the files that
`transformers.AutoModelForCausalLM.from_pretrained("FOLDER")` loads.
"""
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import checkpoint, cli, models
from common.errors import UsageError, reason

from . import gpt

FIELDS = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads",
          "num_key_value_heads": "groups", "intermediate_size": "hidden", "tie_word_embeddings": "tied",
          "rope_theta": "base"}  # names in config.json and in gpt.Size
FIXED = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False,
         "rope_scaling": None}
DEFAULTS = {"tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
            "mlp_bias": False, "eos_token_id": None}  # those of transformers' LlamaConfig
CHOICES = f"{', '.join(gpt.SIZES)}, or a folder with the config.json of a Llama"


def size(name: str) -> gpt.Size:
    """Return the size of --model `name`: one of gpt.SIZES, or a folder whose config.json describes a Llama.

    Raises UsageError, naming the first field that differs, if `gpt.GPT` cannot compute what this Llama computes.
    """
    if name in gpt.SIZES:
        return gpt.SIZES[name]
    if not Path(name).is_dir():
        raise UsageError(f"--model {name}: choose {CHOICES}")
    found = _read_config(Path(name))
    end = found["eos_token_id"]
    try:
        made = gpt.Size(**{ours: found[field] for field, ours in FIELDS.items()}, vocabulary=found["vocab_size"],
                        end=end if isinstance(end, int) else None)
    except KeyError as missing:
        raise UsageError(f"--model {name}: its config.json has no {missing}") from None
    _require_equal(f"--model {name}", found, config(made, found["vocab_size"]))
    return made


def load_weights(model: gpt.GPT, path: str) -> None:
    """Load weights as models.load_weights does; `path` may also be a .safetensors file, or a folder of such files.

    Raises UsageError if a config.json in this folder does not fit the model, naming the first field that differs.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if folder != Path(path) and not path.endswith(".safetensors"):
        return models.load_weights(model, path)
    if (folder / "config.json").exists():
        wanted = config(model.size, len(model.model.embed_tokens.weight))
        _require_equal(f"--weights {path}", _read_config(folder), wanted, f"; try --model {folder}")
    models.load_weights(model, path, read(path))


def config(size: gpt.Size, vocabulary: int) -> dict[str, Any]:
    """Return the content of config.json, for a model with `vocabulary` rows in its embedding."""
    return {field: getattr(size, ours) for field, ours in FIELDS.items()} | FIXED | {
        "vocab_size": vocabulary, "head_dim": size.width // size.heads}


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a config.json in the form of config(), with transformers' defaults for missing fields."""
    try:
        found = DEFAULTS | json.loads((folder / "config.json").read_text())
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}  # in transformers 5 and in 4
        plain = rope.get("rope_type", rope.get("type", "default")) == "default"
        return {"num_key_value_heads": found["num_attention_heads"], "rope_theta": rope.get("rope_theta", 10000.0),
                "head_dim": found["hidden_size"] // found["num_attention_heads"]} | found | {
                    "rope_scaling": None if plain else rope}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder / 'config.json'}: {reason(error)}") from None


def _require_equal(option: str, found: dict[str, Any], wanted: dict[str, Any], hint: str = "") -> None:
    for field, value in wanted.items():
        if found.get(field) != value:
            raise UsageError(f"{option}: its config.json has {field} {found.get(field)}, not the model's {value}{hint}")


def _library(option: str) -> Any:
    try:
        import safetensors.torch  # not at the top: an optional package

        return safetensors
    except ImportError:
        raise UsageError(f"{option}: needs the package safetensors: pip install safetensors") from None


def read(path: str) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file, or of all such files in a folder."""
    library, index = _library(f"--weights {path}"), Path(path, "model.safetensors.index.json")
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        files = sorted(Path(path, name) for name in names) if Path(path).is_dir() else [path]
        return {name: tensor for file in files for name, tensor in library.torch.load_file(file).items()}
    except (OSError, ValueError, KeyError, library.SafetensorError) as error:
        raise UsageError(f"--weights {path}: {reason(error)}") from None


def write(folder: str, described: dict[str, dict[str, Any]], tensors: dict[str, dict[str, Tensor]]) -> None:
    """Write the contents of JSON and of .safetensors files, by their names, into a folder."""
    library = _library(folder)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in described.items():
            Path(folder, name).write_text(json.dumps(content, indent=2) + "\n")
        for name, content in tensors.items():
            library.torch.save_file(content, Path(folder, name), {"format": "pt"})
    except (OSError, library.SafetensorError) as error:
        raise UsageError(f"{folder}: {reason(error)}") from None


def main() -> None:
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("checkpoint", help="a file that a script of this folder wrote")
    parser.add_argument("folder", help="where to write the two files")
    parser.add_argument("--model", type=size, default="gpt_tiny", help="as in training")
    args = parser.parse_args()
    content = checkpoint.load_file("checkpoint", args.checkpoint)
    weights = content.get("model", content)
    rows = len(weights.get("model.embed_tokens.weight", ()))
    with torch.device("meta"):
        wanted = gpt.GPT(args.model, rows).state_dict()
    if {name: tensor.shape for name, tensor in weights.items()} != {name: each.shape for name, each in wanted.items()}:
        raise UsageError(f"{args.checkpoint}: its tensors are not those of this --model")
    described = config(args.model, rows) | {"architectures": ["LlamaForCausalLM"], "dtype": "float32",
                                            "bos_token_id": None, "eos_token_id": args.model.end}
    write(args.folder, {"config.json": described}, {"model.safetensors": weights})
    print(f"{args.folder}: {len(weights)} tensors")


if __name__ == "__main__":
    with cli.report_errors():
        main()
