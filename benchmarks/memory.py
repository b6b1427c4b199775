"""Measure the memory of each process of a script, in bytes of tensors, and the peak in a training step.

    python -m benchmarks.memory                                             # vit_base
    python -m benchmarks.memory --model vit --processes 2 --scripts train_DDP.py train_FSDP.py
    python -m benchmarks.memory --model gpt_124m --batch-size 4 --length 128 1024     # the meshes of the language model

The benchmark launches each script on a CPU, follows the storage of every tensor, and ends the launch after the third
step. It reports the peak of the third step: momentum and DDP's final buckets exist only after the first two. The
benchmark also prints rank 0's peak while the script creates the model, until it could resume from a checkpoint. The
resident set size would also count torch itself and memory that the allocator keeps. What a kernel or gloo allocates
internally is not counted. `python -m benchmarks.compare --show` writes the table into docs/speed.md.
"""
import gc
import itertools
import runpy
import sys
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from benchmarks import measure
from benchmarks.tables import ROOT, memory_table, path_of, save
from common import checkpoint, cli, models
from common.reduce import get_world_size
from language import gpt, text

SCRIPTS = ["train_DDP.py", "train_FSDP.py", "train_TP.py", "train_PP.py"]
MESHES = {"language/train.py": [1], "language/train_DDP.py": [2, 4], "language/train_TP.py --tensor-parallel 1": [2, 4],
          "language/train_TP.py --tensor-parallel 2": [2, 4]}  # scripts and processes for the language model
STEPS = 3


class Storages(TorchDispatchMode):
    """Follow the storages of all tensors that this thread creates, in backward passes too, and their peak in bytes."""

    def __init__(self):
        super().__init__()
        self.numbers, self.live, self.peak = itertools.count(), {}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the subclass then calls the function again, with its local tensors
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.number(value)
        held = self.sizes()
        if sum(held.values()) > sum(self.peak.values()):
            self.peak = held
        return result

    def number(self, tensor: torch.Tensor) -> int | None:
        """Add a tensor's storage to `live` and return the storage's number; return None for a tensor without data."""
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.device.type == "meta":
            return None
        if not hasattr(storage, "number"):
            storage.number = next(self.numbers)
            self.live[storage.number] = weakref.ref(storage, lambda _, number=storage.number: self.live.pop(number))
        return storage.number

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each live storage; FSDP2 frees weights by resizing their storage to 0."""
        storages = {number: reference() for number, reference in list(self.live.items())}
        return {number: storage.nbytes() for number, storage in storages.items() if storage is not None}


def divide(sizes: dict[int, int], parts: dict[str, set[int]]) -> dict[str, int]:
    """Return the bytes of each part; a storage counts only in the first part that has it, or else as "other"."""
    sizes = dict(sizes)
    return {name: sum(sizes.pop(number, 0) for number in numbers) for name, numbers in parts.items()} | {
        "other": sum(sizes.values())}


def predict(size: gpt.Size, script: str, processes: int, batch_size: int, length: int) -> dict[str, int]:
    """Return the bytes that a process of a language script holds and its peak, by the formula of docs/scaling.md."""
    with torch.device("meta"):
        model = gpt.GPT(size, text.GPT2)
    parameters, rows = sum(each.numel() for each in model.parameters()), len(model.model.embed_tokens.weight)
    tensor = int(script.split()[-1]) if "tensor" in script else 1
    numbers = size.layers * ((9 * size.width + 4 * size.hidden) // tensor + 2 * size.width) + 3 * rows // tensor
    tokens, shards = batch_size * length * tensor // processes, processes if "TP" in script else 1
    held = 16 * parameters // shards
    embedding, kind = 4 * rows * size.width // tensor, script.split()[0][14:-3]
    at_loss = held * (4 if kind == "_DDP" else 3) // 4 + 4 * numbers * tokens + (kind == "_TP") * embedding
    return {"held": held, "peak": max(at_loss, held + {"": 2, "_DDP": 3, "_TP": 4}[kind] * embedding)}


def watch(script: str, *arguments: str) -> None:
    """Run a script in this process for STEPS steps; rank 0 prints the memory of every rank as JSON.

    In a language script, matrix products return zeros, because only their memory counts.
    """
    if script.startswith("language/"):
        library = torch.library.Library("aten", "IMPL")
        library.impl("mm", lambda one, other: one.new_zeros(len(one), other.shape[1]), "CPU")
    storages, steps, resume = Storages(), itertools.count(1), checkpoint.resume
    start: list[int] = []

    def note_start(*arguments, **options):
        start.append(sum(storages.peak.values()))
        storages.__exit__(None, None, None)
        return resume(*arguments, **options)

    @torch.no_grad()
    def note(optimizer: torch.optim.Optimizer, *_) -> None:
        step = next(steps)
        if step == 1:
            for each in gc.get_objects():
                if issubclass(type(each), torch.Tensor):
                    storages.number(each)
            storages.__enter__()
        if step < STEPS:
            storages.peak = {}
            return

        def numbers(tensors: Iterable[torch.Tensor]) -> set[int]:
            return {storages.number(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)} - {None}

        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = numbers(weight.grad for weight in weights)
        wrappers = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
        in_buckets = any(each.gradient_as_bucket_view for each in wrappers)
        parts = {"weights": numbers(weights), "buckets": gradients if in_buckets else set(), "gradients": gradients,
                 "optimizer": numbers(tree_leaves(list(optimizer.state.values())))}
        mine = {"start": start[0], "held": divide(storages.sizes(), parts), "peak": divide(storages.peak, parts)}
        every = [mine] * get_world_size()
        if dist.is_initialized():
            dist.all_gather_object(every, mine)
            dist.destroy_process_group()
        measure.show(every)
        sys.exit()

    register_optimizer_step_pre_hook(note)
    checkpoint.resume = note_start
    storages.__enter__()
    sys.argv = [script, *arguments]
    if script.startswith("language/"):
        runpy.run_module(script.removesuffix(".py").replace("/", "."), run_name="__main__")
    else:
        runpy.run_path(script, run_name="__main__")


def main() -> None:
    parser = measure.make_parser(__doc__, epochs=1, batch_size=32, models=[*models.MODELS, *gpt.SIZES])
    parser.add_argument("--processes", nargs="+", type=cli.positive_int, default=[1, 2, 4], help="of each launch")
    parser.add_argument("--scripts", nargs="+", choices=measure.training_scripts(), default=SCRIPTS, help="to launch")
    parser.add_argument("--length", nargs="+", type=cli.positive_int, default=[], help="tokens in a window")
    parser.set_defaults(model="vit_base", device="cpu")
    args = parser.parse_args()
    where = measure.machine(torch.device(args.device), "train*.py", "language", "common", "benchmarks/*.py")
    runs, task, turns = [], measure.task_of(args, 1), [(script, processes, None) for processes in args.processes
                                                       for script in args.scripts]
    if args.model in gpt.SIZES:
        args.dataset, args.data_path = "tokens", "runs/memory"
        for part in ("train", "val"):
            (ROOT / args.data_path).mkdir(parents=True, exist_ok=True)
            torch.zeros(2**16, dtype=torch.uint16).numpy().tofile(ROOT / args.data_path / f"{part}.bin")
        task = [*measure.task_of(args, 1), "--sample", "", "--windows", str(STEPS * args.batch_size)]
        turns = [(script, processes, length) for script, counts in MESHES.items() for processes in counts
                 for length in args.length or [128]]
    for script, processes, length in tqdm(turns, "launches", disable=None):
        words = [*script.split(), *task, *(["--length", str(length)] if length else [])]
        ranks, _ = measure.launch_and_read(processes, "benchmarks.memory", "watch", *words, "--workers", "0",
                                           "--output-dir", f"runs/memory/{words[0]}")
        runs.append({"script": script, "processes": processes, "length": length, "ranks": ranks})
        if length:
            runs[-1]["predicted"] = predict(gpt.SIZES[args.model], script, processes, args.batch_size, length)
        tqdm.write(f"{script} on {processes}: rank 0 held at most {ranks[0]['start'] / 2**20:.1f} MiB before training")
        content = {"machine": where, "arguments": vars(args), "runs": runs}
        save(path_of("memory", where, args.dataset, args.model), content)
    print(memory_table(content))


if __name__ == "__main__":
    with cli.report_errors():
        watch(*sys.argv[2:]) if sys.argv[1:2] == ["watch"] else main()
