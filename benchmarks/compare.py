"""Every training script as a user would launch it, side by side: the table and the plot of README.md.

    pip install -r requirements.txt -r benchmarks/requirements.txt
    python benchmarks/compare.py                                             # digits: some five minutes on two cores
    python benchmarks/compare.py --dataset fashion-mnist --rounds 1          # 25 minutes there
    python benchmarks/compare.py --dataset cifar100 --model resnet18 --batch-size 512 --epochs 3 --device cuda
    python benchmarks/compare.py --show                                      # only the table and the plot

Each run is a process of its own, or a launch of torchrun; a round has one run of each script, in another order each
time. A run counts with the median of its epochs after the first, and the accuracy of its last. What has run is kept in
a file of benchmarks/results, one for each machine and task, after every run: an interruption loses only the run that
it hits, and the next call adds to the file if commit, versions and arguments are the same.
"""
import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.turns import launch, machine, name_processes, spread  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
PLOT = RESULTS / "compare.png"
ALONE = ["train.py", "train_DP.py", "train_mp.py"]  # started by plain python
SCRIPTS = ["train.py", "train_DP.py", "train_DDP.py", "train_mp.py", "train_grad_accum.py", "train_elastic.py",
           "train_amp.py"]
MARKS = "<!-- results -->\n", "<!-- /results -->\n"


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: an accelerator, else cpu")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS[:-1],
                        help="default: all but train_amp.py, which wants a device that is fast at bf16")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-path", default="data")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--processes", type=int, help="default: one for each accelerator, or 2 on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--show", action="store_true", help="run nothing")
    return parser.parse_args()


def one_run(script, args, processes):
    """Run a script to its end; return what it said of itself, and what the system says of it."""
    arguments = ["--dataset", args.dataset, "--data-path", args.data_path, "--model", args.model, "--epochs",
                 str(args.epochs), "--batch-size", str(args.batch_size), "--output-dir", f"runs/compare/{script}"]
    arguments += ["--device", args.device] if args.device else []
    arguments += ["--accum-steps", "2"] if script == "train_grad_accum.py" else []
    arguments += ["--nprocs", str(processes)] if script == "train_mp.py" else []
    begin = time.perf_counter()
    process = subprocess.Popen(launch(0 if script in ALONE else processes, script, *arguments), cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, err = process.communicate()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        process.wait()
        raise
    if process.returncode:
        sys.exit(f"{script} ended with exit code {process.returncode}:\n{err[-2000:]}")
    found = re.findall(r"^epoch .*accuracy ([\d.]+) .* ([\d.]+) s  ([\d,]+) images/s(?:  ([\d,]+) MiB)?$", out, re.M)
    later = found[1:] or found
    memory = [float(line[3].replace(",", "")) for line in found if line[3]]
    return {"script": script, "accuracy": float(found[-1][0]), "wall_seconds": time.perf_counter() - begin,
            "seconds_per_epoch": statistics.median(float(line[1]) for line in later),
            "images_per_second": statistics.median(float(line[2].replace(",", "")) for line in later),
            "peak_mib": max(memory) if memory else None}


def table(content):
    """Return the lines of one file's table."""
    args, where = content["arguments"], content["machine"]
    runs = {}
    for run in content["runs"]:
        runs.setdefault(run["script"], []).append(run)
    number = {len(each) for each in runs.values()}
    lines = [f"{args['dataset']}, {args['model']}, batch {args['batch_size']}, {args['epochs']} epochs, "
             f"{name_processes(content['processes'])}; {where['gpu'] or where['cpu']}, {where['cores']} cores "
             f"({where['vectors']}), torch {where['torch']}, commit {where['commit']}, {where['date']}; median of "
             f"{'/'.join(map(str, sorted(number)))} (lowest to highest):", "",
             "| script | seconds per epoch | images/s | accuracy | peak memory |", "|---|---:|---:|---:|---:|"]
    for script in sorted(runs, key=SCRIPTS.index):
        cells = []
        for name, form in (("seconds_per_epoch", "{:.2f}"), ("images_per_second", "{:,.0f}"), ("accuracy", "{:.4f}")):
            value = spread([run[name] for run in runs[script]])
            middle, low, high = (form.format(value[key]) for key in ("median", "lowest", "highest"))
            cells.append(middle if low == high else f"{middle} ({low} to {high})")
        memory = [run["peak_mib"] for run in runs[script] if run["peak_mib"]]
        cells.append(f"{max(memory):,.0f} MiB" if memory else "-")
        lines.append(f"| `{script}` | {' | '.join(cells)} |")
    return lines


def floor_table(content):
    """Return the lines that show what floor.py has found."""
    args, where = content["arguments"], content["machine"]
    lines = [f"By turns (`python benchmarks/floor.py`): {args['dataset']}, {args['model']}, batch {args['batch_size']},"
             f" {name_processes(args['processes'])}; {where['gpu'] or where['cpu']}, {where['cores']} cores "
             f"({where['vectors']}), torch {where['torch']}, commit {where['commit']}, {where['date']}; median of "
             f"{args['rounds']} rounds (lowest to highest):", "",
             "| what | images/s | of the bare step | start-up, s | between epochs, s |", "|---|---:|---:|---:|---:|"]
    for name, row in content["table"].items():
        speed, over = row["images_per_second"], row["of_the_bare_step"]
        lines.append(f"| {name} | {speed['median']:,.0f} ({speed['lowest']:,.0f} to {speed['highest']:,.0f}) | "
                     f"{over['median']:.2f} ({over['lowest']:.2f} to {over['highest']:.2f}) | "
                     f"{row['start_up_seconds']:.1f} | {max(0, row['between_epochs_seconds']['median']):.2f} |")
    lines.append("")
    lines.append("; ".join(f"{name} {ratio['median']:.2f}" for name, ratio in content["ratios"].items()) + ".")
    return lines


def all_tables():
    """Return the text between README's marks: the tables of all committed results."""
    tables = [form(json.loads(path.read_text())) for form, pattern in
              ((table, "compare-*.json"), (floor_table, "floor-*.json")) for path in sorted(RESULTS.glob(pattern))]
    return "\n" + "\n\n".join("\n".join(lines) for lines in tables) + "\n\n"


def plot():
    """Draw all results, a column for each file: seconds per epoch, images/s and accuracy, with their spread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = sorted(RESULTS.glob("compare-*.json"))
    rows = [("seconds_per_epoch", "seconds per epoch"), ("images_per_second", "images/s"), ("accuracy", "accuracy"),
            ("peak_mib", "peak memory, MiB")]
    figure, axes = pyplot.subplots(len(rows), len(paths), figsize=(5.5 * len(paths), 9), squeeze=False)
    for column, path in enumerate(paths):
        content = json.loads(path.read_text())
        names = sorted({run["script"] for run in content["runs"]}, key=SCRIPTS.index)
        for row, (key, label) in enumerate(rows):
            axis = axes[row][column]
            values = [[run[key] for run in content["runs"] if run["script"] == name and run[key]] for name in names]
            if not any(values):
                axis.text(0.5, 0.5, "not counted on a CPU", ha="center", va="center", transform=axis.transAxes)
                axis.set_axis_off()
                continue
            middle = [statistics.median(each) for each in values]
            spreads = [[m - min(each) for m, each in zip(middle, values, strict=True)],
                       [max(each) - m for m, each in zip(middle, values, strict=True)]]
            axis.errorbar(range(len(names)), middle, yerr=spreads, fmt="o", capsize=4)
            axis.set_ylabel(label)
            if key != "accuracy":
                axis.set_ylim(bottom=0)
            axis.set_xticks(range(len(names)), [name.removesuffix(".py").removeprefix("train_") for name in names],
                            rotation=30)
        axes[0][column].set_title(f"{content['arguments']['dataset']}, {content['arguments']['model']}, "
                                  f"{content['machine']['gpu'] or content['machine']['cpu']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=80)


def show():
    """Write README's tables and the plot from what is committed."""
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(MARKS[0])
    readme.write_text(before + MARKS[0] + all_tables() + MARKS[1] + rest.split(MARKS[1])[1])
    plot()


def main():
    args = parse_args()
    if not args.show:
        where = machine()
        import torch

        processes = args.processes or max(2 if args.device == "cpu" else 0, torch.accelerator.device_count()) or 2
        names = ("device", "dataset", "data_path", "model", "epochs", "batch_size")
        head = {"machine": where, "processes": processes, "arguments": {name: getattr(args, name) for name in names}}
        slug = re.sub(r"\W+", "-", (where["gpu"] or where["cpu"]).lower()).strip("-")
        path = RESULTS / f"compare-{slug}-{args.dataset}-{args.model}.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        same = all(old.get(key) == value for key, value in head.items())
        content = head | {"runs": old["runs"] if same else []}
        orders = [args.scripts[number % len(args.scripts):] + args.scripts[:number % len(args.scripts)]
                  for number in range(args.rounds)]
        try:
            for script in tqdm([script for order in orders for script in order], "runs", disable=None):
                content["runs"].append(one_run(script, args, processes))
                path.write_text(json.dumps(content, indent=1) + "\n")
        except KeyboardInterrupt:
            print(f"\ninterrupted; {len(content['runs'])} runs are in {path.relative_to(ROOT)}")
    show()
    print(all_tables())


if __name__ == "__main__":
    main()
