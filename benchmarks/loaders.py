"""How many image pairs per second the loaders deliver, beside what the cores can do and what is usual.

    python benchmarks/loaders.py
    python benchmarks/loaders.py --rounds 15 --pairs 768

On the same JPEG files of 640x480 pixels, with a resize to 256, a crop of 224 and batches of 8, each round
reads one epoch with each contender in turn, in another order each round:

    bare loop      a process per core that decodes, resizes, crops, flips and normalises, and nothing else
    loader.py      as many workers as cores
    PIL loader     as many workers as cores; PIL decode and resize per sample, the usual published loader
    loader_DALI    as many threads as cores; on a GPU, if there is one, its decoders
    DALI workers   the same, with two processes that read the files

Ratios are taken within a round; medians over the rounds are shown, with the lowest and the highest. On a
machine that has other work to do, the CPU time of a pair over all processes says more than pairs per second:
where the cores are busy, these are the cores divided by it. All goes into benchmarks/results/loaders.json.
"""
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.multiprocessing as mp
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_image, write_jpeg
from torchvision.transforms.v2 import functional as transforms

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import loader  # noqa: E402
from common import cli, devices, errors, launch, pairs  # noqa: E402

RESIZE, CROP, BATCH, SEED = 256, 224, 8, 1234
WIDTH, HEIGHT = 640, 480
TARGETS = {"loader.py / bare loop": 0.85, "loader.py / PIL loader": 2.0}  # the least that will do
FIRST_BATCH = 0.2  # seconds, in epochs after the first
CORES = launch.cores_per_process()
RESULTS = ROOT / "benchmarks/results/loaders.json"


def parse_args():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--rounds", type=cli.positive_int, default=9, help="epochs of each contender")
    parser.add_argument("--pairs", type=cli.positive_int, default=384, help="of pictures, copies of 48")
    parser.add_argument("--device", help="default: an accelerator, else cpu")
    parser.add_argument("--output", default=RESULTS, help="the file of results")
    return parser.parse_args()


def make_files(folder, count):
    """Write `count` pairs of JPEG files."""
    for number in range(count):
        for side in ("img", "gt"):
            path = folder / "train" / side / f"{number % 48}" / f"{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if number >= 48:
                shutil.copy(path.with_name(f"{number % 48:04}.jpg"), path)
                continue
            if side == "img":
                sharp = pairs.scene(HEIGHT, WIDTH, torch.Generator().manual_seed(number))
                image = pairs.motion_blur(sharp, torch.Generator().manual_seed(number))
            else:
                image = sharp
            write_jpeg((image * 255).round().to(torch.uint8), str(path), quality=92)


class BareLoop:
    """Processes that do the work on the pictures of one share each, batch after batch, and throw it away."""

    def __init__(self, pair_list):
        context = mp.get_context("fork")
        self.ends = []
        for share in range(CORES):
            end, other = context.Pipe()
            context.Process(target=self._work, args=(other, pair_list[share::CORES]), daemon=True).start()
            self.ends.append(end)

    def epoch(self):
        start = time.perf_counter()
        for end in self.ends:
            end.send("go")
        count = sum(end.recv() for end in self.ends)
        return count, time.perf_counter() - start, None

    @staticmethod
    def _work(end, pair_list):
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(SEED)
        while end.recv():
            for first in range(0, len(pair_list), BATCH):
                chosen = pair_list[first:first + BATCH]
                batch = torch.empty(2, len(chosen), 3, CROP, CROP, dtype=torch.uint8)
                for place, paths in enumerate(chosen):
                    draws = torch.rand(4, generator=generator).tolist()
                    for side, path in enumerate(paths):
                        image = decode_image(path, mode=ImageReadMode.RGB)
                        image = transforms.resize(image, [RESIZE], antialias=True)
                        top, left = (int(draw * (size - CROP + 1)) for draw, size in
                                     zip(draws[:2], image.shape[1:], strict=True))
                        image = image[:, top:top + CROP, left:left + CROP]
                        axes = [axis for axis, draw in zip((1, 2), draws[2:], strict=True) if draw < 0.5]
                        batch[side, place] = image.flip(axes) if axes else image
                batch.float().div_(127.5).sub_(1)
            end.send(len(pair_list))


class UsualDataset:
    """One pair at a time through PIL, as most published code for paired images has it."""

    def __init__(self, pair_list):
        self.pair_list = pair_list

    def __len__(self):
        return len(self.pair_list)

    def __getitem__(self, index):
        images = [Image.open(path).convert("RGB") for path in self.pair_list[index]]
        width, height = images[0].size
        size = (RESIZE * width // min(width, height), RESIZE * height // min(width, height))
        images = [transforms.to_image(image.resize(size, Image.BILINEAR)) for image in images]
        top, left = (torch.randint(size[axis] - CROP + 1, ()).item() for axis in (1, 0))
        images = [transforms.crop(image, top, left, CROP, CROP) for image in images]
        if torch.rand(()) < 0.5:
            images = [transforms.horizontal_flip(image) for image in images]
        if torch.rand(()) < 0.5:
            images = [transforms.vertical_flip(image) for image in images]
        images = [transforms.to_dtype(image, torch.float32, scale=True) for image in images]
        return tuple(transforms.normalize(image, [0.5] * 3, [0.5] * 3) for image in images)


class Reader:
    """One pass over a loader is an epoch; batches go to the device."""

    def __init__(self, batches, device):
        self.batches, self.device = batches, device

    def epoch(self):
        count, first = 0, None
        start = time.perf_counter()
        for images, targets in self.batches:
            images, targets = images.to(self.device), targets.to(self.device)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            first = first or time.perf_counter() - start
            count += len(images)
        return count, time.perf_counter() - start, first


def contenders(folder, device):
    """Return everything to be measured, by name."""
    args = SimpleNamespace(data_source=folder, split="train", img_dir="img", gt_dir="gt", resize=RESIZE,
                           crop=CROP, batch_size=BATCH, workers=CORES, seed=SEED, device=str(device))
    pair_list = pairs.find_pairs(folder, "train", "img", "gt")
    usual = DataLoader(UsualDataset(pair_list), BATCH, shuffle=True, num_workers=CORES, drop_last=True,
                       persistent_workers=True, pin_memory=device.type != "cpu")
    found = {"bare loop": BareLoop(pair_list), "loader.py": Reader(loader.build_loader(args), device),
             "PIL loader": Reader(usual, device)}
    if not any(version for name, version in versions().items() if "dali" in name):
        print("without DALI: it is not installed (requirements-dali.txt)")
        return found
    import loader_DALI

    for name, workers in (("loader_DALI", 0), ("DALI workers", 2)):
        args = SimpleNamespace(**vars(args) | {"workers": workers})
        found[name] = Reader(loader_DALI.build_loader(args), device)
    return found


def hardware(device):
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                 if line.startswith("model name")]
        cpu = names[0] if names else cpu
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": cpu, "cores": CORES, "device": str(device), "gpu": gpu,
            "load_before": round(os.getloadavg()[0], 2)}


def versions():
    found = {"python": platform.python_version()}
    for name in ("torch", "torchvision", "pillow", "nvidia-dali-cuda120", "nvidia-dali-cuda130"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu_seconds():
    """Return the CPU time that this process and its living children have taken (Linux; 0 elsewhere)."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, fields = stat.parent.name, stat.read_text().rsplit(") ", 1)[1].split()
        except OSError:  # it has ended
            continue
        if int(number) == os.getpid() or int(fields[1]) == os.getpid():
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def spread(values):
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def main(args):
    device = devices.select_device(args.device)
    torch.set_num_threads(1)  # of this process: the cores are for those that decode
    content = {"hardware": hardware(device), "versions": versions(), "date": time.strftime("%Y-%m-%d"),
               "settings": {"pairs": args.pairs, "image": [WIDTH, HEIGHT], "resize": RESIZE, "crop": CROP,
                            "batch_size": BATCH, "rounds": args.rounds}, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder), args.pairs)
        found = contenders(Path(folder), device)
        for contender in found.values():
            contender.epoch()  # workers start, files come into the cache
        for number in range(args.rounds):
            names = list(found)
            names = names[number % len(names):] + names[:number % len(names)]
            for name in names:
                cpu = cpu_seconds()
                count, seconds, first = found[name].epoch()
                cpu = cpu_seconds() - cpu
                content["runs"].append({"round": number + 1, "contender": name, "pairs": count,
                                        "seconds": seconds, "cpu_seconds": cpu,
                                        "first_batch_seconds": first})

    runs = {name: [run for run in content["runs"] if run["contender"] == name] for name in found}
    speeds = {name: [run["pairs"] / run["seconds"] for run in runs[name]] for name in found}
    content["pairs_per_second"] = {name: spread(values) for name, values in speeds.items()}
    content["first_batch_seconds"] = {name: spread([run["first_batch_seconds"] for run in runs[name]])
                                      for name in found if name != "bare loop"}
    costs = {name: [run["cpu_seconds"] / run["pairs"] * 1000 for run in runs[name]] for name in found}
    content["cpu_milliseconds_per_pair"] = {name: spread(values) for name, values in costs.items()}
    content["ratios"], content["ratios_by_cpu_time"] = {}, {}
    for over, under in (("loader.py", "bare loop"), ("loader.py", "PIL loader"),
                        ("loader_DALI", "loader.py"), ("loader_DALI", "bare loop")):
        if over in found:
            ratios = [one / other for one, other in zip(speeds[over], speeds[under], strict=True)]
            content["ratios"][f"{over} / {under}"] = spread(ratios)
            ratios = [other / one for one, other in zip(costs[over], costs[under], strict=True) if one]
            content["ratios_by_cpu_time"][f"{over} / {under}"] = spread(ratios or [0])

    print(f"{content['hardware']['cpu']}, {CORES} cores, {content['hardware']['gpu'] or 'no GPU'}; "
          f"{args.pairs} pairs of {WIDTH}x{HEIGHT}, {args.rounds} rounds: median (lowest to highest)")
    for name in found:
        speed, first = content["pairs_per_second"][name], content["first_batch_seconds"].get(name)
        cost = content["cpu_milliseconds_per_pair"][name]["median"]
        print(f"{name:14} {speed['median']:5.0f} pairs/s ({speed['lowest']:.0f} to {speed['highest']:.0f})",
              f" {cost:.2f} ms of CPU per pair",
              f" first batch {first['median']:.3f} s (to {first['highest']:.3f})" if first else "")
    for name, ratio in content["ratios"].items():
        wanted = f"wanted: {TARGETS[name]} or more" if name in TARGETS else ""
        by_cpu = content["ratios_by_cpu_time"][name]["median"]
        print(f"{name:26} {ratio['median']:5.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})",
              f" by CPU time {by_cpu:.2f}  {wanted}".rstrip())
    content["targets"] = TARGETS | {"first batch, seconds at most": FIRST_BATCH}
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    with errors.report_errors():
        main(parse_args())
