"""How near the scripts are to the floor, and how far ahead of the usual loops: ratios, by turns, from one run.

    pip install -r requirements.txt -r benchmarks/requirements.txt
    python benchmarks/floor.py                                                    # some five minutes on two cores
    python benchmarks/floor.py --model resnet18 --rounds 3 --epochs 1 --scripts train_DDP.py       # 25 minutes there
    python benchmarks/floor.py --model resnet18 --dataset fake --batch-size 512 --device cuda --processes 1

All contenders are started; then, in each round, each trains a few epochs while the others stand still, and the round
gives one ratio for each pair. Shown are the median, the lowest and the highest of the rounds. The bare step is nothing
but forward, backward with its all-reduce, and the optimizer, on batches that were made beforehand; "no all-reduce" is
the same with each process by itself. The usual loop is what most published DDP examples have; Accelerate and Fabric
are these libraries' quick starts on the same data. Everything goes into a file of benchmarks/results: every turn, the
hardware, the versions; an interruption loses only the round that it hits.
"""
import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.tables import RESULTS, file_name  # noqa: E402
from benchmarks.turns import Contender, launch, machine, name_processes, spread  # noqa: E402
from common import datasets, devices, errors, models  # noqa: E402

SCRIPTS = ["train_DDP.py", "train_mp.py", "train_grad_accum.py"]
OTHERS = {"bare step": ("bare_ddp.py", None), "no all-reduce": ("bare_ddp.py --alone", None),
          "usual loop": ("usual_ddp.py", None),
          "Accelerate": ("accelerate_loop.py", "accelerate"), "Fabric": ("fabric_loop.py", "lightning_fabric")}


def start(args, images, alone, found):
    """Start every contender and note it in `found` by its name; those whose library is missing are named, left out.

    `alone` is the name of the one that is a single process, with the threads that each of the others has, or None.
    """
    shared = ["--dataset", args.dataset, "--data-path", args.data_path, "--model", args.model, "--epochs", "100000",
              "--batch-size", str(args.batch_size), *(["--device", args.device] if args.device else [])]
    for name in ["bare step", *args.others, *args.scripts]:
        if name in OTHERS:
            file, module = OTHERS[name]
            if module and not importlib.util.find_spec(module):
                print(f"without {name}: it is not installed (benchmarks/requirements.txt)")
                continue
            file, *extra = file.split()
            command = launch(args.processes, f"benchmarks/{file}", *shared, *extra)
        else:
            extra = ["--output-dir", f"runs/floor/{name}"]
            extra += ["--nprocs", str(args.processes)] if name == "train_mp.py" else []
            extra += ["--accum-steps", "2"] if name == "train_grad_accum.py" else []
            extra += ["--timeout", "86400"]  # its clock runs while a contender stands still
            command = launch(0 if name == "train_mp.py" else args.processes, name, *shared, *extra)
        found[name] = Contender(command, images)
    if alone:
        command = launch(0, "train.py", *shared, "--output-dir", "runs/floor/train.py")
        found[alone] = Contender(command, images, threads=cores_each(args))


def cores_each(args):
    """Return how many cores of a CPU each process has."""
    return max(1, os.cpu_count() // args.processes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=datasets.DATASETS, default="digits")
    parser.add_argument("--data-path", default="data")
    parser.add_argument("--model", choices=models.MODELS, default="cnn")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--device")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=4, help="that count, in each turn")
    parser.add_argument("--scripts", nargs="*", default=SCRIPTS, help="also train_amp.py, where bf16 is fast")
    parser.add_argument("--others", nargs="*", choices=list(OTHERS)[1:], default=list(OTHERS)[1:])
    args = parser.parse_args()

    device = devices.select_device(args.device)
    where = machine(device, "train*.py", "common", "benchmarks/*.py")
    train_set, _ = datasets.create_datasets(args.dataset, args.data_path, 0, ".")
    images = len(train_set) // args.batch_size * args.batch_size
    threads = cores_each(args)
    alone = f"train.py, {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" and args.processes > 1 else None
    found = {}
    try:
        start(args, images, alone, found)
        names = list(found)
        for number in tqdm(range(args.rounds), "rounds", disable=None):
            for place in range(len(names)):
                found[names[(place + number) % len(names)]].turn(args.epochs)
    except KeyboardInterrupt:
        args.rounds = min((len(contender.speeds) for contender in found.values()), default=0)
        if not args.rounds:
            sys.exit(130)
        for contender in found.values():
            del contender.speeds[args.rounds:]
        print("\ninterrupted; the round that was not over does not count")
    finally:
        for contender in found.values():
            contender.end()

    print(f"{name_processes(args.processes)}, {args.dataset}, {args.model}, batch {args.batch_size}: medians of "
          f"{args.rounds} rounds (lowest to highest)\n{'':20} {'images/s':>24}  {'of the bare step':>20}  "
          f"{'start-up, s':>11}  {'between epochs, s':>17}")
    table = {}
    for name, contender in found.items():
        over = [one / other for one, other in zip(contender.speeds, found["bare step"].speeds, strict=True)]
        table[name] = {"images_per_second": spread(contender.speeds), "of_the_bare_step": spread(over),
                       "start_up_seconds": contender.start_up, "between_epochs_seconds": spread(contender.between),
                       "turns": contender.speeds}
        speed, over = table[name]["images_per_second"], table[name]["of_the_bare_step"]
        print(f"{name:20} {speed['median']:8,.0f} ({speed['lowest']:6,.0f} to {speed['highest']:6,.0f})  "
              f"{over['median']:.2f} ({over['lowest']:.2f} to {over['highest']:.2f})  {contender.start_up:11.1f}  "
              f"{table[name]['between_epochs_seconds']['median']:17.3f}")

    ratios = {}
    pairs = [("train_DDP.py", other) for other in ("bare step", "usual loop", "Accelerate", "Fabric")]
    for one, other in [*pairs, ("train_amp.py", "train_DDP.py"), ("train_DDP.py", alone), ("no all-reduce", alone)]:
        if one in found and other in found:
            each = [a / b for a, b in zip(found[one].speeds, found[other].speeds, strict=True)]
            ratios[f"{one} / {other}"] = spread(each)
            ratio = ratios[f"{one} / {other}"]
            print(f"{one} / {other:18} {ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})")

    path = RESULTS / file_name("floor", where, args.dataset, args.model, str(args.processes))
    path.write_text(json.dumps({"machine": where, "arguments": vars(args), "table": table, "ratios": ratios},
                               indent=1) + "\n")


if __name__ == "__main__":
    with errors.report_errors():
        main()
