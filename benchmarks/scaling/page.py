"""The generated parts of docs/scaling.md."""
from benchmarks.scaling import meshes
from benchmarks.scaling.model import PROCESSES
from benchmarks.tables import ROOT, table

PAGE, TEXT = ROOT / "docs/scaling.md", ROOT / "benchmarks/scaling/text.md"
MARKS = "<!-- scaling -->\n", "<!-- /scaling -->\n"
MEMORY = 80e9  # bytes of an H100
REMEDIES = {"plain": "plain DDP", "accumulate": "4 micro-batches", "bf16": "bf16 gradients", "both": "both",
            "sharded": "FSDP2"}
KINDS = ["FSDP2", "FSDP2, TP", "FSDP2, PP", "FSDP2, TP, PP"]
MEMORIES = {"ddp_sgd": "DDP, SGD", "ddp_adam": "DDP, Adam", "fsdp_adam_8": "FSDP2, Adam, on 8", "fsdp_adam_64": "on 64",
            "fsdp_adam_1024": "on 1,024"}


def time_of(seconds: float) -> str:
    """Return a time that is easy to read: 0.34 ms, 15.9 ms, 1.25 s."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def size_of(size: float) -> str:
    """Return a number of bytes that is easy to read: 480 kB, 4.05 GB."""
    units = (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")
    factor, unit = next(pair for pair in units if size >= pair[0])
    return f"{size / factor:.3g} {unit}"


def plan_of(found: dict[str, dict], kind: str | None = None) -> str:
    """Return what `meshes.choose` found for one kind of mesh, or for the best of all: 32x2x1 r, 45 GB, 93%."""
    best = max(found, key=lambda name: meshes.rank(found[name]))
    each = found[kind or best]
    mesh = "x".join(map(str, each["plan"][:3])) + " r" * each["plan"][4]
    if not each["fits"]:
        return f"{mesh}, {size_of(each['bytes'])} (!)"
    mark = "**" if kind == best else ""
    return f"{mark}{mesh}, {each['bytes'] / 1e9:.0f} GB, {each['efficiency']:.0%}{mark}"


def render(result: dict) -> list[str]:
    """Return the generated parts of the page, in page order, from the contents of scaling.json."""
    found, tables, models = result["inputs"], result["tables"], result["inputs"]["models"]
    steps = {name: time_of(model["step_seconds"]) for name, model in models.items()}
    parts = [
        table(["at 1,024 processes", *REMEDIES.values(), "assumed step", "step for 90% on 8", "on 64", "on 1,024"],
              [[row, *(f"{values[key]:.0%}" if key in values else "-" for key in REMEDIES),
                steps[row.split(", ")[0]], *map(time_of, tables["ninety"][row])]
               for row, values in tables["remedies"].items()]),
        table(["plain DDP on", *(f"{count:,}" for count in PROCESSES)],
              [[row, *(f"{value:.0%}" for value in values)] for row, values in tables["plain"].items()]),
        table(["", *MEMORIES.values()],
              [[name, *(size_of(values[key]) + (" (!)" if values[key] > MEMORY else "") for key in MEMORIES)]
               for name, values in tables["memory"].items()]),
        table(["model, GPUs with 400 Gb/s each", *KINDS, "best at 100 Gb/s per host"],
              [[row, *(plan_of(found, kind) for kind in KINDS), plan_of(tables["meshes"]["100 Gb/s per host"][row])]
               for row, found in tables["meshes"]["400 Gb/s per GPU"].items()])]
    text = TEXT.read_text().format(
        **found, batch=meshes.BATCH, sums=meshes.SUMS, limit=size_of(meshes.LIMIT), titan=tables["torchtitan"],
        size={name: size_of(4 * model["parameters"]) for name, model in models.items()},
        cnn={name: time_of(value) for name, value in found["cnn_step"].items()},
        gflop=found["resnet50_flops_per_image"] / 1e9, rings=tables["rings_alone"]["1B transformer, 400 Gb/s per GPU"])
    return [f"{part.strip()}\n" for part in [*parts, text]]
