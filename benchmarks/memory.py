"""Measure the memory of each process of a script, in bytes of tensors, and the peak in a training step.

    python -m benchmarks.memory                                             # vit_base
    python -m benchmarks.memory --model vit --processes 2 --scripts train_DDP.py train_FSDP.py

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
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from benchmarks import measure
from benchmarks.storages import Storages
from benchmarks.tables import memory_table, path_of, save
from common import checkpoint, cli, endings

SCRIPTS = ["train_DDP.py", "train_FSDP.py", "train_TP.py", "train_PP.py"]
STEPS = 3


def divide(sizes: dict[int, int], parts: dict[str, set[int]]) -> dict[str, int]:
    """Return the bytes of each part; a storage counts only in the first part that has it, or else as "other"."""
    sizes = dict(sizes)
    return {name: sum(sizes.pop(number, 0) for number in numbers) for name, numbers in parts.items()} | {
        "other": sum(sizes.values())}


def watch(script: str, *arguments: str) -> None:
    """Run a script in this process for STEPS steps; rank 0 prints the memory of every rank as JSON."""
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
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        measure.show(every)
        dist.destroy_process_group()
        sys.exit()

    register_optimizer_step_pre_hook(note)
    checkpoint.resume = note_start
    storages.__enter__()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    parser = measure.make_parser(__doc__, epochs=1, batch_size=32)
    parser.add_argument("--processes", nargs="+", type=cli.positive_int, default=[1, 2, 4], help="of each launch")
    parser.add_argument("--scripts", nargs="+", choices=measure.training_scripts(), default=SCRIPTS, help="to launch")
    parser.set_defaults(model="vit_base", device="cpu")
    args = parser.parse_args()
    where = measure.machine(torch.device(args.device), "train*.py", "common", "benchmarks/*.py")
    runs = []
    turns = [(script, processes) for processes in args.processes for script in args.scripts]
    for script, processes in tqdm(turns, "launches", disable=None):
        ranks, _ = measure.launch_and_read(processes, "benchmarks.memory", "watch", script, *measure.task_of(args, 1),
                                           "--workers", "0", "--output-dir", f"runs/memory/{script}")
        runs.append({"script": script, "processes": processes, "ranks": ranks})
        peak = ranks[0]["start"] / 2**20
        tqdm.write(f"{script} on {processes}: rank 0 held at most {peak:.1f} MiB before training")
        content = {"machine": where, "arguments": vars(args), "runs": runs}
        save(path_of("memory", where, args.dataset, args.model), content)
    print(memory_table(content))


if __name__ == "__main__":
    with endings.report_errors():
        watch(*sys.argv[2:]) if sys.argv[1:2] == ["watch"] else main()
