"""Predict the efficiency of DDP and of meshes on up to 1,024 processes, and check the scripts as one of 1,024 ranks.

    python -m benchmarks.scaling                                   # measures, simulates, writes; a minute
    python -m benchmarks.scaling --simulate                        # keeps the measured step times; the rest is new
    python -m benchmarks.scaling --render                          # writes tables and plot again, from the same inputs
    python -m benchmarks.scaling --parameters 25.6e6 --step 0.12   # the efficiency of your own model

It writes benchmarks/results/scaling.json and scaling.png, and the marked parts of docs/scaling.md.
"""
import json

from benchmarks.scaling import page
from benchmarks.scaling.model import LINKS, PROCESSES, compute, efficiency
from benchmarks.tables import RESULTS, fill, save, table
from common import cli, endings


def main() -> None:
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--render", action="store_true", help="use the inputs in scaling.json; measure nothing")
    parser.add_argument("--simulate", action="store_true", help="use the inputs in scaling.json; simulate the ranks")
    parser.add_argument("--parameters", type=cli.positive, help="of your model; with --step: print its efficiency")
    parser.add_argument("--step", type=cli.positive, help="seconds of its step on one GPU")
    args = parser.parse_args()
    if (args.parameters is None) != (args.step is None):
        parser.error("--parameters and --step go together")
    if args.parameters:
        model = {"parameters": args.parameters, "step_seconds": args.step, "on_gpus": True}
        print(table(["GPUs", *PROCESSES], [[where, *(f"{efficiency(model, count, link):.0%}" for count in PROCESSES)]
                                           for where, link in LINKS.items()]))
        return
    from benchmarks import plots
    from benchmarks.scaling import meshes, placement, ranks  # here, because these imports are slow
    from benchmarks.scaling.inputs import measure
    path = RESULTS / "scaling.json"
    result = json.loads(path.read_text()) if args.render or args.simulate else {"inputs": measure()}
    if not args.render:
        result |= {"world": ranks.check(ranks.simulate()), "placed": placement.check()}
    result["tables"] = compute(result["inputs"]["models"]) | meshes.compute()
    save(path, result)
    fill(page.PAGE, page.render(result), page.MARKS)
    plots.plot_scaling()


if __name__ == "__main__":
    with endings.report_errors():
        main()
