"""Every training script as a user would launch it, side by side: the tables and the plot of README.md.

    pip install -r requirements.txt -r benchmarks/requirements.txt
    python benchmarks/compare.py                                             # digits: some ten minutes on two cores
    python benchmarks/compare.py --dataset fashion-mnist --rounds 3          # 75 minutes there
    python benchmarks/compare.py --dataset cifar100 --model resnet18 --batch-size 512 --epochs 3 --device cuda
    python benchmarks/compare.py --show                                      # only the tables and the plot

Each run is a process of its own, or a launch of torchrun; a round has one run of each script with the same --seed, in
another order each time. A run counts with the median of its epochs after the first, and the accuracy of its last; its
peak memory is that of its tensors on an accelerator, on a CPU the resident set of its largest process. What has run is
kept in a file of benchmarks/results, one for each machine and task, after every run: an interruption loses only the
run that it hits, and the next call makes the runs that are still missing, if hardware, versions, the scripts' code and
the arguments are the same and committed; if not, it begins the file anew.
"""
import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.tables import RESULTS, SCRIPTS, compare_table, file_name, read, show  # noqa: E402
from benchmarks.turns import launch, machine  # noqa: E402
from common import datasets, devices, errors, models  # noqa: E402

ALONE = ["train.py", "train_DP.py", "train_mp.py"]  # started by plain python


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: an accelerator, else cpu")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS[:-1],
                        help="default: all but train_amp.py, which wants a device that is fast at bf16")
    parser.add_argument("--dataset", choices=datasets.DATASETS, default="digits")
    parser.add_argument("--data-path", default="data")
    parser.add_argument("--model", choices=models.MODELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--processes", type=int, help="default: one for each accelerator, or 2 on a CPU")
    parser.add_argument("--rounds", type=int, default=5, help="how many seeds, from 0, in all")
    parser.add_argument("--show", action="store_true", help="run nothing")
    return parser.parse_args()


def one_run(script, seed, args, processes):
    """Run a script to its end; return what it said of itself, and what the system says of it."""
    arguments = ["--dataset", args.dataset, "--data-path", args.data_path, "--model", args.model, "--epochs",
                 str(args.epochs), "--batch-size", str(args.batch_size), "--seed", str(seed),
                 "--output-dir", f"runs/compare/{script}"]
    arguments += ["--device", args.device] if args.device else []
    arguments += ["--accum-steps", "2"] if script == "train_grad_accum.py" else []
    arguments += ["--nprocs", str(processes)] if script == "train_mp.py" else []
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(launch(0 if script in ALONE else processes, script, *arguments), cwd=ROOT,
                                   stdout=out, stderr=err, start_new_session=True)
        try:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            raise
        out.seek(0), err.seek(0)
        out, err = out.read(), err.read()
    if process.returncode:
        sys.exit(f"{script} ended with exit code {process.returncode}:\n{err[-2000:]}")
    found = re.findall(r"^epoch .*accuracy ([\d.]+) .* ([\d.]+) s  ([\d,]+) images/s(?:  ([\d,]+) MiB)?$", out, re.M)
    later = found[1:] or found
    memory = [float(line[3].replace(",", "")) for line in found if line[3]]
    return {"script": script, "seed": seed, "accuracy": float(found[-1][0]),
            "wall_seconds": time.perf_counter() - begin,
            "seconds_per_epoch": statistics.median(float(line[1]) for line in later),
            "images_per_second": statistics.median(float(line[2].replace(",", "")) for line in later),
            "peak_mib": max(memory) if memory else usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)}


def main():
    args = parse_args()
    if not args.show:
        where = machine(devices.select_device(args.device), "train*.py", "common")
        processes = args.processes or devices.count_processes(args.device)
        names = ("device", "dataset", "data_path", "model", "epochs", "batch_size")
        head = {"machine": where, "processes": processes, "arguments": {name: getattr(args, name) for name in names}}
        path = RESULTS / file_name("compare", where, args.dataset, args.model)
        old = json.loads(path.read_text()) if path.exists() else {}
        known = {**old.get("machine", {}), "date": where["date"]}  # a run may go on over midnight
        same = old | head == old | {"machine": known} and not where["commit"].endswith("-dirty")
        content = head | {"runs": old["runs"] if same else []}
        done = {(run["script"], run["seed"]) for run in content["runs"]}
        turns = [(args.scripts[(place + seed) % len(args.scripts)], seed)
                 for seed in range(args.rounds) for place in range(len(args.scripts))]
        try:
            for script, seed in tqdm([turn for turn in turns if turn not in done], "runs", disable=None):
                content["runs"].append(one_run(script, seed, args, processes))
                path.with_suffix(".new").write_text(json.dumps(content, indent=1) + "\n")
                path.with_suffix(".new").replace(path)
        except KeyboardInterrupt:
            print(f"\ninterrupted; {len(content['runs'])} runs are in {path.relative_to(ROOT)}")
    show()
    print("\n\n".join("\n".join(compare_table(content)) for content in read("compare")))


if __name__ == "__main__":
    with errors.report_errors():
        main()
