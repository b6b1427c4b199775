"""Measure how many image pairs per second the loaders deliver, compared with a bare loop and with a common loader.

    python -m benchmarks.loaders
    python -m benchmarks.loaders --rounds 15 --pairs 768 --minutes 60

Each round reads one epoch of the same JPEG files with each contender. The bare loop runs one process per core, which
does the same work and nothing else. `loader.py`, `loader_streaming` and the PIL loader (typical of published code)
have one worker per core; `loader_streaming` reads the files from tar shards. `loader_DALI` has one thread per core; on
a GPU, it uses the GPU's decoders. On a busy machine, CPU time per pair says more than pairs per second.

The tasks differ in the size of the photos and in how the contenders resize and crop them. Each task ends within its
share of --minutes: the command then kills its processes, and reports the rounds that were done.
"""
import importlib.metadata
import io
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.multiprocessing as mp
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import loader
import loader_streaming
from benchmarks import measure
from benchmarks.tables import RESULTS, around, ratio, save, spread, table
from common import cli, devices, launch
from common.images import decode_image
from common.pairs import pairs, tars


class Task(NamedTuple):
    """Photos of `width` x `height`, whose shorter side becomes `resize` (0: unchanged), cropped to `crop` x `crop`."""

    name: str
    width: int
    height: int
    resize: int
    crop: int


TASKS = [Task("640x480 to 256, crop 224", 640, 480, 256, 224), Task("2040x1356 to 256, crop 224", 2040, 1356, 256, 224),
         Task("2040x1356, crop 256", 2040, 1356, 0, 256)]
BATCH, SEED, PER_SHARD = 8, 1234, 16
AHEAD = 3  # batches that DALI may read ahead: 2 by default, 1 in work
RATIOS = [("loader.py", "bare loop"), ("loader.py", "PIL loader"), ("loader_streaming", "loader.py"),
          ("loader_DALI", "loader.py"), ("loader_DALI", "bare loop")]
CORES = launch.cores_per_process()
LIBRARIES = ("torchvision", "torchcodec", "pillow", "nvidia-dali-cuda120", "nvidia-dali-cuda130")


def make_pair(number: int, folder: Path, count: int, width: int, height: int) -> None:
    """Write the pair `number` as JPEG files, and its copies, whose numbers are 48 apart."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(number)
    sharp = pairs.scene(height, width, generator)
    for side, image in (("gt", sharp), ("img", pairs.motion_blur(sharp, generator))):
        file = io.BytesIO()
        v2.functional.to_pil_image((image * 255).round().to(torch.uint8)).save(file, "JPEG", quality=92)
        for copy in range(number, count, 48):
            (folder / "train" / side / f"{copy:04}.jpg").write_bytes(file.getvalue())


def make_files(folder: Path, count: int, width: int, height: int) -> None:
    """Write `count` pairs of JPEG files, which repeat after 48, and the same pairs in shards."""
    for side in ("gt", "img"):
        (folder / "train" / side).mkdir(parents=True)
    with mp.get_context("fork").Pool(CORES) as pool:
        pool.starmap(make_pair, [(number, folder, count, width, height) for number in range(min(count, 48))])
    tars.write_shards(pairs.find_pairs(folder, "train", "img", "gt"), folder / "shards", "train", PER_SHARD)


def bare_work(share: tuple[list, Task]) -> int:
    """Do a loader's work for some pairs, batch by batch; return the number of pairs."""
    pair_list, task = share
    for first in range(0, len(pair_list), BATCH):
        chosen = pair_list[first:first + BATCH]
        batch = torch.empty(2, len(chosen), 3, task.crop, task.crop, dtype=torch.uint8)
        for place, paths in enumerate(chosen):
            draws = torch.rand(4).tolist()
            for side, path in enumerate(paths):
                image = decode_image(torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8))
                if task.resize:
                    image = v2.functional.resize(image, [task.resize], antialias=True)
                top, left = (int(draw * (size - task.crop + 1)) for draw, size in zip(draws[:2], image.shape[1:]))
                image = image[:, top:top + task.crop, left:left + task.crop]
                axes = [axis for axis, draw in zip((1, 2), draws[2:]) if draw < 0.5]
                batch[side, place] = image.flip(axes) if axes else image
        batch.float().div_(127.5).sub_(1)
    return len(pair_list)


class PILPairs:
    """Pairs of paths that are read one at a time through PIL, as in most published code for paired images."""

    def __init__(self, pair_list: list, task: Task) -> None:
        self.pair_list = pair_list
        self.transform = v2.Compose([  # draws one crop and flip for both images
            *([v2.Resize(task.resize)] if task.resize else []), v2.ToImage(), v2.RandomCrop(task.crop),
            v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3)])

    def __len__(self) -> int:
        return len(self.pair_list)

    def __getitem__(self, index: int):
        return self.transform(*(Image.open(path).convert("RGB") for path in self.pair_list[index]))


def read_epoch(batches, device: torch.device) -> Iterator[int]:
    """Copy each batch of an epoch to the device, and yield its number of pairs."""
    for images, targets in batches:
        images, targets = images.to(device), targets.to(device)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        yield len(images)


def timed(counts: Iterator[int], ahead: int = 0) -> dict:
    """Return the number of pairs and the times of an epoch.

    This excludes the first `ahead` batches: DALI reads that many before the epoch, while other contenders are measured.
    """
    for _ in range(ahead):
        next(counts)
    cpu, start = cpu_seconds(), time.perf_counter()
    count = sum(counts)
    return {"pairs": count, "seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds() - cpu}


def contenders(folder: Path, task: Task, device: torch.device) -> dict:
    """Return {name: function}; each function reads one epoch with a contender and returns the measurements."""
    args = SimpleNamespace(data_source=folder, split="train", img_dir="img", gt_dir="gt", resize=task.resize,
                           crop=task.crop, batch_size=BATCH, workers=CORES, seed=SEED, device=str(device))
    of_shards = SimpleNamespace(**vars(args) | {"data_source": str(folder / "shards"), "shuffle_buffer": 4 * BATCH})
    pair_list = pairs.find_pairs(folder, "train", "img", "gt")
    shares = [(pair_list[share::CORES], task) for share in range(CORES)]
    pool = mp.get_context("fork").Pool(CORES, torch.set_num_threads, (1,))
    loaders = {"loader.py": loader.build_loader(args), "loader_streaming": loader_streaming.build_loader(of_shards),
               "PIL loader": DataLoader(PILPairs(pair_list, task), BATCH, shuffle=True, num_workers=CORES,
                                        drop_last=True, persistent_workers=True, pin_memory=device.type != "cpu")}
    found = {"bare loop": lambda: timed(pool.imap(bare_work, shares))}
    for name, batches in loaders.items():
        found[name] = lambda batches=batches: timed(read_epoch(batches, device))
    try:
        import loader_DALI
    except ImportError:
        print("without DALI: it is not installed (requirements/dali.txt)")
    else:
        dali = loader_DALI.build_loader(SimpleNamespace(**vars(args) | {"workers": 0}))
        found["loader_DALI"] = lambda: timed(read_epoch(dali, device), AHEAD)
    return found


def cpu_seconds() -> float:
    """Return the CPU time that this process and its living descendants have used."""
    return sum(sum(process.cpu_times()[:2]) for process in measure.family(os.getpid()))


def report(runs: list[dict]) -> str:
    """Return two tables for each task: the results of each contender, and ratios within the rounds."""
    texts = []
    for name in dict.fromkeys(run["task"] for run in runs):
        found: dict = {}
        for run in (run for run in runs if run["task"] == name):
            speeds, costs = found.setdefault(run["contender"], ([], []))
            speeds.append(run["pairs"] / run["seconds"])
            costs.append(1000 * run["cpu_seconds"] / run["pairs"])
        rows = [[one, around(spread(speeds), ".0f"), around(spread(costs))] for one, (speeds, costs) in found.items()]
        ratios = [[f"{one} / {other}", around(ratio(found[one][0], found[other][0])),
                   around(ratio(found[other][1], found[one][1]))]
                  for one, other in RATIOS if one in found and other in found]
        texts += [f"{name}:", table(["contender", "pairs/s", "CPU, ms per pair"], rows),
                  table(["ratio", "of pairs/s", "by CPU time"], ratios)]
    return "\n\n".join(texts)


def measure_task(task: Task, args, device: torch.device, folder: Path, results: Connection) -> None:
    """Send the interleaved runs of all contenders for a task, one round at a time."""
    torch.set_num_threads(1)  # this process leaves the cores to the processes that decode
    mp.set_start_method("fork", force=True)  # in a spawned process, loaders would spawn workers: each imports torch
    count = args.pairs if task.width == 640 else args.pairs // 3
    make_files(folder, count, task.width, task.height)
    found = contenders(folder, task, device)
    for epoch in found.values():
        epoch()  # starts the workers and fills the file cache
    for number, turns in itertools.groupby(measure.in_turns(list(found), args.rounds), lambda turn: turn[0]):
        results.send([{"task": task.name, "round": number + 1, "contender": name} | found[name]()
                      for _, name in turns])


def run_task(task: Task, args, device: torch.device, seconds: float) -> list[dict]:
    """Return the runs of measure_task, from a process without threads, which may fork; kill it after `seconds`."""
    spawn, end, runs = mp.get_context("spawn"), time.monotonic() + seconds, []
    ours, theirs = spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = spawn.Process(target=measure_task, args=(task, args, device, Path(folder), theirs))
        process.start()
        theirs.close()
        try:
            while ours.poll(max(0, end - time.monotonic())):
                runs += ours.recv()
            print(f"{task.name}: stopped after {seconds:.0f} s and {len({run['round'] for run in runs})} rounds")
        except EOFError:  # the process ends
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)
        finally:
            measure.kill(process.pid)
            process.join()
    return runs


def main() -> None:
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--rounds", type=cli.positive_int, default=9, help="epochs of each contender")
    parser.add_argument("--pairs", type=cli.positive_int, default=384, help="small pairs; of large ones, a third")
    parser.add_argument("--minutes", type=cli.positive, default=20, help="end within this time")
    parser.add_argument("--device", help="default: an accelerator, else cpu")
    args, begin = parser.parse_args(), time.monotonic()
    device = devices.select_device(args.device)
    versions = {package.name.lower(): package.version for package in importlib.metadata.distributions()
                if package.name.lower() in LIBRARIES}
    content = {"machine": measure.machine(device, "loader*.py", "common", "benchmarks/*.py") | versions, "cores": CORES,
               "arguments": vars(args), "runs": []}
    for number, task in enumerate(TASKS):
        left = begin + 60 * args.minutes - time.monotonic()
        content["runs"] += run_task(task, args, device, left / (len(TASKS) - number))
    if not content["runs"]:
        sys.exit(f"--minutes {args.minutes:g}: no round was completed; nothing is saved")
    save(RESULTS / "loaders.json", content)
    print(f"{args.pairs} pairs, at most {args.rounds} rounds: median (lowest to highest)\n\n{report(content['runs'])}")


if __name__ == "__main__":
    with cli.report_errors():
        main()
