"""Code shared by the benchmarks: it parses arguments, starts scripts, and lets several programs take turns.

The speed of a shared machine changes by tens of percent within minutes, so a comparison must not run one program
after the other. Instead, the programs take turns of a second or two, under the same load.
"""
import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import ROOT, spread
from common import cli
from common.datasets import DATASETS
from common.models import MODELS

LONG = 5  # seconds; the scripts print times to 0.01 s
EPOCH = re.compile(r"epoch +\d+/\d+ (?:.* val_loss (?P<val_loss>[\d.]+))?(?:.* accuracy (?P<accuracy>[\d.]+))?.* "
                   r"(?P<seconds>[\d.]+) s  (?P<speed>[\d,]+) (?:images|tokens)/s(?:  MFU \d+%)?"
                   r"(?:  (?P<peak_mib>[\d,]+) MiB)?\n?")


def make_parser(doc: str, epochs: int, batch_size: int, rounds: int | None = None,
                datasets: Iterable[str] = DATASETS, models: Iterable[str] = MODELS) -> cli.ArgumentParser:
    """Return a parser for the arguments that benchmarks share, with these defaults; no `rounds` means no --rounds."""
    parser = cli.ArgumentParser(doc)
    parser.add_argument("--dataset", choices=datasets, default="digits", help="what to train on")
    parser.add_argument("--data-path", default="data", help="folder for the data, downloaded if missing")
    parser.add_argument("--model", choices=models, default="cnn", help="the network")
    parser.add_argument("--epochs", type=cli.positive_int, default=epochs, help="epochs per run; in floor.py, per turn")
    parser.add_argument("--batch-size", type=cli.positive_int, default=batch_size, help="over all processes")
    parser.add_argument("--device", help="default: an accelerator, else cpu")
    if rounds:
        parser.add_argument("--rounds", type=cli.positive_int, default=rounds, help="how many times to measure")
    return parser


def task_of(args, epochs: int) -> list[str]:
    """Return the script arguments that select this benchmark's task."""
    task = {"dataset": args.dataset, "data-path": args.data_path, "model": args.model, "epochs": epochs,
            "batch-size": args.batch_size, "device": args.device}
    return [word for name, value in task.items() if value is not None for word in (f"--{name}", str(value))]


def training_scripts() -> list[str]:
    """Return the names of the scripts that train train.py's models, train.py first."""
    return sorted(path.name for path in ROOT.glob("train*.py"))


def launch(processes: int, target: str, *arguments: str) -> list[str]:
    """Return the command that starts a script or a module under torchrun, or without a launcher for 0 processes."""
    words = [target, *arguments] if target.endswith(".py") else ["-m", target, *arguments]
    if processes:
        with socket.create_server(("", 0)) as server:  # a free port: --standalone's rendezvous does not survive pauses
            port = server.getsockname()[1]
        words = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}", *words]
    return [sys.executable, *words]


def show(value: Any) -> None:
    """Print a value, from rank 0, for `launch_and_read`."""
    if os.environ["RANK"] == "0":
        print(json.dumps({"shown": value}), flush=True)


def launch_and_read(processes: int, module: str, *arguments: Any) -> tuple[Any, list[dict[str, float]]]:
    """Launch a module, with one thread per process; return what it passed to `show`, and its epochs."""
    done = subprocess.run(launch(processes, module, *map(str, arguments)), cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    shown = [line for line in done.stdout.splitlines() if line.startswith('{"shown"')]
    if done.returncode or not shown:
        sys.exit(f"{arguments[:2]} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(shown[0])["shown"], list(read_epochs(done.stdout.splitlines()))


def launch_script(processes: int, script: str, *arguments: str) -> list[str]:
    """Return the command that the docstring of a script gives, with its launcher, if any, and its options."""
    doc = (ROOT / script).read_text().split('"""')[1]
    options = {"--nprocs": processes, "--accum-steps": 2}
    extra = [word for name, value in options.items() if name in doc for word in (name, str(value))]
    target = script
    if (ROOT / script).with_name("__init__.py").exists():  # a wing: its scripts start as modules
        target = script.removesuffix(".py").replace("/", ".")
    first = re.search(rf"^    (.*?)(?: -m)? {re.escape(target)}", doc, re.M)[1]
    return launch(0 if first == "python" else processes, target, *extra, *arguments)


def read_epochs(lines: Iterable[str]) -> Iterator[dict[str, float]]:
    """Yield the values in each epoch's line: seconds and speed and, if a script prints it, accuracy and memory."""
    for match in filter(None, map(EPOCH.fullmatch, lines)):
        yield {name: float(text.replace(",", "")) for name, text in match.groupdict().items() if text}


def in_turns(names: list[str], rounds: int) -> list[tuple[int, str]]:
    """Return (round, name) for each name in each round; each round starts with the next name."""
    return [(number, names[(place + number) % len(names)]) for number in range(rounds) for place in range(len(names))]


def family(pid: int) -> list:
    """Return a process and all its living descendants, as psutil's processes."""
    import psutil  # here, because the tests import modules that need only the rest of this one

    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def kill(pid: int) -> None:
    """Kill a process and all its living descendants, in whatever sessions they are."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for process in family(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Contender:
    """One launch, paused after its first epoch except during its turns; each epoch trains on `images` images or tokens.

    `read` finds the epochs in its output.
    """

    def __init__(self, command: list[str], images: int, threads: int | None = None, cwd: Path = ROOT,
                 read: Callable[[Iterable[str]], Iterator[dict[str, float]]] = read_epochs):
        self.command, self.images, self.speeds, self.between, self.losses = command, images, [], [], []
        self.errors = tempfile.TemporaryFile("w+")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        begin = time.perf_counter()
        self.process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=self.errors, text=True,
                                        env=environment)
        self.epochs = read(self.process.stdout)
        try:
            first = self._next_epoch()
        except BaseException:  # Ctrl-C too: the caller does not have this object yet
            self.end()
            raise
        self.start_up = time.perf_counter() - begin - first["seconds"]
        self.paused_at = self._signal("suspend")

    def turn(self, epochs: int, long: float = LONG) -> None:
        """Run for `epochs` epochs and record the median of their images/s.

        The process was paused early in the first of these epochs. If that epoch takes more than `long` seconds, the
        pause is subtracted from its time. Otherwise, the epoch is discarded and one more runs.
        """
        paused = time.perf_counter() - self.paused_at
        self._signal("resume")
        speeds = []
        last = time.perf_counter()
        while len(speeds) < epochs:
            epoch = self._next_epoch()
            now = time.perf_counter()
            whole = epoch["seconds"] <= now - last  # otherwise, its time includes the pause
            seconds = epoch["seconds"] if whole else epoch["seconds"] - paused
            if speeds or whole or seconds > long:  # both numbers are rounded: use the one with more digits
                speeds.append(self.images / seconds if seconds > LONG else epoch["speed"])
                self.between.append(now - last - seconds)
            last, paused = now, 0
        self.paused_at = self._signal("suspend")
        self.speeds.append(spread(speeds)["median"])

    def finish(self) -> None:
        """Run until the launch ends by itself; exit if it fails."""
        self._signal("resume")
        list(self.epochs)
        if self.process.wait():
            self._next_epoch()

    def end(self) -> None:
        """Kill the launch: its command asks for more epochs than are needed."""
        if self.process.poll() is None:
            kill(self.process.pid)
        self.process.wait()

    def _next_epoch(self):
        for epoch in self.epochs:
            self.losses.append(epoch.get("val_loss"))
            return epoch
        self.errors.seek(0)
        sys.exit(f"{' '.join(self.command)} ended early:\n{self.errors.read()}")

    def _signal(self, action):
        import psutil

        for process in family(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):  # Ctrl-C also ends the process
                getattr(process, action)()
        return time.perf_counter()


def machine(device: torch.device, *paths: str) -> dict:
    """Return hardware, versions, and the last commit that changed `paths` (default: any path)."""
    name, vectors = platform.processor() or platform.machine(), torch.backends.cpu.get_cpu_capability()
    if Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text()
        name = (re.findall(r"model name\s*: (.*)", text) or [name])[0]  # absent on ARM
        vectors += " with AMX" * ("amx_bf16" in text)  # units that multiply matrices in bf16
    gpu = None
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "get_device_name", None)
        gpu = ask(device) if ask else device.type
    commit, changes = (
        subprocess.run(["git", *words, "--", *paths], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for words in (["log", "-1", "--format=%h"], ["status", "--porcelain", "--untracked-files=no"]))
    return {"cpu": name, "cores": os.cpu_count(), "vectors": vectors, "gpu": gpu, "python": platform.python_version(),
            "torch": torch.__version__, "commit": commit + "-dirty" * bool(changes), "date": time.strftime("%Y-%m-%d")}
