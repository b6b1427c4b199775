"""Measure several programs by turns: all are started, then one at a time runs for some epochs while the others stand.

On a machine with neighbours the speed wanders by tens of percent within minutes. Programs run one after the other are
then measured in different weather; programs that take turns of a second or two are measured in the same.
"""
import contextlib
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
LONG = 5  # seconds: the scripts print hundredths of one
EPOCH = re.compile(r"^epoch +\d+/\d+ .*?([\d.]+) s  ([\d,]+) images/s")


class Contender:
    """One launch, started at once and stopped after its first epoch; its output is a line "epoch ..." for each epoch.

    An epoch trains on so many `images`. `start_up` is the time in seconds from the command to the line of its first
    epoch, without the seconds that this epoch says it trained.
    """

    def __init__(self, command, images, threads=None):
        self.images = images
        self.errors = tempfile.TemporaryFile("w+")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        begin = time.perf_counter()
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self.errors, text=True,
                                        env=environment)
        self.command = command
        try:
            seconds, _ = self._next_epoch()
        except BaseException:  # Ctrl-C too: nobody else knows of it yet
            self.end()
            raise
        self.start_up = time.perf_counter() - begin - seconds
        self.speeds, self.between = [], []
        self._pause()

    def turn(self, epochs):
        """Run for `epochs` epochs and note the median of their images/s.

        The pause fell into the first of them, soon after its start. Where an epoch takes more than LONG seconds, the
        pause is taken off its time; else it does not count, and one more is run.
        """
        paused = time.perf_counter() - self.paused_at
        self._signal(psutil.Process.resume)
        speeds = []
        last = time.perf_counter()
        while len(speeds) < epochs:
            seconds, speed = self._next_epoch()
            now = time.perf_counter()
            whole = seconds <= now - last  # else its clock has counted the pause
            true_seconds = seconds if whole else seconds - paused
            if speeds or whole or true_seconds > LONG:  # each is printed rounded: take the one with more digits
                speeds.append(self.images / true_seconds if true_seconds > LONG else speed)
                self.between.append(now - last - true_seconds)
            last, paused = now, 0
        self._pause()
        self.speeds.append(statistics.median(speeds))
        return self.speeds[-1]

    def end(self):
        """End the launch, which has more epochs before it than it was asked for."""
        if self.process.poll() is None:
            self._signal(psutil.Process.kill)
        self.process.wait()

    def _pause(self):
        self._signal(psutil.Process.suspend)
        self.paused_at = time.perf_counter()

    def _next_epoch(self):
        for line in self.process.stdout:
            match = EPOCH.match(line)
            if match:
                return float(match[1]), float(match[2].replace(",", ""))
        self.errors.seek(0)
        sys.exit(f"{' '.join(self.command)} ended early:\n{self.errors.read()}")

    def _family(self):
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def _signal(self, what):
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):  # Ctrl-C reached it, too
                what(process)


def launch(processes, script, *arguments):
    """Return the command that starts `script` under torchrun, or by itself for no processes."""
    if not processes:
        return [sys.executable, script, *arguments]
    with socket.create_server(("", 0)) as server:  # free now: --standalone's rendezvous does not like to stand still
        port = server.getsockname()[1]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}",
            script, *arguments]


def name_processes(number):
    """Return "1 process" or "2 processes"."""
    return f"{number} process" if number == 1 else f"{number} processes"


def spread(values):
    """Return the median, the lowest and the highest of some numbers."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def machine(device, *paths):
    """Return what figures depend on: hardware, versions, and the last commit that changed `paths` (default: any).

    "gpu" is the name of the accelerator `device`, or None where that is the CPU.
    """
    name, vectors = platform.processor() or platform.machine(), torch.backends.cpu.get_cpu_capability()
    if Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text()
        found = re.search(r"model name\s*: (.*)", text)  # ARM has none
        name = found[1] if found else name
        vectors += " with AMX" * ("amx_bf16" in text)  # units that multiply matrices in bf16
    gpu = None
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "get_device_name", None)
        gpu = ask(device) if ask else device.type
    asked = ["git", "log", "-1", "--format=%h"], ["git", "status", "--porcelain", "--untracked-files=no"]
    commit, changes = (subprocess.run([*command, "--", *paths], cwd=ROOT, capture_output=True, text=True).stdout.strip()
                       for command in asked)
    return {"cpu": name, "cores": os.cpu_count(), "vectors": vectors, "gpu": gpu,
            "python": platform.python_version(), "torch": torch.__version__,
            "commit": commit + "-dirty" * bool(changes), "date": time.strftime("%Y-%m-%d")}
