"""Measure one training step on one device: how much of it is arithmetic, and how much common optimizations would save.

    python -m benchmarks.step                                              # the small CNN, on digits: two minutes
    python -m benchmarks.step --model resnet18 --rounds 5                                          # ten minutes there
    python -m benchmarks.step --model resnet18 --dataset fake --batch-size 512 --script train_amp.py --device cuda

The benchmark measures the scripts' step, and the same step with one change at a time, interleaved with products of
large matrices. The rate of these products gives the time that a step's arithmetic needs. The benchmark also measures
how long a script's loop waits for the next batch. This wait is the longest time that an accelerator can be idle for
lack of data.
"""
import contextlib
import io
import runpy
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils import data
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from benchmarks import measure
from benchmarks.tables import path_of, ratio, save, spread, step_table
from common import cli, datasets, devices, errors, models

PLAIN, PRECISIONS = "as in the scripts", {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHANGES = {PLAIN: {}, "torch's default layout": {"contiguous": True}, "fused optimizer": {"fused": True},
           "torch.compile": {"compiled": True}}
ON_ACCELERATORS = {"sent as floats, normalized before": {"floats": True}}
IN_BF16 = {"bf16": {"dtype": torch.bfloat16}, "bf16, torch.compile": {"dtype": torch.bfloat16, "compiled": True}}


def clock(device: torch.device, function) -> float:
    """Return the seconds that the device needs for the work of `function`."""
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    wait()
    begin = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - begin


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of a product of two large square matrices: the best of three."""
    size = 1024 if device.type == "cpu" else 8192
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = min(clock(device, lambda: one @ other) for _ in range(3))
    return 2 * size ** 3 / best


class Step:
    """A model, its optimizer and a batch in the host's memory; each call takes one step, as the scripts do.

    Each option makes one change; `floats` sends normalized images, which have four times as many bytes.
    """

    def __init__(self, model, batch_size, device, train_set, contiguous=False, fused=None, compiled=False, floats=False,
                 dtype=None):
        self.device, self.dtype = device, dtype
        normalize = datasets.Normalize(train_set)
        images, self.labels = train_set.__getitems__(list(range(batch_size)))
        self.images = normalize(images) if floats else images
        if device.type != "cpu":
            self.images, self.labels = self.images.pin_memory(), self.labels.pin_memory()
        self.normalize = torch.nn.Identity() if floats else normalize.to(device)
        torch.manual_seed(0)
        self.model = models.create_model(model, train_set.num_classes, train_set.image_shape)
        models.to_device(self.model, device)
        if contiguous:
            self.model.to(memory_format=torch.contiguous_format)
        self.optimizer = torch.optim.SGD(models.parameter_groups(self.model, 1e-4), 0.001, 0.9, fused=fused)
        if compiled:
            self.model.compile()

    def __call__(self) -> None:
        inputs, targets = (part.to(self.device, non_blocking=True) for part in (self.images, self.labels))
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = F.cross_entropy(self.model(self.normalize(inputs)), targets)
        loss.backward()
        self.optimizer.step()


def compare_steps(args, device: torch.device, train_set) -> dict:
    """Return how long the steps take, and the rates of the matrix products in the same rounds."""
    rates = {name: matrix_rate(device, dtype) for name, dtype in PRECISIONS.items()}
    bf16_pays = rates["bfloat16"] > rates["float32"]  # otherwise bf16 only slows the step: do not measure it
    changes = CHANGES | (ON_ACCELERATORS if device.type != "cpu" else {}) | (IN_BF16 if bf16_pays else {})
    torch.compiler.config.force_disable_caches = True  # a first step must not benefit from an earlier run
    clock(device, Step(args.model, args.batch_size, device, train_set))  # does the process's one-time setup
    memory = torch.cuda if device.type == "cuda" else None
    steps, rows = {}, {}
    for name, change in changes.items():
        before = memory.memory_allocated() if memory else 0
        step = Step(args.model, args.batch_size, device, train_set, **change)
        if memory:
            memory.reset_peak_memory_stats()
        try:
            first = clock(device, step)
        except Exception as error:
            if not change.get("compiled"):
                raise
            print(f"without {name}: {str(error).splitlines()[0]}")  # for example, this machine has no compiler
            continue
        clock(device, step)
        peak = (memory.max_memory_allocated() - before) / 2**20 if memory else None
        steps[name], rows[name] = step, {"first_step_seconds": first, "peak_mib": peak}
    repeats = max(1, round(0.3 / clock(device, steps[PLAIN])))
    jobs = {name: lambda step=step: clock(device, lambda: [step() for _ in range(repeats)]) / repeats
            for name, step in steps.items()}
    jobs |= {name: lambda dtype=dtype: matrix_rate(device, dtype)
             for name, dtype in PRECISIONS.items() if bf16_pays or name == "float32"}
    taken = {name: [] for name in jobs}
    for _, name in tqdm(measure.in_turns(list(jobs), args.rounds), "turns", disable=None):
        taken[name].append(jobs[name]())
    for name, row in rows.items():
        row |= {"milliseconds": spread(1000 * value for value in taken[name]),
                "times_as_fast": ratio(taken[PLAIN], taken[name])}
    kind, step = ("bfloat16", "bf16") if args.script == "train_amp.py" and bf16_pays else ("float32", PLAIN)
    with FlopCounterMode(display=False) as counter:  # nominal operations: Winograd's algorithm needs fewer
        steps[PLAIN].model(torch.zeros(2, *train_set.image_shape, device=device)).sum().backward()
    operations = counter.get_total_flops() / 2  # of forward and backward for one image
    arithmetic = [operations * args.batch_size / rate for rate in taken[kind]]
    return {"steps": rows, "operations_per_image": operations, "arithmetic_share": ratio(arithmetic, taken[step]),
            "matrix_rate": {name: spread(taken.get(name, [rate])) for name, rate in rates.items()}}


def watch_epochs(args) -> dict:
    """Run the script in this process; return the seconds of an epoch, and the share that its loop waits for data."""
    waits, out = [], io.StringIO()

    class Watched(data.DataLoader):
        def __iter__(self):
            waits.extend([0.0] * self.drop_last)  # only for the training data
            begin = time.perf_counter()
            for batch in super().__iter__():
                waits[-1] += self.drop_last * (time.perf_counter() - begin)
                yield batch
                begin = time.perf_counter()

    data.DataLoader = Watched
    sys.argv = [args.script, *measure.task_of(args, args.epochs), "--output-dir", "runs/step"]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):  # train_elastic.py ends with sys.exit
        runpy.run_path(args.script, run_name="__main__")
    seconds = [epoch["seconds"] for epoch in measure.read_epochs(out.getvalue().splitlines())][1:]
    return {"seconds": spread(seconds), "waits": ratio(waits[1:], seconds)}


def main() -> None:
    parser = measure.make_parser(__doc__, epochs=5, batch_size=128, rounds=15)
    scripts = [name for name in measure.training_scripts() if name != "train_mp.py"]  # its loops run in other processes
    parser.add_argument("--script", default="train.py", choices=scripts, help="run it, without its first epoch")
    args = parser.parse_args()
    if args.epochs < 2:
        raise errors.UsageError(f"--epochs {args.epochs}: the first does not count, so there must be a second")
    device = devices.prepare(args.device, False)
    where = measure.machine(device, "train*.py", "common", "benchmarks/*.py")
    train_set, _ = datasets.create_datasets(args.dataset, args.data_path, 0)
    content = {"machine": where, "arguments": vars(args), "threads": torch.get_num_threads(),
               **compare_steps(args, device, train_set), "script": watch_epochs(args)}
    save(path_of("step", where, args.dataset, args.model), content)
    print(step_table(content))


if __name__ == "__main__":
    with cli.report_errors():
        main()
