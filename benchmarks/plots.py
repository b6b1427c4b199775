"""Draw the benchmark plots from the results files: `python -m benchmarks.plots` draws all of them.

`python -m benchmarks.compare` and `python -m benchmarks.scaling` also redraw their own plot.
"""
import json

from matplotlib.figure import Figure

from benchmarks.scaling.model import LINKS, efficiency
from benchmarks.scaling.page import time_of
from benchmarks.tables import RESULTS, read, spread

COMPARED = {"seconds_per_epoch": "seconds per epoch", "images_per_second": "images/s", "accuracy": "accuracy",
            "peak_mib": "peak memory, MiB"}


def plot_compare() -> None:
    """Plot the results of compare.py, with their spread: one column per results file, one row per quantity."""
    contents = read("compare")
    figure = Figure((5.5 * len(contents), 9))
    axes = figure.subplots(len(COMPARED), len(contents), squeeze=False)
    for column, content in zip(axes.T, contents):
        names = sorted({run["script"] for run in content["runs"]})
        for axis, (key, label) in zip(column, COMPARED.items()):
            values = [[run[key] for run in content["runs"] if run["script"] == name and run[key]] for name in names]
            if not all(values):
                axis.text(0.5, 0.5, f"{label}: not measured", ha="center", va="center", transform=axis.transAxes)
                axis.set_axis_off()
                continue
            spreads = [spread(each) for each in values]
            low, middle, high = ([each[part] for each in spreads] for part in ("lowest", "median", "highest"))
            lengths = [[b - a for a, b in zip(low, middle)], [b - a for a, b in zip(middle, high)]]
            axis.errorbar([name[:-3].removeprefix("train_") for name in names], middle, lengths, fmt="o", capsize=4)
            axis.set_ylabel(label)
            for text in axis.get_xticklabels():
                text.set(rotation=30, ha="right", rotation_mode="anchor")
            if key != "accuracy":
                axis.set_ylim(0, 1.1 * max(high))
        args, where = content["arguments"], content["machine"]
        column[0].set_title(f"{args['dataset']}, {args['model']}, {where['gpu'] or where['cpu']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(RESULTS / "compare.png", dpi=80)


def plot_memory() -> None:
    """Plot the results of memory.py: a panel per number of processes, the largest process's peak as stacked bars."""
    content, = (each for each in read("memory") if each["arguments"]["model"] == "vit_base")
    colors = {"weights": "#2f6fb3", "gradients": "#c2691a", "buckets": "#e3a857", "optimizer": "#2e8547",
              "other": "#bbbbbb"}
    panels = sorted({run["processes"] for run in content["runs"]})
    figure = Figure((11, 3.6), layout="constrained")
    for axis, processes in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        runs = [run for run in content["runs"] if run["processes"] == processes]
        largest = [max((rank["peak"] for rank in run["ranks"]), key=lambda parts: sum(parts.values())) for run in runs]
        below = [0.0] * len(runs)
        for part, color in colors.items():
            heights = [peak[part] / 2**20 for peak in largest]
            axis.bar([run["script"][6:-3] for run in runs], heights, bottom=below, color=color, label=part)
            below = [low + height for low, height in zip(below, heights)]
        axis.set_title(f"{processes} process{'es' * (processes > 1)}", fontsize=10)
    figure.axes[0].set_ylabel("peak in a step, MiB")
    figure.axes[-1].legend(fontsize="small")
    figure.savefig(RESULTS / "memory.png", dpi=110)


def plot_scaling() -> None:
    """Plot efficiency against the number of processes: one panel per model, one line per link."""
    models = json.loads((RESULTS / "scaling.json").read_text())["inputs"]["models"]
    counts, figure = [2 ** power for power in range(11)], Figure((11, 3.6), layout="constrained")
    axes = figure.subplots(1, len(models), sharey=True)
    for axis, (name, model) in zip(axes, models.items()):
        for color, (where, link) in zip(("#c2691a", "#2f6fb3", "#2e8547"), LINKS.items()):
            for compress, style in ((1, "-"), (2, ":")) if model["on_gpus"] or "GPU" not in where else ():
                axis.plot(counts, [efficiency(model, count, link, compress=compress) for count in counts], style,
                          color=color, label=where if compress == 1 else None)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 8, 64, 1024], ["1", "8", "64", "1,024"])
        axis.set(title=f"{name}, {time_of(model['step_seconds'])} a step", xlabel="processes", ylim=(0, 1.03))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("efficiency, t(1) / t(p)")
    axes[-1].plot([], [], ":", color="grey", label="bf16 gradients")
    axes[-1].legend(loc="lower left", fontsize="small")
    figure.savefig(RESULTS / "scaling.png", dpi=110)


if __name__ == "__main__":
    plot_compare()
    plot_memory()
    plot_scaling()
