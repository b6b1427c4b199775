"""Run the tests for GPUs and measure the scripts on this machine's GPUs; write one Markdown file to send in.

    pip install -r requirements-dev.txt -r requirements-bench.txt
    python -m tools.gpu_report                                    # at most 20 minutes: docs/gpus/README.md
    python -m tools.gpu_report --device cpu --only "data_parallel|bare step|train_DDP.py$"          # a short try

The command saves each result at once in --folder. If you start the same command again, after an interruption
or when the time was over, it skips what is done. `--only` is a regular expression for the names of tests and
measurements.
"""
import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.tables import ROOT, around, save, spread, table
from common.launch import end_with_parent

OUTPUT = ["--output-dir", "runs/gpu-report/run"]
# asked in another process, because CUDA's own memory would be missing in the measurements
ASK = """import torch
for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
    print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")"""
SHARE = 0.55  # the fraction of the time that the tests may take
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WORDS = {"passed": "passed", "failed": "**failed**", "skipped": "not run"}


def read(path: Path) -> dict[str, dict]:
    """Return the notes by name."""
    return json.loads(path.read_text()) if path.exists() else {}


def note(path: Path, name: str, **entry: Any) -> None:
    """Add an entry to the notes."""
    save(path, read(path) | {name: entry})


class Tests:
    """A pytest plugin that selects the tests that match `only` and are not done, and notes their results."""

    def __init__(self, notes: Path, only: str):
        self.notes, self.only = notes, only

    @pytest.hookimpl(trylast=True)  # after pytest's own -m
    def pytest_collection_modifyitems(self, items: list) -> None:
        done = read(self.notes)
        items[:] = [item for item in items if re.search(self.only, item.name)]
        note(self.notes, "tests", names=[item.name for item in items])
        items[:] = [item for item in items if item.name not in done]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed or report.when == "teardown" and not report.failed:
            return
        why = str(report.longrepr[2]).removeprefix("Skipped: ") if report.skipped else ""
        said = "; ".join(value for name, value in report.user_properties if name == "said") or why
        note(self.notes, report.nodeid.split("::", 1)[1], result=report.outcome, seconds=report.duration,
             said=said, text=report.longreprtext if report.failed else "")


def run_tests(device: str | None, *options: Any) -> None:
    """Run the tests that are not done, in this process."""
    end_with_parent("SIGINT")
    pytest.main(["-m", "nightly" if device == "cpu" else "gpu", "-q", str(ROOT / "tests/test_gpu.py")],
                plugins=[Tests(*options)])


class Measurement(NamedTuple):
    table: str  # the table of the report
    what: str
    command: list[str]
    settings: dict[str, str] = {}

    @property
    def name(self) -> str:
        return f"{self.table}: {self.what}"


def measurements(count: int, device: str | None) -> Iterator[Measurement]:
    """Yield the measurements for `count` GPUs, or for as many CPU processes; the bare step is first and last."""
    where = ["--device", device] if device else []

    def speeds(model: str, epochs: int, scripts: list[str]) -> Iterator[Measurement]:
        title = f"{model}, digits, batch 128, {count} process{'es' * (count > 1)}"
        task = ["--model", model, "--batch-size", "128", "--epochs", str(epochs), *where]
        several, bare = [*TORCHRUN, f"--nproc-per-node={count}"], ["-m", "benchmarks.loops", "bare", *task]
        yield Measurement(title, "bare step", [*several, *bare])
        if count > 1:
            yield Measurement(title, "one process of it", [*TORCHRUN, "--nproc-per-node=1", *bare])
        for script in scripts:
            start = [sys.executable] if script in ("train.py", "train_DP.py", "train_mp.py") else several
            more = ["--nprocs", str(count)] if script == "train_mp.py" else []
            yield Measurement(title, script, [*start, *script.split(), *more, *task, *OUTPUT])
        if model in ("cnn", "resnet18"):
            yield Measurement(title, "train_DDP.py, TF32 off", [*several, "train_DDP.py", *task, *OUTPUT],
                              {"NVIDIA_TF32_OVERRIDE": "0"})
        yield Measurement(title, "bare step again", [*several, *bare])

    small, large = ("cnn", "vit") if device == "cpu" else ("resnet18", "vit_base")
    yield from speeds(small, 8, [
        "train.py", "train_DDP.py", "train_amp.py --precision bf16", "train_amp.py --precision fp16",
        "train_DP.py", "train_mp.py", "train_elastic.py", "train_grad_accum.py --accum-steps 2",
        "train_combined.py --accum-steps 2 --precision fp16", "train_FSDP.py", "train_DCP.py"])
    yield from speeds(large, 3, ["train_DDP.py", "train_FSDP.py", "train_FSDP.py --bf16", "train_DCP.py",
                                 *["train_TP.py", "train_PP.py"] * (count > 1)])
    yield Measurement("Memory", "benchmarks.memory", [
        sys.executable, "-m", "benchmarks.memory", "--model", large, "--processes", str(count), "--scripts",
        "train_DDP.py", "train_FSDP.py", "--device", device or "cuda"])
    yield Measurement("One step", "benchmarks.step", [
        sys.executable, "-m", "benchmarks.step", "--model", small, "--batch-size", "256", "--rounds", "5", "--epochs",
        "3", "--script", "train_amp.py", *where])


def measure(which: Measurement, folder: Path, limit: float) -> dict:
    """Run a measurement; return its result: images/s of each epoch and the peak memory, or what it printed."""
    begin = time.monotonic()
    settings = os.environ | which.settings | {"RESULTS_FOLDER": str(folder)}
    shutil.rmtree(ROOT / OUTPUT[1], ignore_errors=True)  # train_DCP.py refuses an older run's folder
    follow = partial(end_with_parent, "SIGTERM") if sys.platform == "linux" else None
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        with subprocess.Popen(which.command, cwd=ROOT, stdout=out, stderr=err, env=settings, start_new_session=True,
                              preexec_fn=follow) as process:
            try:
                code: object = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = f"none after {limit:.0f} s"
                process.send_signal(signal.SIGTERM)
        out.seek(0), err.seek(0)
        said, errors = out.read(), err.read()
    found = re.findall(r"^epoch.* ([\d,]+) images/s(?:  ([\d,]+) MiB)?$", said, re.M)
    speeds, peaks = ([int(text.replace(",", "")) for text in column if text] for column in [*zip(*found)] or [(), ()])
    result = {"seconds": time.monotonic() - begin, "result": "failed" if code else "passed"}
    if code:
        return result | {"text": f"{' '.join(which.command)}\nexit code: {code}\n{errors[-3000:]}"}
    return result | ({"speeds": speeds[1:], "peak": max(peaks, default=None)} if speeds else {"said": said.strip()})


def ask(*command: str) -> str:
    """Return the output of a command, or "" if the command fails or is missing."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def of_speed(lines: list[Measurement], notes: dict[str, dict]) -> str:
    """Return a table of images/s, each relative to the mean of both bare steps."""
    speeds = {line.what: found["speeds"] for line in lines if (found := notes.get(line.name, {})).get("speeds")}
    bare = [statistics.median(each) for what, each in speeds.items() if what.startswith("bare step")]
    rows = []
    for line in lines:
        found = notes.get(line.name, {"result": "skipped"})
        cells = [WORDS[found["result"]], "-"]
        if mine := speeds.get(line.what):
            share = f"{statistics.median(mine) / statistics.mean(bare):.2f}" if bare else "-"
            cells = [around(spread(mine), ",.0f"), share]
        rows.append([line.what, *cells, f"{found['peak']:,} MiB" if found.get("peak") else "-"])
    return table(["what", "images/s: median of the epochs after the first", "share of the bare step", "peak memory"],
                 rows)


def write(path: Path, notes: dict[str, dict], wanted: list[Measurement]) -> None:
    """Write the report on everything done so far."""
    here = notes["machine"]
    names = notes.get("tests", {"names": []})["names"]
    tests = {name: notes.get(name, {"result": "skipped", "said": "the time was over", "seconds": 0}) for name in names}
    counts = [sum(found["result"] == word for found in tests.values()) for word in WORDS]
    minutes = sum(each.get("seconds", 0) for each in notes.values()) / 60
    gpus = "; ".join(f"{count} x {name}" for name, count in Counter(here["gpus"]).items())
    parts = [f"# {gpus or 'none'}, torch {here['torch']}",
             f"`python -m tools.gpu_report`, commit {here['commit']}, {here['date']}; {minutes:.0f} minutes.",
             "## Tests",
             f"{counts[0]} passed, {counts[1]} failed, {counts[2]} not run. Tests that did not run prove nothing.",
             table(["test", "result", "s", "said"], (
                 [f"`{name}`", WORDS[found["result"]], f"{found['seconds']:.0f}",
                  found["said"].replace("|", "\\|")] for name, found in tests.items()))]
    for title in dict.fromkeys(line.table for line in wanted):
        lines = [line for line in wanted if line.table == title]
        found = notes.get(lines[0].name, {"result": "skipped"})
        said = found.get("said", WORDS[found["result"]])
        parts += [f"## {title}", said if lines[0].what.startswith("benchmarks.") else of_speed(lines, notes)]
    failed = {name: each["text"] for name, each in notes.items() if each.get("result") == "failed"}
    parts += ["## Failures"] * bool(failed)
    parts += [f"`{name}`\n\n```text\n{text[-3000:]}\n```" for name, text in failed.items()]
    parts += ["## Machine", f"```text\n{here['details']}\n```"]
    path.with_suffix(".new").write_text("\n\n".join(parts) + "\n")
    path.with_suffix(".new").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu: the tests of CPU processes, small models (default: all GPUs)")
    parser.add_argument("--minutes", type=float, default=20, help="start nothing after this time")
    parser.add_argument("--only", default="", help="run only the tests and measurements that match this expression")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/gpu-report", help="for the notes and the report")
    args = parser.parse_args()
    begin, folder = time.time(), args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    notes, report = folder / "notes.json", folder / "report.md"
    gpus = [] if args.device == "cpu" else ask(sys.executable, "-c", ASK).splitlines()
    here = {"gpus": gpus, "torch": version("torch"), "commit": ask("git", "describe", "--always", "--dirty")}
    if not here.items() <= read(notes).get("machine", {}).items():  # something differs: start over
        notes.unlink(missing_ok=True)
        details = [ask(sys.executable, "-m", "torch.utils.collect_env"), ask("nvidia-smi", "topo", "-m")]
        note(notes, "machine", **here, details="\n\n".join(details).strip(), date=time.strftime("%Y-%m-%d"))
    count = len(gpus) or 2 * (args.device == "cpu")
    planned = measurements(count, args.device) if count else ()
    wanted = [each for each in planned if re.search(args.only, each.name)]
    spawn = multiprocessing.get_context("spawn")
    tests = spawn.Process(target=run_tests, args=(args.device, notes, args.only))
    tests.start()
    tests.join(SHARE * 60 * args.minutes)
    if tests.is_alive():
        os.kill(tests.pid or 0, signal.SIGINT)
        tests.join()
    write(report, read(notes), wanted)
    for each in wanted:
        left = begin + 60 * args.minutes - time.time()
        if each.name in read(notes) or left < 0:
            continue
        print(each.name, flush=True)
        note(notes, each.name, **measure(each, folder, max(60, left)))
        write(report, read(notes), wanted)
    results = [each.get("result") for each in read(notes).values()]
    print(f"{report}: {results.count('passed')} passed, {results.count('failed')} failed")
    sys.exit("failed" in results or "passed" not in results)


if __name__ == "__main__":
    main()
