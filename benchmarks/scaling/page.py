"""The generated parts of docs/scaling.md."""
from benchmarks.scaling.model import PROCESSES
from benchmarks.tables import ROOT, table

PAGE, TEXT = ROOT / "docs/scaling.md", ROOT / "benchmarks/scaling/text.md"
MARKS = "<!-- scaling -->\n", "<!-- /scaling -->\n"
MEMORY = 80e9  # bytes of an H100
REMEDIES = {"plain": "plain DDP", "accumulate": "4 micro-batches", "bf16": "bf16 gradients", "both": "both",
            "sharded": "FSDP2"}
MEMORIES = {"ddp_sgd": "DDP, SGD", "ddp_adam": "DDP, Adam", "fsdp_adam_8": "FSDP2, Adam, 8", "fsdp_adam_64": "64",
            "fsdp_adam_1024": "1,024"}


def time_of(seconds: float) -> str:
    """Return a time that is easy to read: 0.34 ms, 15.9 ms, 1.25 s."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def size_of(size: float) -> str:
    """Return a number of bytes that is easy to read: 480 kB, 4.05 GB."""
    factor, unit = next(pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if size >= pair[0])
    return f"{size / factor:.3g} {unit}"


def render(result: dict) -> list[str]:
    """Return the generated parts of the page, in page order, from the contents of scaling.json."""
    found, tables, world, models = result["inputs"], result["tables"], result["world"], result["inputs"]["models"]
    steps = {name: time_of(model["step_seconds"]) for name, model in models.items()}
    parts = [
        table(["at 1,024 processes", *REMEDIES.values()],
              [[row, *(f"{values[key]:.0%}" if key in values else "-" for key in REMEDIES)]
               for row, values in tables["remedies"].items()]),
        table(["plain DDP, processes", *(f"{count:,}" for count in PROCESSES)],
              [[row, *(f"{value:.0%}" for value in values)] for row, values in tables["efficiency"].items()]),
        table(["", "step assumed here", "8", "64", "1,024"],
              [[row, steps[row.split(", ")[0]], *map(time_of, values)] for row, values in tables["ninety"].items()]),
        table(["", *MEMORIES.values()],
              [[name, *(size_of(values[key]) + (" (!)" if values[key] > MEMORY else "") for key in MEMORIES)]
               for name, values in tables["memory"].items()])]
    text = TEXT.read_text().format(
        **found, world=world, ranks=", ".join(map(str, world["ranks"])), shards=list(world["shards"].values()),
        size={name: size_of(4 * model["parameters"]) for name, model in models.items()},
        cnn={name: time_of(value) for name, value in found["cnn_step"].items()},
        even=models["1B transformer"]["parameters"] / world["processes"],
        gflop=found["resnet50_flops_per_image"] / 1e9, rings=tables["rings_alone"]["1B transformer, 400 Gb/s a GPU"])
    return [f"{part.strip()}\n" for part in [*parts, *text.split("\n\n")]]
