"""Measure what sharding costs: FSDP2's step compared with DDP's, a pipeline's bubble, and the wait for a checkpoint.

    python -m benchmarks.sharding                                     # vit_base: half an hour on two cores
    python -m benchmarks.sharding --model vit --rounds 1              # a trial

The benchmark launches the scripts on two processes, DDP and FSDP alternately, and measures inside these processes. A
pipeline stage is idle while it runs neither a forward nor a backward pass. The wait for a checkpoint is the time until
training continues. `python -m benchmarks.compare --show` writes the tables into docs/speed.md.
"""
import contextlib
import functools
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.pipelining import PipelineStage
from torch.optim.optimizer import register_optimizer_step_post_hook
from tqdm import tqdm

from benchmarks import measure
from benchmarks.tables import ROOT, path_of, ratio, save, sharding_table, spread
from common import checkpoint, cli, dcp_folders, models, pipeline, shards

PROCESSES, STEPS = 2, 6
MICRO_BATCHES = [2, 4, 8]  # numbers of micro-batches of IMAGES images each
IMAGES = 8
STEPPING = ["train_DDP.py", "train_FSDP.py"]
launch = functools.partial(measure.launch_and_read, PROCESSES, "benchmarks.sharding")
# For each script, the calls for which training waits at each checkpoint, in order
SAVING = {"train_FSDP.py": [(shards, "gather"), (checkpoint, "save_checkpoint")],
          "train_elastic.py": [(checkpoint.BackgroundWriter, "save")],
          "train_DCP.py": [(dcp_folders, "wait"), (dcp_folders, "prune"), (dcp_folders, "create"), (dcp, "async_save")]}


def watch(place: Any, name: str, note: Callable[[str, tuple, float], None]) -> None:
    """Replace the function `place.name` by one that also passes its name, arguments and seconds to `note`."""
    function = getattr(place, name)

    def watched(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        note(name, args, time.perf_counter() - start)
        return result

    setattr(place, name, watched)


def steps_of(script: str) -> None:
    """Run a script for STEPS steps, and show the seconds of each but the first two."""
    ends: list[float] = []

    def note(*_) -> None:
        ends.append(time.perf_counter())
        if len(ends) == STEPS:
            measure.show([end - start for start, end in zip(ends[1:], ends[2:])])
            dist.destroy_process_group()
            sys.exit()

    register_optimizer_step_post_hook(note)
    runpy.run_path(script, run_name="__main__")


def waits_of(script: str) -> None:
    """Run a script, and show [name, seconds] of each call that saves last.pt or a folder."""
    calls: list[tuple[str, float]] = []

    def note(name: str, args: tuple, seconds: float) -> None:
        if name != "save_checkpoint" or args[0].name == "last.pt":
            calls.append((name, seconds))

    for place, name in SAVING[script]:
        watch(place, name, note)
    with contextlib.suppress(SystemExit):  # train_elastic.py returns an exit code
        runpy.run_path(script, run_name="__main__")
    measure.show(calls)


def bubbles_of(rounds: int, model: str) -> None:
    """Pass batches through train_PP.py's stages; show {number of micro-batches: [share of idle time, per round]}."""
    import train_PP

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = pipeline.cut(models.create_model(model, 10, (1, 28, 28)), world_size)[rank::world_size]
    schedules = {number: train_PP.create_schedule(parts, number, torch.device("cpu"), None, train_PP.criterion)
                 for number in MICRO_BATCHES}
    busy: list[float] = []
    for name in ("forward_one_chunk", "backward_one_chunk"):
        watch(PipelineStage, name, lambda name, args, seconds: busy.append(seconds))
    shares: dict[int, list[float]] = {number: [] for number in MICRO_BATCHES}
    for number in MICRO_BATCHES * (1 + rounds):
        inputs, targets = torch.randn(number * IMAGES, 1, 28, 28), torch.randint(10, (number * IMAGES,))
        busy.clear()
        dist.barrier()
        start = time.perf_counter()
        schedules[number].step(*([inputs] if rank == 0 else []), target=targets, losses=[])
        dist.barrier()
        idle = torch.tensor(1 - sum(busy) / (time.perf_counter() - start))
        dist.all_reduce(idle)
        shares[number].append(idle.item() / world_size)
    measure.show({number: each[1:] for number, each in shares.items()})  # the first round allocates memory
    dist.destroy_process_group()


def waits(script: str, args) -> dict[str, Any]:
    """Return the seconds that training waited for each checkpoint of a script, and those of its epochs.

    The first checkpoint is left out, because no earlier save can delay it.
    """
    extra = ["--snapshot-every", 12] if script == "train_elastic.py" else []
    shutil.rmtree(ROOT / f"runs/sharding/{script}", ignore_errors=True)  # from an earlier run
    calls, epochs = launch("waits", script, *measure.task_of(args, args.epochs), *extra, "--output-dir",
                           f"runs/sharding/{script}")
    names = [name for _, name in SAVING[script]]
    turns = [calls[place:place + len(names)] for place in range(0, len(calls) - len(names) + 1, len(names))]
    return {"calls": calls, "waits": spread(sum(seconds for _, seconds in turn) for turn in turns[1:]),
            "epoch": spread(epoch["seconds"] for epoch in epochs)}


def main() -> None:
    parser = measure.make_parser(__doc__, epochs=3, batch_size=64, rounds=5)
    parser.set_defaults(model="vit_base", device="cpu")
    args = parser.parse_args()
    where = measure.machine(torch.device("cpu"), "train*.py", "common", "benchmarks/*.py")
    content: dict[str, Any] = {"machine": where, "arguments": vars(args), "processes": PROCESSES}
    seconds: dict[str, list[float]] = {script: [] for script in STEPPING}
    for _, script in tqdm(measure.in_turns(STEPPING, args.rounds), "steps", disable=None):
        shown, _ = launch("steps", script, *measure.task_of(args, 1), "--output-dir", f"runs/sharding/{script}")
        seconds[script].append(spread(shown)["median"])
    content["steps"] = {"seconds": seconds, "FSDP / DDP": ratio(*seconds.values())}
    content["bubbles"], _ = launch("bubbles", 3 * args.rounds, args.model)
    content["waits"] = {script: waits(script, args) for script in tqdm(SAVING, "checkpoints", disable=None)}
    save(path_of("sharding", where, args.dataset, args.model), content)
    print(sharding_table(content))


if __name__ == "__main__":
    with cli.report_errors():
        if "RANK" not in os.environ:
            main()
        elif sys.argv[1] == "bubbles":
            bubbles_of(int(sys.argv[2]), sys.argv[3])
        else:
            part, *sys.argv = sys.argv[1:]
            {"steps": steps_of, "waits": waits_of}[part](sys.argv[0])
