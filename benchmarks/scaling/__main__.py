"""Model how DDP's efficiency falls from 1 to 1,024 processes, and check what train_DDP.py does as one of 1,024 ranks.

    python -m benchmarks.scaling                                   # measures, simulates, writes; half a minute
    python -m benchmarks.scaling --render                          # writes tables and plot again, from the same inputs
    python -m benchmarks.scaling --parameters 25.6e6 --step 0.12   # the efficiency of your own model

It writes benchmarks/results/scaling.json and scaling.png, and the marked parts of docs/scaling.md.
"""
import json

from benchmarks.scaling import page
from benchmarks.scaling.model import LINKS, PROCESSES, compute, efficiency
from benchmarks.tables import RESULTS, fill, save, table
from common import cli, errors


def main() -> None:
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--render", action="store_true", help="use the inputs in scaling.json; measure nothing")
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
    from benchmarks.scaling.inputs import measure  # here, because these imports are slow
    from tools import plots, ranks
    path = RESULTS / "scaling.json"
    if args.render:
        result = json.loads(path.read_text())
    else:
        result = {"inputs": measure(), "world": ranks.check(ranks.simulate())}
    result["tables"] = compute(result["inputs"]["models"])
    save(path, result)
    fill(page.PAGE, page.render(result), page.MARKS)
    plots.plot_scaling()


if __name__ == "__main__":
    with errors.report_errors():
        main()
