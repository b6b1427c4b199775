"""What one training step costs on one device: how near to its arithmetic it is, and what the usual tricks would save.

    pip install -r requirements.txt -r benchmarks/requirements.txt
    python benchmarks/step.py                                              # the small CNN, on digits: two minutes
    python benchmarks/step.py --model resnet18 --rounds 5                                         # ten minutes there
    python benchmarks/step.py --model resnet18 --dataset fake --batch-size 512 --script train_amp.py --device cuda

Four things, in one run, and all of it in a file of benchmarks/results:

- how many operations forward and backward of one image are, counted by torch (convolutions as they are defined; an
  algorithm like Winograd's takes fewer);
- how fast the device multiplies large matrices, in float32 and in bfloat16: a step's operations at that rate are its
  arithmetic;
- the step as the scripts have it (bytes copied to the device and normalised there, channels-last, SGD), and the same
  with one thing different. The steps and the matrices take turns: each round gives one ratio for each;
- the script's own epochs: the share of the time that its loop waits for the next batch. On an accelerator, which works
  while the loop waits, that is the most that it can be idle for want of data.
"""
import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.tables import RESULTS, SCRIPTS, file_name, step_table  # noqa: E402
from benchmarks.turns import EPOCH, launch, machine, spread  # noqa: E402
from common import datasets, devices, errors, models  # noqa: E402

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def wait_for(device):
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def clock(device, function):
    """Return how many seconds the device takes for what `function` gives it to do."""
    wait_for(device)
    begin = time.perf_counter()
    function()
    wait_for(device)
    return time.perf_counter() - begin


def matrix_rate(device, dtype, repeats=3):
    """Return the operations per second of a product of two large square matrices: the best of some.

    In float32 as convolutions have it: on GPUs with TF32, torch lets them use that.
    """
    torch.set_float32_matmul_precision("high")
    size = 1024 if device.type == "cpu" else 8192
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = min(clock(device, lambda: one @ other) for _ in range(repeats))
    torch.set_float32_matmul_precision("highest")
    return 2 * size ** 3 / best


class Step:
    """A model, its optimizer and a batch in the host's memory; calling it makes one step, as the scripts make it.

    Each argument is one departure from them: `contiguous` keeps torch's own layout, `fused` has the optimizer update
    all parameters in one kernel, `compiled` lets torch.compile rewrite the forward and the backward pass, `floats`
    sends the images normalised, four times the bytes, and `dtype` runs the forward pass in that precision.
    """

    def __init__(self, args, device, train_set, contiguous=False, fused=None, compiled=False, floats=False, dtype=None):
        self.device, self.dtype = device, dtype
        normalize = datasets.Normalize(train_set)
        images, self.labels = train_set.__getitems__(list(range(args.batch_size)))
        self.images = normalize(images) if floats else images
        if device.type != "cpu":
            self.images, self.labels = self.images.pin_memory(), self.labels.pin_memory()
        self.normalize = torch.nn.Identity() if floats else normalize.to(device)
        torch.manual_seed(0)
        self.model = models.create_model(args.model, train_set.num_classes, train_set.image_shape)
        layout = torch.contiguous_format if contiguous else torch.channels_last
        self.model.to(device, memory_format=layout)
        groups = models.parameter_groups(self.model, 1e-4)
        self.optimizer = torch.optim.SGD(groups, 0.001, 0.9, fused=fused)
        if compiled:
            self.model.compile()

    def __call__(self):
        images = self.images.to(self.device, non_blocking=True)
        labels = self.labels.to(self.device, non_blocking=True)
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = F.cross_entropy(self.model(self.normalize(images)), labels)
        loss.backward()
        self.optimizer.step()


def count_operations(args, train_set):
    """Return the operations of forward and backward of one image: a product and a sum are two."""
    model = models.create_model(args.model, train_set.num_classes, train_set.image_shape)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(torch.zeros(2, *train_set.image_shape)), torch.zeros(2, dtype=torch.long)).backward()
    return counter.get_total_flops() / 2


def compare_steps(args, device, train_set):
    """Return what steps take, the scripts' and those that depart from it, and the rates of matrices in the same rounds.

    For each step: milliseconds, how many times as fast as the scripts' it is, the seconds of the first, and on CUDA the
    most memory. For each precision: operations per second.
    """
    rates = {name: [matrix_rate(device, dtype)] for name, dtype in PRECISIONS.items()}
    bf16_pays = rates["bfloat16"] > rates["float32"]
    departures = {"as the scripts": {}, "torch's own layout": {"contiguous": True}, "fused optimizer": {"fused": True},
                  "torch.compile": {"compiled": True}}
    if device.type != "cpu":
        departures["sent as floats, normalised before"] = {"floats": True}
    if bf16_pays:  # where matrices are slower in it the answer is known, and takes long
        departures["bf16"] = {"dtype": torch.bfloat16}
        departures["bf16, torch.compile"] = {"dtype": torch.bfloat16, "compiled": True}
    torch.compiler.config.force_disable_caches = True  # the first step is what it is for somebody new
    clock(device, Step(args, device, train_set))  # what any first step pays for, whatever it is
    memory = torch.cuda if device.type == "cuda" else None
    rows = {}
    for name, departure in departures.items():
        before = memory.memory_allocated() if memory else 0
        step = Step(args, device, train_set, **departure)
        if memory:
            memory.reset_peak_memory_stats()
        try:
            rows[name] = {"step": step, "first": clock(device, step), "seconds": []}
        except Exception as error:
            if not departure.get("compiled"):
                raise
            print(f"without {name}: {str(error).splitlines()[0]}")  # no compiler on this machine, say
            continue
        clock(device, step)
        rows[name]["peak_mib"] = (memory.max_memory_allocated() - before) / 2**20 if memory else None

    repeats = max(1, round(0.3 / clock(device, rows["as the scripts"]["step"])))
    for number in tqdm(range(args.rounds), "rounds", disable=None):
        for name, dtype in PRECISIONS.items():
            if bf16_pays or name == "float32":  # the other is measured once, above
                rates[name].append(matrix_rate(device, dtype))
        names = list(rows)
        for place in range(len(names)):
            row = rows[names[(place + number) % len(names)]]
            seconds = clock(device, lambda: [row["step"]() for _ in range(repeats)])  # noqa: B023
            row["seconds"].append(seconds / repeats)

    plain = rows["as the scripts"]["seconds"]
    steps = {name: {"milliseconds": spread([1000 * value for value in row["seconds"]]),
                    "times_as_fast": spread([a / b for a, b in zip(plain, row["seconds"], strict=True)]),
                    "first_step_seconds": row["first"], "peak_mib": row["peak_mib"]} for name, row in rows.items()}
    operations = count_operations(args, train_set)
    in_bf16 = args.script == "train_amp.py" and bf16_pays
    arithmetic = [operations * args.batch_size / rate / seconds for rate, seconds in
                  zip(rates["bfloat16" if in_bf16 else "float32"][1:], rows["bf16"]["seconds"] if in_bf16 else plain,
                      strict=True)]
    return {"steps": steps, "operations_per_image": operations, "arithmetic_share": spread(arithmetic),
            "matrix_rate": {name: spread(values) for name, values in rates.items()}}


def watch(command):
    """Run a script in this process, as `python SCRIPT ...`, and write the seconds its loop waits in each epoch."""
    import runpy

    from torch.utils.data import dataloader

    waits = []

    def timed(method, begins_epoch):
        def call(self):
            begin = time.perf_counter()
            try:
                return method(self)
            finally:
                if getattr(self, "drop_last", False) or getattr(self, "_drop_last", False):  # the training data alone
                    waits.extend([0.0] * begins_epoch)
                    waits[-1] += time.perf_counter() - begin
        return call

    iterator = dataloader._BaseDataLoaderIter
    dataloader.DataLoader.__iter__ = timed(dataloader.DataLoader.__iter__, True)
    iterator.__next__ = timed(iterator.__next__, False)
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:  # train_elastic.py ends by sys.exit
        print(json.dumps(waits))


def watch_epochs(args):
    """Return an epoch's seconds and the share of them that the loop waits for data: medians after the first epoch."""
    arguments = ["--dataset", args.dataset, "--data-path", args.data_path, "--model", args.model, "--epochs",
                 str(args.epochs), "--batch-size", str(args.batch_size), "--output-dir", "runs/step"]
    arguments += ["--device", args.device] if args.device else []
    result = subprocess.run(launch(0, "benchmarks/step.py", "--watch", args.script, *arguments), cwd=ROOT,
                            stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise errors.RunError(f"{args.script}: exit code {result.returncode}; what it said stands above")
    lines = result.stdout.splitlines()
    seconds = [float(match[1]) for match in map(EPOCH.match, lines) if match]
    waits = json.loads(lines[-1])
    shares = [wait / second for wait, second in zip(waits, seconds, strict=True)]
    return {"seconds": spread(seconds[1:]), "waits": spread(shares[1:])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=datasets.DATASETS, default="digits")
    parser.add_argument("--data-path", default="data")
    parser.add_argument("--model", choices=models.MODELS, default="cnn")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--device")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--script", default="train.py", help="whose epochs are watched",
                        choices=[name for name in SCRIPTS if name != "train_mp.py"])  # whose loop is in other processes
    parser.add_argument("--epochs", type=int, default=5, help="of the script; the first does not count")
    args = parser.parse_args()
    if args.epochs < 2:
        raise errors.UsageError(f"--epochs {args.epochs}: the first does not count, so there must be a second")

    device = devices.select_device(args.device)
    where = machine(device, "train*.py", "common", "benchmarks/step.py")
    train_set, _ = datasets.create_datasets(args.dataset, args.data_path, 0, ".")
    content = {"machine": where, "arguments": vars(args), "threads": torch.get_num_threads(),
               "script": watch_epochs(args), **compare_steps(args, device, train_set)}
    path = RESULTS / file_name("step", where, args.dataset, args.model)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(step_table(content)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(sys.argv[2:])
    else:
        with errors.report_errors():
            main()
