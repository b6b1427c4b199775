"""Launch every training script as a user would, and compare them in the tables of docs/speed.md.

    pip install -r requirements.txt -r requirements/bench.txt
    python -m benchmarks.compare                                              # digits: ten minutes on two cores
    python -m benchmarks.compare --dataset fashion-mnist --batch-size 128 --rounds 3          # two hours there
    python -m benchmarks.compare --dataset cifar100 --model resnet18 --batch-size 512 --epochs 3 --device cuda
    python -m benchmarks.compare --show                                     # only the tables

For each run, the tables show the median over its epochs after the first, its last accuracy and its peak memory. On an
accelerator, this is the memory of its tensors; on a CPU, it is the resident set size of its largest process. Every run
is saved at once.
"""
import os
import shutil
import subprocess
import sys
import tempfile

from tqdm import tqdm

from benchmarks import measure, tables
from common import cli, devices


def one_run(script: str, seed: int, args, processes: int) -> dict:
    """Run a script to completion; return the figures that it prints and those that the operating system reports."""
    folder = f"runs/compare/{script}"
    shutil.rmtree(tables.ROOT / folder, ignore_errors=True)  # train_DCP.py refuses the folder of an earlier run
    command = measure.launch_script(processes, script, *measure.task_of(args, args.epochs), "--seed", str(seed),
                                    "--output-dir", folder)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=tables.ROOT, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        if process.returncode:
            sys.exit(f"{script} ended with exit code {process.returncode}:\n{err.read()}")
        epochs = list(measure.read_epochs(out))
    later = epochs[1:] or epochs
    resident = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return {"script": script, "seed": seed, "accuracy": epochs[-1]["accuracy"],
            "seconds_per_epoch": tables.spread(epoch["seconds"] for epoch in later)["median"],
            "images_per_second": tables.spread(epoch["speed"] for epoch in later)["median"],
            "peak_mib": max((epoch["peak_mib"] for epoch in epochs if "peak_mib" in epoch), default=resident)}


def main() -> None:
    scripts = measure.training_scripts()
    parser = measure.make_parser(__doc__, epochs=10, batch_size=64, rounds=5)
    parser.add_argument("--scripts", nargs="+", choices=scripts, help="default: all but train_amp.py and "
                        "train_combined.py, which need fast bf16", default=[
                            script for script in scripts if script not in ("train_amp.py", "train_combined.py")])
    parser.add_argument("--processes", type=cli.positive_int, help="default: one for each accelerator, or 2 on a CPU")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    args = parser.parse_args()
    where = measure.machine(devices.select_device(args.device), "train*.py", "common")
    processes = args.processes or devices.count_processes(args.device)
    content = {"machine": where, "processes": processes, "arguments": vars(args), "runs": []}
    turns = [] if args.show else measure.in_turns(args.scripts, args.rounds)
    for seed, script in tqdm(turns, "runs", disable=None):
        content["runs"].append(one_run(script, seed, args, processes))
        tables.save(tables.path_of("compare", where, args.dataset, args.model), content)
    for page, parts in tables.pages().items():
        tables.fill(tables.ROOT / page, parts)
    print("\n\n".join(map(tables.compare_table, tables.read("compare"))))


if __name__ == "__main__":
    with cli.report_errors():
        main()
