"""Run the tests for GPUs and measure the scripts on this machine's GPUs; write one Markdown file to send in.

    pip install -r requirements-dev.txt -r requirements/bench.txt
    python -m tools.gpu_report                                   # ten minutes on one H100: docs/gpus/README.md
    python -m tools.gpu_report --nanogpt PATH --minutes 15                          # also measure a clone of nanoGPT
    python -m tools.gpu_report --device cpu --only "data_parallel|cnn.*bare step$|train_DDP.py$"    # a short try

The command ends within --minutes. A measurement may take three times its equal share of the time that is left. After
that, the command ends all its processes, and the report shows the epochs that were done. Each result is saved at once
in --folder. If you start the same command again, it continues, and skips what is done. `--only` is a regular
expression for the names of tests and measurements.
"""
import argparse
import json
import multiprocessing
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.language import read_iterations
from benchmarks.measure import kill, launch, launch_script, read_epochs
from benchmarks.tables import ROOT, around, save, spread, table
from common.launch import cores_per_process, end_with_parent
from language import gpt, text

OUTPUT = ["--output-dir", "runs/gpu-report/run"]
# asked in another process, because CUDA's own memory would be missing in the measurements
ASK = """import torch
for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
    print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")"""
SHARE = 0.5  # the fraction of the time that the tests may take
SLACK = 3  # a measurement may take this multiple of its equal share of the time that is left
LEAST = 10  # seconds; with less time left, no measurement starts
ALONE = "out_of_memory"  # the tests that fill a GPU
SPLITS_COMPILE = tuple(map(int, version("torch").split(".")[:2])) >= (2, 14)  # a split embedding, with --compile
WORDS = {"passed": "passed", "failed": "**failed**", "stopped": "**stopped**", "skipped": "not run"}


def read(path: Path) -> dict[str, dict]:
    """Return the notes by name."""
    return json.loads(path.read_text()) if path.exists() else {}


def note(path: Path, name: str, **entry: Any) -> None:
    """Add an entry to the notes."""
    save(path, read(path) | {name: entry})


class Selection:
    """A pytest plugin that selects the tests that match `only` and are not done."""

    def __init__(self, notes: Path, only: str):
        self.notes, self.only = notes, only
        self.selected: list[str] = []

    @pytest.hookimpl(trylast=True)  # after pytest's own -m
    def pytest_collection_modifyitems(self, items: list) -> None:
        done = read(self.notes)
        items[:] = [item for item in items if re.search(self.only, item.name)]
        note(self.notes, "tests", names=[item.name for item in items])
        items[:] = [item for item in items if item.name not in done]
        self.selected = [item.nodeid for item in items]


class Results:
    """A pytest plugin that notes the results of tests."""

    def __init__(self, notes: Path):
        self.notes = notes

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed or report.when == "teardown" and not report.failed:
            return
        why = str(report.longrepr[2]).removeprefix("Skipped: ") if report.skipped else ""
        said = "; ".join(value for name, value in report.user_properties if name == "said") or why
        note(self.notes, report.nodeid.split("::", 1)[1], result=report.outcome, seconds=report.duration,
             said=said, text=report.longreprtext if report.failed else "")


def run_tests(device: str | None, notes: Path, only: str) -> None:
    """Run the tests that are not done: several at a time, and at the end those that fill a GPU."""
    end_with_parent("SIGINT")
    options = ["-q", "-m", "nightly" if device == "cpu" else "gpu"]
    several = ["-n", str(max(1, min(8, cores_per_process() // 2))), "--dist", "worksteal"]
    selection = Selection(notes, only)
    pytest.main([*options, "-qq", "--collect-only", str(ROOT / "tests/test_gpu.py")], plugins=[selection])
    for alone in (False, True):
        tests = [f"{ROOT}/{test}" for test in selection.selected if (ALONE in test) == alone]
        if tests:
            pytest.main([*options, *([] if alone else several), *tests], plugins=[Results(notes)])


class Measurement(NamedTuple):
    table: str  # the table of the report
    what: str
    command: list[str]
    cwd: Path = ROOT
    read: Callable[[Iterable[str]], Iterator[dict[str, float]]] = read_epochs  # finds the epochs in the output

    @property
    def name(self) -> str:
        return f"{self.table}: {self.what}"


def write_tokens(folder: Path) -> None:
    """Write random tokens to train on; each file has four million."""
    for part in ("train", "val"):
        np.random.default_rng(0).integers(text.GPT2, size=2**22, dtype=np.uint16).tofile(folder / f"{part}.bin")


def measurements(count: int, device: str | None, tokens: Path, nanogpt: Path | None) -> Iterator[Measurement]:
    """Yield the measurements for `count` GPUs, or for as many CPU processes; each process has the same work.

    The bare step comes first in each table. The language models train on the files in the folder `tokens`.
    """
    on_cpu, several = device == "cpu", count > 1
    steps = 4 if on_cpu else 16  # of the language model, per epoch
    processes, alone = f"{count} process{'es' * several}", " on one device" * several

    def rows(title: str, options: str, batch: int, whats: list[str]) -> Iterator[Measurement]:
        """Yield a measurement for each script and its own options; `options` are those of the whole table."""
        for what in whats:
            number = 1 if what.endswith(" on one device") else count
            words = what.removesuffix(" on one device").replace("bare step", "benchmarks.loops bare")
            words += f" {options} --batch-size {number * batch}" + f" --device {device}" * bool(device)
            if "tokens" in title:
                words += f" --windows {steps * number * batch}"
            target, *rest = shlex.split(words)
            start: Callable[..., list[str]] = launch
            if target.endswith(".py"):
                start, rest = launch_script, [*rest, *OUTPUT, *["--sample", ""] * ("tokens" in title)]
            yield Measurement(title, what, start(number, target, *rest))

    bare = ["bare step", "bare step --bf16", *[f"bare step{alone}"] * several]
    small, large, dataset, batch = ("cnn", "vit", "digits", 64) if on_cpu else ("resnet18", "vit_base", "fake", 512)
    task = f"{dataset}, batch {count * batch}, {processes}: images/s"
    yield from rows(f"{small}, {task}", f"--model {small} --dataset {dataset} --epochs 5", batch, [
        *bare, f"train.py{alone}", "train_DDP.py", "train_amp.py --precision bf16", "train_amp.py --precision fp16",
        "train_combined.py --precision bf16 --accum-steps 1 --compile", "train_FSDP.py",
        *["train_FSDP.py --bf16"] * (small == "cnn"),  # it refuses BatchNorm
        *["train_DP.py", "train_mp.py", "train_elastic.py", "train_grad_accum.py", "train_DCP.py"] * several])
    if several:
        yield from rows(f"{large}, {task}", f"--model {large} --dataset {dataset} --epochs 3", batch, [
            *bare[:2], "train_DDP.py", "train_FSDP.py", "train_FSDP.py --bf16", "train_TP.py", "train_PP.py"])

    model, length, batch = ("gpt_tiny", 32, 4) if on_cpu else ("gpt_124m", 1024, 32)
    task = f"--model {model} --dataset tokens --data-path {shlex.quote(str(tokens))} --length {length} --epochs 4"
    title = f"{model}, {length} tokens per window, batch {count * batch}, {processes}: tokens/s"
    yield from rows(title, task, batch, [
        *bare, f"language/train.py{alone}", "language/train_DDP.py",
        "language/train_combined.py --precision bf16 --accum-steps 1",
        "language/train_combined.py --precision bf16 --accum-steps 1 --compile",
        "language/train_TP.py --tensor-parallel 1 --bf16",
        *["language/train_TP.py --tensor-parallel 1 --bf16 --compile"] * SPLITS_COMPILE,
        *["language/train_FSDP.py --bf16", "language/train_TP.py --tensor-parallel 2 --bf16",
          "language/train_CP.py --bf16", "language/train_4D.py --bf16"] * several])
    for compiled in (False, True) if nanogpt else ():
        size, number = gpt.SIZES[model], 1 if on_cpu else count  # its groups need NCCL
        settings = {"dataset": tokens, "out_dir": tokens / "nanogpt", "n_layer": size.layers, "n_head": size.heads,
                    "n_embd": size.width, "block_size": length, "batch_size": batch, "eval_iters": 1,
                    "gradient_accumulation_steps": number, "max_iters": 4 * steps, "compile": compiled,
                    **({"device": "cpu", "dtype": "float32"} if on_cpu else {"dtype": "bfloat16"})}
        command = launch(0 if number == 1 else number, "train.py", *(f"--{key}={value}" for key, value in
                                                                     settings.items()))
        yield Measurement(title, f"nanoGPT --bf16{' --compile' * compiled}", command, nanogpt or ROOT,
                          partial(read_iterations, steps, number * batch * length))


def measure(which: Measurement, folder: Path, limit: float) -> dict:
    """Run a measurement for at most `limit` seconds; return the seconds of its first epoch, and the others' speeds."""
    begin = time.monotonic()
    shutil.rmtree(ROOT / OUTPUT[1], ignore_errors=True)  # train_DCP.py refuses an older run's folder
    follow = partial(end_with_parent, "SIGTERM") if sys.platform == "linux" else None
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = subprocess.Popen(which.command, cwd=which.cwd, stdout=out, stderr=err, start_new_session=True,
                                   env=os.environ | {"PYTHONUNBUFFERED": "1"}, preexec_fn=follow)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill(process.pid)
            process.wait()
        out.seek(0), err.seek(0)
        epochs, errors = list(which.read(out)), err.read()
    result: dict[str, Any] = {"seconds": time.monotonic() - begin, "result": "stopped" if code is None else "passed"}
    if code:
        text = f"{' '.join(which.command)}\nexit code: {code}\n{errors[-3000:]}"
        return result | {"result": "failed", "text": text}
    if epochs:
        peaks = [epoch["peak_mib"] for epoch in epochs if "peak_mib" in epoch]
        result |= {"first": epochs[0]["seconds"], "speeds": [epoch["speed"] for epoch in epochs[1:]],
                   "peak": max(peaks, default=None)}
    return result


def ask(*command: str) -> str:
    """Return the output of a command, or "" if the command fails or is missing."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def of_speed(lines: list[Measurement], notes: dict[str, dict]) -> str:
    """Return a table of speeds, each relative to the bare step in the same precision on as many devices."""
    found = {line.what: notes.get(line.name, {"result": "skipped"}) for line in lines}
    rows = []
    for what, mine in found.items():
        like = "bare step --bf16" if re.search("bf16|fp16", what) else "bare step"
        if what.endswith(" on one device"):
            like += " on one device"
        bare = found.get(like, {}).get("speeds")
        first, speed, share, peak = "-", WORDS[mine["result"]], "-", "-"
        if "first" in mine:
            first = f"{mine['first']:.1f}"
        if mine.get("speeds"):
            speed = around(spread(mine["speeds"]), ",.0f")
            share = f"{statistics.median(mine['speeds']) / statistics.median(bare):.2f}" if bare else "-"
        if mine.get("peak"):
            peak = f"{mine['peak']:,.0f} MiB"
        if mine["result"] == "stopped":
            what += f" (stopped after {mine['seconds']:.0f} s)"
        rows.append([what, first, speed, share, peak])
    return table(["what", "first epoch, s", "speed of the later epochs: median", "share of the bare step",
                  "peak memory"], rows)


def write(path: Path, notes: dict[str, dict], wanted: list[Measurement]) -> None:
    """Write the report on everything done so far."""
    here = notes["machine"]
    names = notes.get("tests", {"names": []})["names"]
    tests = {name: notes.get(name, {"result": "skipped", "said": "the time was over", "seconds": 0}) for name in names}
    counts = Counter(found["result"] for found in tests.values())
    gpus = "; ".join(f"{count} x {name}" for name, count in Counter(here["gpus"]).items())
    parts = [f"# {gpus or 'none'}, torch {here['torch']}",
             f"`python -m tools.gpu_report`, commit {here['commit']}, {here['date']}.",
             "## Tests",
             f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} not run. Tests that did not "
             "run prove nothing.",
             table(["test", "result", "s", "said"], (
                 [f"`{name}`", WORDS[found["result"]], f"{found['seconds']:.0f}",
                  found["said"].replace("|", "\\|")] for name, found in tests.items()))]
    for title in dict.fromkeys(line.table for line in wanted):
        parts += [f"## {title}", of_speed([line for line in wanted if line.table == title], notes)]
    failed = {name: each["text"] for name, each in notes.items() if each.get("result") == "failed"}
    parts += ["## Failures"] * bool(failed)
    parts += [f"`{name}`\n\n```text\n{text[-3000:]}\n```" for name, text in failed.items()]
    parts += ["## Machine", f"```text\n{here['details']}\n```"]
    path.with_suffix(".new").write_text("\n\n".join(parts) + "\n")
    path.with_suffix(".new").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu: the tests of CPU processes, small models (default: all GPUs)")
    parser.add_argument("--minutes", type=float, help="end within this time (default: 10; for several GPUs, 20)")
    parser.add_argument("--nanogpt", type=Path, metavar="PATH", help="a clone of nanoGPT to measure, too")
    parser.add_argument("--only", default="", help="run only the tests and measurements that match this expression")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/gpu-report", help="for the notes and the report")
    args = parser.parse_args()
    if args.nanogpt and not (args.nanogpt / "configurator.py").exists():
        parser.error(f"--nanogpt {args.nanogpt}: not a clone of nanoGPT")
    if not (find_spec("psutil") and find_spec("xdist")):
        parser.error("run: pip install -r requirements-dev.txt -r requirements/bench.txt")
    begin, folder = time.monotonic(), args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    notes, report = folder / "notes.json", folder / "report.md"
    gpus = [] if args.device == "cpu" else ask(sys.executable, "-c", ASK).splitlines()
    here = {"gpus": gpus, "torch": version("torch"), "commit": ask("git", "describe", "--always", "--dirty")}
    if not here.items() <= read(notes).get("machine", {}).items():  # something differs: start over
        notes.unlink(missing_ok=True)
        details = [ask(sys.executable, "-m", "torch.utils.collect_env"), ask("nvidia-smi", "topo", "-m")]
        note(notes, "machine", **here, details="\n\n".join(details).strip(), date=time.strftime("%Y-%m-%d"))
    count = len(gpus) or 2 * (args.device == "cpu")
    write_tokens(folder)
    planned = measurements(count, args.device, folder, args.nanogpt and args.nanogpt.resolve()) if count else ()
    wanted = [each for each in planned if re.search(args.only, each.name)]
    seconds = 60 * (args.minutes or (20 if count > 1 else 10))
    tests = multiprocessing.get_context("spawn").Process(target=run_tests, args=(args.device, notes, args.only))
    tests.start()
    tests.join(SHARE * seconds)
    kill(tests.pid or 0)
    tests.join()
    write(report, read(notes), wanted)
    to_do = [each for each in wanted if read(notes).get(each.name, {"result": "stopped"})["result"] == "stopped"]
    for number, each in enumerate(to_do):
        left = begin + seconds - time.monotonic()
        if left < LEAST:
            break
        print(each.name, flush=True)
        note(notes, each.name, **measure(each, folder, min(left, SLACK * left / (len(to_do) - number))))
        write(report, read(notes), wanted)
    results = [each.get("result") for each in read(notes).values()]
    print(f"{report}: {results.count('passed')} passed, {results.count('failed')} failed")
    sys.exit("failed" in results or "passed" not in results)


if __name__ == "__main__":
    main()
