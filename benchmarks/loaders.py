"""Measure how many image pairs per second the loaders deliver, compared with a bare loop and with a common loader.

    python -m benchmarks.loaders
    python -m benchmarks.loaders --rounds 15 --pairs 768

Each round reads one epoch of the same JPEG files with each contender. The bare loop runs one process per core, which
does the same work and nothing else. `loader.py` and the PIL loader (typical of published code) have one worker per
core. `loader_DALI` has one thread per core; on a GPU, it uses the GPU's decoders. "DALI workers" adds two processes
that read the files. On a busy machine, CPU time per pair says more than pairs per second.
"""
import importlib.metadata
import math
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.multiprocessing as mp
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_image, write_jpeg
from torchvision.transforms import v2

import loader
from benchmarks import measure
from benchmarks.tables import RESULTS, around, ratio, save, spread, table
from common import cli, devices, errors, launch, pairs

WIDTH, HEIGHT, RESIZE, CROP, BATCH, SEED = 640, 480, 256, 224, 8, 1234
RATIOS = {("loader.py", "bare loop"): 0.85, ("loader.py", "PIL loader"): 2.0,  # the lowest acceptable ratios
          ("loader_DALI", "loader.py"): "-", ("loader_DALI", "bare loop"): "-"}
FIRST_BATCH = 0.2  # seconds; the limit for the first batch of a later epoch
CORES = launch.cores_per_process()
LIBRARIES = ("torchvision", "pillow", "nvidia-dali-cuda120", "nvidia-dali-cuda130")


def make_files(folder: Path, count: int) -> None:
    """Write `count` pairs of JPEG files; they repeat after 48."""
    for number in range(min(count, 48)):
        generator = torch.Generator().manual_seed(number)
        sharp = pairs.scene(HEIGHT, WIDTH, generator)
        for side, image in (("gt", sharp), ("img", pairs.motion_blur(sharp, generator))):
            (folder / "train" / side).mkdir(parents=True, exist_ok=True)
            for copy in range(number, count, 48):
                path = folder / "train" / side / f"{copy:04}.jpg"
                write_jpeg((image * 255).round().to(torch.uint8), str(path), quality=92)


def bare_work(pair_list: list) -> int:
    """Do a loader's work on some pairs, batch by batch; return the number of pairs."""
    for first in range(0, len(pair_list), BATCH):
        chosen = pair_list[first:first + BATCH]
        batch = torch.empty(2, len(chosen), 3, CROP, CROP, dtype=torch.uint8)
        for place, paths in enumerate(chosen):
            draws = torch.rand(4).tolist()
            for side, path in enumerate(paths):
                image = v2.functional.resize(decode_image(path, mode=ImageReadMode.RGB), [RESIZE], antialias=True)
                top, left = (int(draw * (size - CROP + 1)) for draw, size in zip(draws[:2], image.shape[1:]))
                image = image[:, top:top + CROP, left:left + CROP]
                axes = [axis for axis, draw in zip((1, 2), draws[2:]) if draw < 0.5]
                batch[side, place] = image.flip(axes) if axes else image
        batch.float().div_(127.5).sub_(1)
    return len(pair_list)


class PILPairs(list):
    """Pairs of paths that are read one at a time through PIL, as in most published code for paired images."""

    transform = v2.Compose([  # draws once for both images
        v2.Resize(RESIZE), v2.ToImage(), v2.RandomCrop(CROP), v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)])

    def __getitem__(self, index):
        return self.transform(*(Image.open(path).convert("RGB") for path in super().__getitem__(index)))


def read_epoch(batches, device: torch.device) -> tuple[int, float]:
    """Read one epoch, copy it to the device, and return the number of pairs and the seconds until the first batch."""
    count, first, start = 0, None, time.perf_counter()
    for images, targets in batches:
        images, targets = images.to(device), targets.to(device)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        first = first or time.perf_counter() - start
        count += len(images)
    return count, first


def contenders(folder: Path, device: torch.device, with_dali: bool) -> dict:
    """Return {name: function}, one for each contender: it reads one epoch and returns the same as `read_epoch`."""
    args = SimpleNamespace(data_source=folder, split="train", img_dir="img", gt_dir="gt", resize=RESIZE,
                           crop=CROP, batch_size=BATCH, workers=CORES, seed=SEED, device=str(device))
    pair_list = pairs.find_pairs(folder, "train", "img", "gt")
    shares = [pair_list[share::CORES] for share in range(CORES)]
    pool = mp.get_context("fork").Pool(CORES, torch.set_num_threads, (1,))
    usual = DataLoader(PILPairs(pair_list), BATCH, shuffle=True, num_workers=CORES, drop_last=True,
                       persistent_workers=True, pin_memory=device.type != "cpu")
    loaders = {"loader.py": loader.build_loader(args), "PIL loader": usual}
    if with_dali:
        import loader_DALI
        for name, workers in (("loader_DALI", 0), ("DALI workers", 2)):
            loaders[name] = loader_DALI.build_loader(SimpleNamespace(**vars(args) | {"workers": workers}))
    return {"bare loop": lambda: (sum(pool.map(bare_work, shares, chunksize=1)), None),
            **{name: lambda batches=batches: read_epoch(batches, device) for name, batches in loaders.items()}}


def cpu_seconds() -> float:
    """Return the CPU time that this process and its living descendants have used."""
    return sum(sum(process.cpu_times()[:2]) for process in measure.family(os.getpid()))


def report(runs: list[dict]) -> str:
    """Return two tables: the results of each contender, and ratios within the rounds."""
    found = {run["contender"]: ([], [], []) for run in runs}
    for run in runs:
        values = run["pairs"] / run["seconds"], 1000 * run["cpu_seconds"] / run["pairs"], run["first_batch_seconds"]
        for row, value in zip(found[run["contender"]], values):
            row.append(value or math.nan)
    rows = [[name, around(spread(speed), ".0f"), around(spread(cost)), around(spread(first), ".3f").replace("nan", "-")]
            for name, (speed, cost, first) in found.items()]
    ratios = [[f"{one} / {other}", around(ratio(found[one][0], found[other][0])),
               around(ratio(found[other][1], found[one][1])), wanted]
              for (one, other), wanted in RATIOS.items() if one in found]
    return (table(["contender", "pairs/s", "CPU, ms per pair", f"first batch, s (at most {FIRST_BATCH} wanted)"], rows)
            + "\n\n" + table(["ratio", "of pairs/s", "by CPU time", "at least wanted"], ratios))


def main() -> None:
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--rounds", type=cli.positive_int, default=9, help="epochs of each contender")
    parser.add_argument("--pairs", type=cli.positive_int, default=384, help="pairs of images; at most 48 are distinct")
    parser.add_argument("--device", help="default: an accelerator, else cpu")
    args = parser.parse_args()
    device = devices.select_device(args.device)
    torch.set_num_threads(1)  # only in this process: it leaves the cores to those that decode
    versions = {package.name.lower(): package.version for package in importlib.metadata.distributions()
                if package.name.lower() in LIBRARIES}
    settings = {"pairs": args.pairs, "image": [WIDTH, HEIGHT], "resize": RESIZE, "crop": CROP, "batch_size": BATCH}
    content = {"machine": measure.machine(device, "loader*.py", "common", "benchmarks/*.py") | versions, "cores": CORES,
               "load_before": round(os.getloadavg()[0], 2), "settings": settings | {"rounds": args.rounds}, "runs": []}
    with_dali = any("dali" in name for name in versions)
    if not with_dali:
        print("without DALI: it is not installed (requirements-dali.txt)")
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder), args.pairs)
        found = contenders(Path(folder), device, with_dali)
        for epoch in found.values():
            epoch()  # starts the workers and fills the file cache
        for number, name in measure.in_turns(list(found), args.rounds):
            cpu, start = cpu_seconds(), time.perf_counter()
            count, first = found[name]()
            content["runs"].append({"round": number + 1, "contender": name, "pairs": count,
                                    "seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds() - cpu,
                                    "first_batch_seconds": first})
    save(RESULTS / "loaders.json", content)
    print(f"{args.pairs} pairs, {args.rounds} rounds: median (lowest to highest)\n\n{report(content['runs'])}")


if __name__ == "__main__":
    with errors.report_errors():
        main()
