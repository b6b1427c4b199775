"""Results files, and the tables in docs/speed.md made from them (`python -m benchmarks.compare --show`)."""
import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
MARKS = "<!-- results -->\n", "<!-- /results -->\n"
OTHERS = ["bare step", "usual loop", "Accelerate", "Fabric"]  # contenders of floor.py, for ratio_table


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the median, the lowest and the highest of some numbers."""
    values = list(values)
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def ratio(one: list[float], other: list[float]) -> dict[str, float]:
    """Return the spread of the ratios of two lists of measurements, round by round."""
    return spread(a / b for a, b in zip(one, other, strict=True))


def save(path: Path, content: dict) -> None:
    """Write a results file atomically."""
    path.with_suffix(".new").write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".new").replace(path)


def read(kind: str) -> list[dict]:
    """Return the contents of all results files of this kind."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]


def path_of(kind: str, where: dict, *names: str) -> Path:
    """Return the path of the results of this kind, from the machine `where`, for the task described by `names`."""
    device = re.sub(r"\W+", "-", (where["gpu"] or where["cpu"]).lower()).strip("-")
    return RESULTS / ("-".join([kind, device, *names]) + ".json")


def table(head: list[str], rows: Iterable[list]) -> str:
    """Return a Markdown table, with all columns but the first aligned right."""
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in [head, *rows]]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]])


def around(value: dict[str, float], form: str = ".2f") -> str:
    """Return a spread as "median (lowest to highest)", or the median alone if all are the same."""
    middle, low, high = (f"{value[part]:{form}}" for part in ("median", "lowest", "highest"))
    return middle if low == high else f"{middle} ({low} to {high})"


def count(number: int, noun: str, ending: str = "s") -> str:
    """Return "1 process" or "2 processes"."""
    return f"{number} {noun}{ending * (number > 1)}"


def caption(content: dict, rounds: str, *task: str) -> str:
    """Return the line above a table: task, hardware, versions, and the number of `rounds`."""
    args, where = content["arguments"], content["machine"]
    task = ", ".join([args["dataset"], args["model"], f"batch {args['batch_size']}", *task])
    figures = rounds if rounds == "1 launch" else f"median of {rounds} (lowest to highest)"
    threads = f", {count(content['threads'], 'thread')}" if "threads" in content and not where["gpu"] else ""
    return (f"{task}; {where['gpu'] or where['cpu']}, {where['cores']} cores ({where['vectors']}){threads}, torch "
            f"{where['torch']}, commit {where['commit']}, {where['date']}; {figures}:\n\n")


def compare_table(content: dict) -> str:
    """Return a table of compare.py's results."""
    forms, rows = {"seconds_per_epoch": ".2f", "images_per_second": ",.0f", "accuracy": ".4f"}, []
    for script in sorted({run["script"] for run in content["runs"]}):
        runs = [run for run in content["runs"] if run["script"] == script]
        rows.append([f"`{script}`", *(around(spread(run[name] for run in runs), form) for name, form in forms.items()),
                     f"{max(run['peak_mib'] for run in runs):,.0f} MiB"])
    seeds = len({run["seed"] for run in content["runs"]})
    return caption(content, count(seeds, "seed"), count(content["arguments"]["epochs"], "epoch"),
                   count(content["processes"], "process", "es")) + table(
        ["script", "seconds per epoch", "images/s", "accuracy", "peak memory"], rows)


def floor_table(content: dict) -> str:
    """Return a table of floor.py's results."""
    args = content["arguments"]
    rows = [[name, around(row["images_per_second"], ",.0f"), around(row["of_the_bare_step"]),
             f"{row['start_up_seconds']:.1f}", f"{max(0, row['between_epochs_seconds']['median']):.2f}"]
            for name, row in content["table"].items()]
    ratios = "; ".join(f"{name} {value['median']:.2f}" for name, value in content["ratios"].items())
    return ("Interleaved (`python -m benchmarks.floor`): "
            + caption(content, count(args["rounds"], "round"), count(args["processes"], "process", "es"))
            + table(["loop", "images/s", "relative to bare step", "start-up, s", "between epochs, s"], rows)
            + f"\n\n{ratios}.")


def step_table(content: dict) -> str:
    """Return a table of step.py's results."""
    args, script, share = content["arguments"], content["script"], content["arithmetic_share"]
    rates = {name: rate["median"] / 1e9 for name, rate in content["matrix_rate"].items()}
    rows = [[name, around(row["milliseconds"], ",.1f"), around(row["times_as_fast"]),
             f"{row['first_step_seconds']:.1f}", f"{row['peak_mib']:,.0f} MiB" if row["peak_mib"] else "-"]
            for name, row in content["steps"].items()]
    return ("One step (`python -m benchmarks.step`): " + caption(content, count(args["rounds"], "round"))
            + table(["step", "ms", "relative speed", "first step, s", "peak memory"], rows)
            + f"\n\nMatrix products run at {rates['float32']:,.0f} GFLOP/s in float32 and {rates['bfloat16']:,.0f} in "
            f"bfloat16. The forward and backward passes of one image take {content['operations_per_image'] / 1e6:,.1f} "
            f"MFLOP. At the rate of the matrix products, these passes would take {around(share, '.0%')} of the step's "
            f"time. `{args['script']}` trains for {script['seconds']['median']:.2f} s per epoch. It waits for data for "
            f"{script['waits']['median']:.1%} of that time (median; highest: {script['waits']['highest']:.1%}).")


def memory_table(content: dict) -> str:
    """Return a table of memory.py's results: the memory of each launch's largest process, in MiB."""
    def largest(run: dict, when: str, *parts: str) -> float:
        return max(sum(rank[when][part] for part in parts or rank[when]) for rank in run["ranks"]) / 2**20

    rows = []
    if content["arguments"]["dataset"] == "tokens":  # the meshes of the language model
        head = ["script", "processes", "tokens per window", "held", "predicted", "peak in a step", "predicted"]
        for run in content["runs"]:
            pairs = [(largest(run, when), run["predicted"][when] / 2**20) for when in ("held", "peak")]
            rows.append([f"`{run['script']}`", run["processes"], run["length"],
                         *(f"{value:,.0f}" for pair in pairs for value in pair)])
    else:
        head = ["script", "processes", "weights", "gradients", "optimizer", "held", "relative to DDP",
                "peak in a step", "relative to DDP"]
        columns = [("held", "weights"), ("held", "gradients", "buckets"), ("held", "optimizer"),
                   ("held", "weights", "gradients", "buckets", "optimizer"), ("peak",)]
        ddp = {run["processes"]: run for run in content["runs"] if run["script"] == "train_DDP.py"}
        for run in content["runs"]:
            rows.append([f"`{run['script']}`", run["processes"]])
            for number, column in enumerate(columns):
                size, other = largest(run, *column), ddp.get(run["processes"])
                rows[-1].append(f"{size:,.1f}")
                if number >= 3:
                    rows[-1].append(f"{size / largest(other, *column):.2f}" if other else "-")
    return ("Memory (`python -m benchmarks.memory`), MiB of the largest process: " + caption(content, "1 launch")
            + table(head, rows))


def sharding_table(content: dict) -> str:
    """Return the tables of sharding.py's results: the step, the bubble and the wait for a checkpoint."""
    speed, stages = content["steps"]["FSDP / DDP"], content["processes"]
    seconds = {script: around(spread(each)) for script, each in content["steps"]["seconds"].items()}
    bubbles = [[f"{number} micro-batches", f"{(stages - 1) / (int(number) + stages - 1):.0%}",
                around(spread(shares), ".0%")] for number, shares in content["bubbles"].items()]
    waits = [[f"`{script}`", around(run["waits"]), around(run["epoch"], ".1f"),
              f"{run['waits']['median'] / run['epoch']['median']:.1%}"] for script, run in content["waits"].items()]
    return ("Sharding (`python -m benchmarks.sharding`): "
            + caption(content, count(content["arguments"]["rounds"], "round"), count(stages, "process", "es"))
            + table(["script", "seconds per step"], [[f"`{script}`", text] for script, text in seconds.items()])
            + f"\n\nA step of `train_FSDP.py` is {around(speed)} times as fast as one of `train_DDP.py`.\n\n"
            + table([f"`train_PP.py`, {stages} stages", "predicted bubble", "share of idle time"], bubbles)
            + "\n\n" + table(["script", "wait per checkpoint, s", "epoch, s", "relative to the epoch"], waits))


def language_table(content: dict) -> str:
    """Return a table of language.py's results."""
    args, rows = content["arguments"], []
    for name, row in content["table"].items():
        reached = [number for number, loss in enumerate(content["losses"], 1) if loss <= row["val_loss"]]
        rows.append([name, f"{row['parameters']:,}", around(row["tokens_per_second"], ",.0f"), around(row["relative"]),
                     f"{row['val_loss']:.4f}", f"{reached[0]} of {args['epochs']}" if reached else "-"])
    operators = [[name, *("{all} ({products}, {casts})".format(**counts) for counts in each.values())]
                 for name, each in content.get("operators", {}).items()]
    needed = ("\n\nOperators of one block on a CPU (among them, matrix products and casts):\n\n"
              + table(["model", *content["operators"]["nanoGPT"]], operators)) if operators else ""
    return ("Language (`python -m benchmarks.language`): "
            + caption(content, count(args["epochs"] - 1, "round"), f"{args['length']} tokens per window",
                      f"{args['epochs'] * (args['windows'] // args['batch_size']):,} steps")
            + table(["program", "parameters", "tokens/s", "speed of language/train.py relative to this",
                     "validation loss", "epochs until language/train.py reaches this loss"], rows) + needed)


def verify_table(content: dict) -> str:
    """Return a table of verify.py's results, for verify/README.md."""
    where, rounds = content["machine"], content["arguments"]["rounds"]
    rows = [[name, around(row["relative"]["verify"]), around(row["relative"]["float64"]),
             *(f"{row['peak_mib'][way]['median']:,.0f} MiB" for way in ("plain", "float64", "verify"))]
            for name, row in content["table"].items()]
    return (f"{where['cpu']}, {where['cores']} cores ({where['vectors']}), 1 thread, torch {where['torch']}, commit "
            f"{where['commit']}, {where['date']}; median of {count(rounds, 'round')} (lowest to highest):\n\n"
            + table(["program", "CPU time of `verify`", "of the commands in float64", "peak memory of a command",
                     "in float64", "recorded"], rows))


def ratio_table(contents: list[dict]) -> str:
    """Return one table with the ratios from all results of floor.py."""
    rows = []
    for content in contents:
        args, where = content["arguments"], content["machine"]
        ratios = [content["ratios"].get(f"train_DDP.py / {other}") for other in OTHERS]
        if not any(ratios):  # the detector
            continue
        rows.append([f"{args['model']}, {args['dataset']}, batch {args['batch_size']}, "
                     f"{count(args['processes'], 'process', 'es')}, {where['gpu'] or where['cpu']}",
                     *(f"{value['median']:.2f}" if value else "-" for value in ratios)])
    return table(["speed of `train_DDP.py`, divided by that of", *OTHERS], rows)


def pages() -> dict[str, list[str]]:
    """Return the texts between each page's pairs of marks, generated from the committed results."""
    floors, memory = read("floor"), read("memory")
    meshes = [content for content in memory if content["arguments"]["dataset"] == "tokens"]
    parts = [map(compare_table, read("compare")), [ratio_table(floors)], map(floor_table, floors),
             map(step_table, read("step")), [memory_table(content) for content in memory if content not in meshes],
             map(sharding_table, read("sharding")), map(language_table, read("language"))]
    return {page: ["\n" + "\n\n".join(tables) + "\n\n" for tables in found]
            for page, found in (("docs/speed.md", parts), ("docs/scaling.md", [map(memory_table, meshes)]))}


def fill(page: Path, parts: list[str], marks: tuple[str, str] = MARKS) -> None:
    """Write `parts` between a page's pairs of marks."""
    first, *rest = page.read_text().split(marks[0])
    after = [text.split(marks[1])[1] for text in rest]
    page.write_text(first + "".join(marks[0] + part + marks[1] + text
                                    for part, text in zip(parts, after, strict=True)))
