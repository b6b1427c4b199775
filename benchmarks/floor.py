"""Compare the speed of the scripts with that of the bare step and of other loops, interleaved in one run.

    python -m benchmarks.floor                                                    # five minutes on two cores
    python -m benchmarks.floor --model resnet18 --rounds 3 --epochs 1 --scripts train_DDP.py        # 25 minutes there
    python -m benchmarks.floor --model resnet18 --dataset fake --batch-size 512 --device cuda --processes 1
    python -m benchmarks.floor --model yolov3-tiny --batch-size 16 --epochs 1    # the detector: only the bare step

All contenders start first; benchmarks/loops.py has the loops. In each round, each contender trains a few
epochs while the others are paused, and the round gives one ratio for each pair. Every round is saved at once.
"""
import importlib.util
import os
from collections.abc import Iterator

from tqdm import tqdm

from benchmarks import loops, measure
from benchmarks.tables import OTHERS, floor_table, path_of, ratio, save, spread
from common import cli, devices, models

DETECTOR = "yolov3-tiny"
SCRIPTS = ["train_DDP.py", "train_mp.py", "train_grad_accum.py"]
LOOPS = {"bare step": "bare", "no all-reduce": "alone", "usual loop": "usual", "Accelerate": "accelerate",
         "Fabric": "lightning_fabric"}


def commands(args, alone: str | None) -> Iterator[tuple[str, list[str]]]:
    """Yield each contender's name and command, unless its library is missing; `alone` names the single-process one."""
    task = measure.task_of(args, epochs=100_000)
    for name in ["bare step", *args.others]:
        if name in ("Accelerate", "Fabric") and not importlib.util.find_spec(LOOPS[name]):
            print(f"without {name}: it is not installed (requirements/bench.txt)")
            continue
        yield name, measure.launch(args.processes, "benchmarks.loops", LOOPS[name], *task)
    for name in args.scripts:  # --timeout: collectives must survive the pauses
        yield name, measure.launch_script(args.processes, name, *task, "--timeout", "86400", "--output-dir",
                                          f"runs/floor/{name}")
    if alone:
        yield alone, measure.launch(0, "train.py", *task, "--output-dir", "runs/floor/train.py")


def figures(contenders: dict[str, measure.Contender], alone: str | None) -> dict:
    """Return the figures of the rounds so far."""
    speeds = {name: contender.speeds for name, contender in contenders.items()}
    pairs = [*(("train_DDP.py", other) for other in OTHERS), ("train_amp.py", "train_DDP.py"), ("train_DDP.py", alone),
             ("no all-reduce", alone), ("detection/train_DDP.py", "bare step")]
    return {"table": {name: {"images_per_second": spread(contender.speeds),
                             "of_the_bare_step": ratio(contender.speeds, speeds["bare step"]),
                             "start_up_seconds": contender.start_up,
                             "between_epochs_seconds": spread(contender.between), "turns": contender.speeds}
                      for name, contender in contenders.items()},
            "ratios": {f"{one} / {other}": ratio(speeds[one], speeds[other])
                       for one, other in pairs if one in speeds and other in speeds}}


def main() -> None:
    parser = measure.make_parser(__doc__, epochs=4, batch_size=128, rounds=9, models=[*models.MODELS, DETECTOR])
    parser.add_argument("--processes", type=cli.positive_int, default=2, help="processes of each contender")
    parser.add_argument("--scripts", nargs="*", default=SCRIPTS, help="add train_amp.py if bf16 is fast here")
    parser.add_argument("--others", nargs="*", choices=list(LOOPS)[1:], default=list(LOOPS)[1:], help="loops to run")
    args = parser.parse_args()
    detector = args.model == DETECTOR
    if detector:
        args.dataset, args.model, args.scripts, args.others = "scenes", "tiny", ["detection/train_DDP.py"], []
    device = devices.select_device(args.device)
    where = measure.machine(device, "train*.py", "common", "benchmarks/*.py")
    train_set, *_ = loops.load(args)
    images = len(train_set) // args.batch_size * args.batch_size
    threads = max(1, os.cpu_count() // args.processes)  # as many as each process of the other contenders has
    several = device.type == "cpu" and args.processes > 1 and not detector
    alone = f"train.py, {threads} thread{'s' * (threads > 1)}" if several else None
    contenders = {}
    try:
        for name, command in commands(args, alone):
            contenders[name] = measure.Contender(command, images, threads if name == alone else None)
        turns = measure.in_turns(list(contenders), args.rounds)
        for number, (done, name) in enumerate(tqdm(turns, "turns", disable=None), 1):
            contenders[name].turn(args.epochs)
            if number % len(contenders) == 0:
                arguments = {**vars(args), "rounds": done + 1}
                found = {"machine": where, "arguments": arguments, **figures(contenders, alone)}
                save(path_of("floor", where, args.dataset, args.model, str(args.processes)), found)
    finally:
        for contender in contenders.values():
            contender.end()
    print(floor_table(found))


if __name__ == "__main__":
    with cli.report_errors():
        main()
