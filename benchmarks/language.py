"""Compare language/train.py with nanoGPT's train.py: their speed and the loss that they reach, interleaved in one run.

    git clone https://github.com/karpathy/nanoGPT
    python -m benchmarks.language nanoGPT --threads 1                            # ten minutes on a busy core

Both train on the bytes of Python's standard library, in float32, with equally many parameters, windows of 64 tokens,
batches of 12 windows as in nanoGPT's README for a CPU, and steps. nanoGPT trains once with the
rates of its config/train_shakespeare_char.py and once with those of language/train.py. In each round, each of them
trains for one epoch of language/train.py while the others are paused. At the end, the benchmark computes the loss of
each model on language/train.py's validation windows, and counts the operators that one block of each model needs.
"""
import json
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from benchmarks import measure
from benchmarks.tables import ROOT, language_table, path_of, ratio, save, spread
from common import cli, devices
from common.checkpoint import load_file
from common.errors import UsageError
from language import gpt, llama, text

SIZE = gpt.Size(128, 4, 4, 2, 384)  # each layer has as many parameters as nanoGPT's
LIKE = {"n_layer": SIZE.layers, "n_head": SIZE.heads, "n_embd": SIZE.width, "dropout": 0.0, "compile": False}
RATES = {"nanoGPT": {"learning_rate": 1e-3, "min_lr": 1e-4, "warmup_iters": 100, "beta2": 0.99},
         "nanoGPT, rates of language/train.py": {"learning_rate": 2e-3, "min_lr": 2e-5, "warmup_iters": 50,
                                                 "beta2": 0.95}}
ITERATION = re.compile(r"iter \d+: loss [\d.]+, time ([\d.]+)ms")


def read_iterations(steps: int, tokens: int, lines: Iterable[str]) -> Iterator[dict[str, float]]:
    """Yield the seconds and the speed of each `steps` iterations in nanoGPT's output, with `tokens` each."""
    seconds: list[float] = []
    for match in filter(None, map(ITERATION.match, lines)):
        seconds.append(float(match[1]) / 1000)
        if len(seconds) == steps:
            yield {"seconds": sum(seconds), "speed": steps * tokens / sum(seconds)}
            seconds = []


@torch.no_grad()
def loss_of(forward: Callable[[Tensor], Tensor], windows: text.Windows) -> float:
    """Return the mean loss over all windows."""
    return torch.stack([gpt.loss(forward(inputs[None]), targets[None]) for inputs, targets in
                        (windows[index] for index in range(len(windows)))]).mean().item()


class Operators(TorchDispatchMode):
    """Counts the operators that compute or copy; `products` and `casts` are among `all`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not function.is_view and name not in ("_unsafe_view", "detach"):
            self.counts.update(["all"] + ["products"] * (name == "mm") + ["casts"] * (name == "_to_copy"))
        return function(*args, **kwargs or {})


def count_operators(build: Callable[[int], torch.nn.Module], loss: Callable[[torch.nn.Module], Tensor]
                    ) -> dict[str, dict[str, int]]:
    """Return the numbers of operators of one block on a CPU: {"float32, forward": {"all": 29, ...}, ...}.

    These are the numbers by which `build(2)`, a model with two blocks, needs more than `build(1)`.
    """
    counts: list[dict[str, Counter[str]]] = []
    for model in (build(1), build(2)):
        counts.append({})
        for name, lower in (("float32", False), ("bfloat16 by autocast", True)):
            with Operators() as forward, torch.autocast("cpu", torch.bfloat16, enabled=lower):
                result = loss(model)
            with Operators() as backward:
                result.backward()
            counts[-1] |= {f"{name}, forward": forward.counts, f"{name}, backward": backward.counts}
    one, two = counts
    return {name: {kind: two[name][kind] - one[name][kind] for kind in ("all", "products", "casts")} for name in one}


def load_nanogpt(file: Path) -> torch.nn.Module:
    """Return the model that nanoGPT's train.py saved in `file`."""
    from model import GPT, GPTConfig

    content = load_file("nanoGPT's", file)
    model = GPT(GPTConfig(**content["model_args"]))
    model.load_state_dict(content["model"])
    return model.eval()


def compare_operators(batch_size: int, length: int) -> dict[str, dict[str, dict[str, int]]]:
    """Return the numbers of operators of a block of language/train.py and of nanoGPT."""
    from model import GPT, GPTConfig

    tokens = torch.randint(text.BYTES, (batch_size, length))
    config = {"block_size": length, "vocab_size": text.BYTES, "n_head": SIZE.heads, "n_embd": SIZE.width,
              "dropout": 0.0, "bias": False}
    return {"language/train.py": count_operators(lambda layers: gpt.GPT(SIZE._replace(layers=layers), text.BYTES),
                                           lambda model: gpt.loss(model(tokens), tokens)),
            "nanoGPT": count_operators(lambda layers: GPT(GPTConfig(n_layer=layers, **config)),
                                       lambda model: model(tokens, tokens)[1])}


def main() -> None:
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("checkout", type=Path, help="a clone of nanoGPT")
    parser.add_argument("--epochs", type=cli.positive_int, default=6, help="of ours; one more than the rounds")
    parser.add_argument("--batch-size", type=cli.positive_int, default=12, help="windows per step")
    parser.add_argument("--length", type=cli.positive_int, default=64, help="tokens in a window")
    parser.add_argument("--windows", type=cli.positive_int, default=1680, help="windows in an epoch")
    parser.add_argument("--threads", type=cli.positive_int, help="of each (default: torch's)")
    parser.add_argument("--device", default="cpu", help="for both")
    args = parser.parse_args()
    if not (args.checkout / "configurator.py").exists():
        raise UsageError(f"{args.checkout}: not a clone of nanoGPT")
    sys.path.insert(0, str(args.checkout))  # for nanoGPT's model.py
    folder, steps = ROOT / "runs/language", args.windows // args.batch_size
    sets = text.create_datasets("stdlib", "", args.length, args.windows, 0)
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    for part, windows in zip(("train", "val"), sets):  # the tokens, as nanoGPT reads them
        windows.tokens.astype("uint16").tofile(folder / f"tokens/{part}.bin")
    (folder / "tokens/meta.pkl").write_bytes(pickle.dumps({"vocab_size": text.BYTES}))
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/config.json").write_text(json.dumps(llama.config(SIZE, text.BYTES)))
    ours = {"epochs": args.epochs, "batch-size": args.batch_size, "length": args.length, "windows": args.windows,
            "device": args.device, "model": folder / "model", "sample": "", "output-dir": folder / "ours"}
    iterations = args.epochs * steps
    theirs = LIKE | {
        "dataset": folder / "tokens", "device": args.device, "dtype": "float32", "gradient_accumulation_steps": 1,
        "batch_size": args.batch_size, "block_size": args.length, "max_iters": iterations, "lr_decay_iters": iterations,
        "eval_interval": iterations, "eval_iters": 1}
    where = measure.machine(devices.select_device(args.device), "language", "common", "benchmarks/*.py")
    tokens = args.batch_size * args.length
    contenders, files = {}, {}
    try:
        words = [word for name, value in ours.items() for word in (f"--{name}", str(value))]
        command = measure.launch(0, "language.train", *words)
        contenders["language/train.py"] = measure.Contender(command, steps * tokens, args.threads)
        for name, rates in RATES.items():
            files[name] = folder / name / "ckpt.pt"
            options = [f"--{key}={value}" for key, value in (theirs | rates | {"out_dir": files[name].parent}).items()]
            contenders[name] = measure.Contender([sys.executable, "train.py", *options], steps * tokens, args.threads,
                                                 args.checkout, partial(read_iterations, steps, tokens))
        for _, name in tqdm(measure.in_turns(list(contenders), args.epochs - 1), "turns", disable=None):
            contenders[name].turn(1, long=0)
            tqdm.write(f"{name}: {contenders[name].speeds[-1]:,.0f} tokens/s")
        for contender in contenders.values():
            contender.finish()
    finally:
        for contender in contenders.values():
            contender.end()
    models = {"language/train.py": gpt.GPT(SIZE, text.BYTES)}
    models["language/train.py"].load_state_dict(load_file("language/train.py's", folder / "ours/last.pt")["model"])
    models |= {name: load_nanogpt(file) for name, file in files.items()}
    losses = {name: loss_of(model if name == "language/train.py" else lambda x, model=model: model(x, x)[0], sets[1])
              for name, model in models.items()}
    speeds = {name: contender.speeds for name, contender in contenders.items()}
    found = {"machine": where, "arguments": {
        **{name: str(value) if name == "checkout" else value for name, value in vars(args).items()},
        "dataset": "stdlib", "model": "0.8 million parameters"}, "threads": args.threads or torch.get_num_threads(),
        "losses": contenders["language/train.py"].losses,
        "operators": compare_operators(args.batch_size, args.length), "table": {name: {
            "parameters": sum(parameter.numel() for parameter in model.parameters()), "val_loss": losses[name],
            "tokens_per_second": spread(speeds[name]), "turns": speeds[name],
            "relative": ratio(speeds["language/train.py"], speeds[name])} for name, model in models.items()}}
    save(path_of("language", where, "stdlib", str(args.batch_size), str(args.length)), found)
    print(language_table(found))


if __name__ == "__main__":
    with cli.report_errors():
        main()
