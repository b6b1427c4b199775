"""Predict the efficiency of DDP and of meshes on up to 1,024 processes.

    python -m benchmarks.scaling                                  # writes the marked parts of docs/scaling.md
    python -m benchmarks.scaling --parameters 25.6e6 --step 0.12  # the efficiency of your own model
"""
from benchmarks.scaling import meshes
from benchmarks.scaling import model as ddp
from benchmarks.tables import ROOT, fill, table
from common import cli

PAGE, TEXT = ROOT / "docs/scaling.md", ROOT / "benchmarks/scaling/text.md"
MARKS = "<!-- scaling -->\n", "<!-- /scaling -->\n"
SIZES = {"3 billion parameters": 3e9, "7 billion parameters": 7e9, "70 billion parameters": 70e9}
MEMORY = 80e9  # bytes of an H100
# bytes per parameter: weights 4, gradients (views into DDP's buckets) 4, momentum 4 or Adam's two averages 8
MEMORIES = {"DDP, SGD": 12, "DDP, Adam": 16, "FSDP2, Adam, on 8": 16 / 8, "on 64": 16 / 64, "on 1,024": 16 / 1024}
KINDS = ["FSDP2", "FSDP2, TP", "FSDP2, PP", "FSDP2, TP, PP"]


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
    mesh = "x".join(map(str, each["plan"][:3])) + " r" * each["plan"].recompute
    if not each["fits"]:
        return f"{mesh}, {size_of(each['bytes'])} (!)"
    mark = "**" if kind == best else ""
    return f"{mark}{mesh}, {each['bytes'] / 1e9:.0f} GB, {each['efficiency']:.0%}{mark}"


def render() -> list[str]:
    """Return the generated parts of the page, in page order."""
    fast, slow = ddp.LINKS["400 Gb/s per GPU"], ddp.LINKS["100 Gb/s per host"]
    remedies, plain, plans = [], [], []
    for name, model in ddp.MODELS.items():
        for where, link in ddp.LINKS.items():
            if "GPU" in where and not model["on_gpus"]:
                continue
            row, step, sharded = f"{name}, {where}", model["step_seconds"], "-"
            if "units" in model:
                sharded = f"{step / ddp.sharded_step_time(model, ddp.WORLD, link):.0%}"
            found = [f"{ddp.efficiency(model, ddp.WORLD, link, **each):.0%}" for each in ddp.REMEDIES.values()]
            limits = [ddp.shortest_step(model, count, link) for count in (8, 64, ddp.WORLD)]
            remedies.append([row, *found, sharded, *map(time_of, [step, *limits])])
            plain.append([row, *(f"{ddp.efficiency(model, count, link):.0%}" for count in ddp.PROCESSES)])
    for name, model in meshes.MODELS.items():
        for gpus in meshes.GPUS:
            best, other = (meshes.choose(model, gpus, link) for link in (fast, slow))
            plans.append([f"{name}, {gpus:,}", *(plan_of(best, kind) for kind in KINDS), plan_of(other)])
    sizes = {name: model["parameters"] for name, model in ddp.MODELS.items()}
    memory = [[name, *(size_of(each * size) + " (!)" * (each * size > MEMORY) for each in MEMORIES.values())]
              for name, size in (sizes | SIZES).items()]
    text = TEXT.read_text().format(
        **ddp.STEP, models=ddp.MODELS, batch=meshes.BATCH, sums=meshes.SUMS, limit=size_of(meshes.LIMIT),
        titan=meshes.torchtitan(), size={name: size_of(4 * size) for name, size in sizes.items()},
        ms=ddp.STEP["steps"]["as in the scripts"]["milliseconds"], gflop=ddp.RESNET_FLOP / 1e9,
        rings=ddp.efficiency(ddp.MODELS["1B transformer"], ddp.WORLD, fast, trees=False))
    head = ["at 1,024 processes", *ddp.REMEDIES, "FSDP2", "assumed step", "step for 90% on 8", "on 64", "on 1,024"]
    return [f"{part.strip()}\n" for part in (
        table(head, remedies), table(["plain DDP on", *(f"{count:,}" for count in ddp.PROCESSES)], plain),
        table(["", *MEMORIES], memory), table([
            "model, GPUs with 400 Gb/s each", *KINDS, "best at 100 Gb/s per host"], plans), text)]


def main() -> None:
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--parameters", type=cli.positive, help="of your model; with --step, print its efficiency")
    parser.add_argument("--step", type=cli.positive, help="seconds of your model's step on one GPU")
    args = parser.parse_args()
    if (args.parameters is None) != (args.step is None):
        parser.error("--parameters and --step go together")
    if args.parameters:
        model = {"parameters": args.parameters, "step_seconds": args.step, "on_gpus": True}
        rows = [[where, *(f"{ddp.efficiency(model, count, link):.0%}" for count in ddp.PROCESSES)]
                for where, link in ddp.LINKS.items()]
        print(table(["GPUs", *ddp.PROCESSES], rows))
    else:
        fill(PAGE, render(), MARKS)


if __name__ == "__main__":
    with cli.report_errors():
        main()
