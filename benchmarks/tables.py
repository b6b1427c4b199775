"""The tables of README.md and docs/speed.md, and the plot, made of the files of benchmarks/results.

`python benchmarks/compare.py --show` writes them.
"""
import json
import re
import statistics
from pathlib import Path

from benchmarks.turns import name_processes, spread

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PLOT = RESULTS / "compare.png"
MARKS = "<!-- results -->\n", "<!-- /results -->\n"
SCRIPTS = ["train.py", "train_DP.py", "train_DDP.py", "train_mp.py", "train_grad_accum.py", "train_elastic.py",
           "train_amp.py"]


def file_name(kind, where, *names):
    """Return the name of the file of results of this kind, on the machine `where`, of the task that `names` tell."""
    device = re.sub(r"\W+", "-", (where["gpu"] or where["cpu"]).lower()).strip("-")
    return "-".join([kind, device, *names]) + ".json"


def compare_table(content):
    """Return the lines that show what compare.py has found."""
    args, where = content["arguments"], content["machine"]
    runs = {}
    for run in content["runs"]:
        runs.setdefault(run["script"], []).append(run)
    number = {len(each) for each in runs.values()}
    lines = [f"{args['dataset']}, {args['model']}, batch {args['batch_size']}, {args['epochs']} epochs, "
             f"{name_processes(content['processes'])}; {where['gpu'] or where['cpu']}, {where['cores']} cores "
             f"({where['vectors']}), torch {where['torch']}, commit {where['commit']}, {where['date']}; median of "
             f"{'/'.join(map(str, sorted(number)))} seed{'s' * (number != {1})} (lowest to highest):", "",
             "| script | seconds per epoch | images/s | accuracy | peak memory |", "|---|---:|---:|---:|---:|"]
    for script in sorted(runs, key=SCRIPTS.index):
        cells = []
        for name, form in (("seconds_per_epoch", "{:.2f}"), ("images_per_second", "{:,.0f}"), ("accuracy", "{:.4f}")):
            value = spread([run[name] for run in runs[script]])
            middle, low, high = (form.format(value[key]) for key in ("median", "lowest", "highest"))
            cells.append(middle if low == high else f"{middle} ({low} to {high})")
        memory = [run["peak_mib"] for run in runs[script] if run["peak_mib"]]  # not noted before 2026-11-22
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


def step_table(content):
    """Return the lines that show what step.py has found."""
    args, where, script = content["arguments"], content["machine"], content["script"]
    rates = {name: rate["median"] / 1e9 for name, rate in content["matrix_rate"].items()}
    operations, share = content["operations_per_image"] / 1e6, content["arithmetic_share"]
    threads = "" if where["gpu"] else f", {content['threads']} threads"
    lines = [f"One step (`python benchmarks/step.py`): {args['dataset']}, {args['model']}, batch {args['batch_size']}; "
             f"{where['gpu'] or where['cpu']}, {where['cores']} cores ({where['vectors']}){threads}, torch "
             f"{where['torch']}, commit {where['commit']}, {where['date']}; median of {args['rounds']} rounds (lowest "
             "to highest):", "", "| step | ms | times as fast | first step, s | peak memory |",
             "|---|---:|---:|---:|---:|"]
    for name, row in content["steps"].items():
        time, fast = row["milliseconds"], row["times_as_fast"]
        memory = f"{row['peak_mib']:,.0f} MiB" if row["peak_mib"] else "-"
        lines.append(f"| {name} | {time['median']:,.1f} ({time['lowest']:,.1f} to {time['highest']:,.1f}) | "
                     f"{fast['median']:.2f} ({fast['lowest']:.2f} to {fast['highest']:.2f}) | "
                     f"{row['first_step_seconds']:.1f} | {memory} |")
    took, waits = script["seconds"], script["waits"]
    lines += ["", f"Matrix products: {rates['float32']:,.0f} GFLOP/s in float32, {rates['bfloat16']:,.0f} in bfloat16. "
              f"Forward and backward of an image: {operations:,.1f} MFLOP; at that rate they are {share['median']:.0%} "
              f"of the step's time ({share['lowest']:.0%} to {share['highest']:.0%}). An epoch of `{args['script']}` "
              f"trains for {took['median']:.2f} s, and waits for data {waits['median']:.1%} of it (at most "
              f"{waits['highest']:.1%})."]
    return lines


def ratio_table(contents):
    """Return the lines of one table with the ratios of all that floor.py has found."""
    others = ["bare step", "usual loop", "Accelerate", "Fabric"]
    lines = ["| `train_DDP.py` is so many times as fast as | " + " | ".join(others) + " |",
             "|---|" + "---:|" * len(others)]
    for content in contents:
        args, where = content["arguments"], content["machine"]
        ratios = [content["ratios"].get(f"train_DDP.py / {other}", {}) for other in others]
        lines.append(f"| {args['model']}, {args['dataset']}, batch {args['batch_size']}, "
                     f"{name_processes(args['processes'])}, {where['gpu'] or where['cpu']} | "
                     + " | ".join(f"{ratio['median']:.2f}" if ratio else "-" for ratio in ratios) + " |")
    return lines


def read(kind):
    """Return the contents of all files of results of this kind."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]


def pages():
    """Return {page: [the text between each pair of marks on it]}, all made of the committed results."""
    compared, ratios = map(compare_table, read("compare")), ratio_table(read("floor"))
    floors, steps = map(floor_table, read("floor")), map(step_table, read("step"))
    marked = {"README.md": [compared, [ratios]], "docs/speed.md": [floors, steps]}
    return {page: ["\n" + "\n\n".join("\n".join(lines) for lines in tables) + "\n\n" for tables in parts]
            for page, parts in marked.items()}


def show():
    """Write the pages' tables and the plot from what is committed."""
    for page, parts in pages().items():
        first, *rest = (ROOT / page).read_text().split(MARKS[0])
        after = [text.split(MARKS[1])[1] for text in rest]
        (ROOT / page).write_text(first + "".join(MARKS[0] + part + MARKS[1] + text
                                                 for part, text in zip(parts, after, strict=True)))
    plot()


def plot():
    """Draw what compare.py has found, a column for each file: time, speed, accuracy and memory, with their spread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contents = read("compare")
    rows = [("seconds_per_epoch", "seconds per epoch"), ("images_per_second", "images/s"), ("accuracy", "accuracy"),
            ("peak_mib", "peak memory, MiB")]
    figure, axes = pyplot.subplots(len(rows), len(contents), figsize=(5.5 * len(contents), 9), squeeze=False)
    for column, content in enumerate(contents):
        names = sorted({run["script"] for run in content["runs"]}, key=SCRIPTS.index)
        for row, (key, label) in enumerate(rows):
            axis = axes[row][column]
            values = [[run[key] for run in content["runs"] if run["script"] == name and run[key]] for name in names]
            if not all(values):
                axis.text(0.5, 0.5, f"{label}: not noted", ha="center", va="center", transform=axis.transAxes)
                axis.set_axis_off()
                continue
            middle = [statistics.median(each) for each in values]
            spreads = [[m - min(each) for m, each in zip(middle, values, strict=True)],
                       [max(each) - m for m, each in zip(middle, values, strict=True)]]
            axis.errorbar(range(len(names)), middle, yerr=spreads, fmt="o", capsize=4)
            axis.set_ylabel(label)
            if key != "accuracy":
                axis.set_ylim(0, 1.1 * max(map(max, values)))
            axis.set_xticks(range(len(names)), [name.removesuffix(".py").removeprefix("train_") for name in names],
                            rotation=30)
        axes[0][column].set_title(f"{content['arguments']['dataset']}, {content['arguments']['model']}, "
                                  f"{content['machine']['gpu'] or content['machine']['cpu']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(PLOT, dpi=80)
