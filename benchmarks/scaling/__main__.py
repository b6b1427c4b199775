"""Predict the efficiency of DDP and of meshes on up to 1,024 processes.

    python -m benchmarks.scaling                                   # measures the inputs and writes the page
    python -m benchmarks.scaling --render                          # writes the tables again, from the same inputs
    python -m benchmarks.scaling --parameters 25.6e6 --step 0.12   # the efficiency of your own model

The command writes benchmarks/results/scaling.json and the marked parts of docs/scaling.md.
"""
import json

from benchmarks.scaling import meshes, page
from benchmarks.scaling.model import LINKS, PROCESSES, compute, efficiency
from benchmarks.tables import RESULTS, fill, save, table
from common import cli, endings


def main() -> None:
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--render", action="store_true", help="use the inputs in scaling.json; measure nothing")
    parser.add_argument("--parameters", type=cli.positive, help="of your model; with --step, print its efficiency")
    parser.add_argument("--step", type=cli.positive, help="seconds of your model's step on one GPU")
    args = parser.parse_args()
    if (args.parameters is None) != (args.step is None):
        parser.error("--parameters and --step go together")
    if args.parameters:
        model = {"parameters": args.parameters, "step_seconds": args.step, "on_gpus": True}
        print(table(["GPUs", *PROCESSES], [[where, *(f"{efficiency(model, count, link):.0%}" for count in PROCESSES)]
                                           for where, link in LINKS.items()]))
        return
    from benchmarks.scaling.inputs import measure  # here, because its imports are slow
    path = RESULTS / "scaling.json"
    inputs = json.loads(path.read_text())["inputs"] if args.render else measure()
    result = {"inputs": inputs, "tables": compute(inputs["models"]) | meshes.compute()}
    save(path, result)
    fill(page.PAGE, page.render(result), page.MARKS)


if __name__ == "__main__":
    with endings.report_errors():
        main()
