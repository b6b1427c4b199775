"""How near train_DDP.py is to the floor, and how far from the usual loop: ratios, interleaved, from one run.

    python benchmarks/floor.py                                                        # about four minutes on 2 cores
    python benchmarks/floor.py --dataset fashion-mnist --data-path data --batch-size 128 --epochs 2

Every contender is a launch of its own, by torchrun, in each round; a launch counts with the median of its epochs
after the first. The ratios are taken within a round, then their median and range over the rounds. Writes
benchmarks/results/floor.json with every run, the hardware and the versions.
"""
import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = {
    "bare step": ["benchmarks/bare_ddp.py"],
    "train_DDP.py": ["train_DDP.py", "--output-dir", "{folder}"],
    "usual loop": ["benchmarks/usual_ddp.py"],
}


def images_per_second(command, processes, folder):
    """Return the images/s of a launch: the median of its epochs after the first."""
    command = [part.format(folder=folder) for part in command]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    result = subprocess.run([*launcher, *command], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr}")
    speeds = [float(speed.replace(",", "")) for speed in re.findall(r"([\d,]+) images/s", result.stdout)]
    return statistics.median(speeds[1:])


def machine():
    """Return what the figures depend on besides the code."""
    name = platform.processor()
    if Path("/proc/cpuinfo").exists():
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__,
            "commit": commit.stdout.strip()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-path", default="data")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch-size", default="128")
    parser.add_argument("--epochs", default="8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    shared = ["--dataset", args.dataset, "--data-path", args.data_path, "--model", args.model,
              "--batch-size", args.batch_size, "--epochs", args.epochs]

    folder = ROOT / "runs/floor"
    rounds = []
    for _ in tqdm(range(args.rounds), "rounds"):
        rounds.append({name: images_per_second([*command, *shared], args.processes, folder)
                       for name, command in CONTENDERS.items()})

    print(f"{args.processes} processes, {args.dataset}, {args.model}, batch {args.batch_size}, "
          f"{args.rounds} rounds of {args.epochs} epochs")
    for name in CONTENDERS:
        speeds = [speeds[name] for speeds in rounds]
        print(f"{name:14} {statistics.median(speeds):8,.0f} images/s  ({min(speeds):,.0f} to {max(speeds):,.0f})")
    ratios = {}
    for other in ("bare step", "usual loop"):
        ratios[other] = sorted(speeds["train_DDP.py"] / speeds[other] for speeds in rounds)
        print(f"train_DDP.py / {other:10} {statistics.median(ratios[other]):.2f}  "
              f"({ratios[other][0]:.2f} to {ratios[other][-1]:.2f})")
    path = ROOT / "benchmarks/results/floor.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "arguments": vars(args), "rounds": rounds, "ratios": ratios},
                               indent=1) + "\n")


if __name__ == "__main__":
    main()
