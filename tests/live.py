"""A launch that a test observes and interrupts while it runs."""
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, descendants, processes_of_session


class Live(contextlib.AbstractContextManager):
    """A command in a separate session, whose two output streams are read line by line.

        with Live(PYTHON, "train.py") as run:
            run.wait_for("epoch +1/")
            run.interrupt()
            assert run.end(10) == 130

    On leaving the block whatever is left of the session is killed.
    """

    def __init__(self, *command, cwd=ROOT, env=None):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_NUM_"))}
        self.command = [str(part) for part in command]
        self.process = subprocess.Popen(self.command, cwd=cwd, env=environment | (env or {}), start_new_session=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True)
        self.out, self.err = [], []
        self._news = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in
                         ((self.process.stdout, self.out), (self.process.stderr, self.err))]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines):
        for line in stream:
            with self._news:
                lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, pattern, seconds=120):
        """Return the first line of either output that matches; fail if the command ends or time is up before."""
        end = time.monotonic() + seconds
        with self._news:
            while True:
                for line in [*self.out, *self.err]:
                    if re.search(pattern, line):
                        return line
                alive = any(reader.is_alive() for reader in self._readers)
                if not alive or not self._news.wait(min(0.5, end - time.monotonic())) and time.monotonic() > end:
                    pytest.fail(f"{' '.join(self.command)}: no line {pattern!r}\n{self.said()}")

    def said(self):
        return "\n".join([*self.out[-30:], *self.err[-30:]])

    def family(self):
        """Return the command's process and all its descendants, which can have sessions of their own."""
        return descendants(self.process.pid) if self.process.poll() is None else []

    def ranks(self):
        """Return {rank: process} for the processes that a launcher has started."""
        found = {}
        for pid in self.family():
            with contextlib.suppress(OSError):  # it has ended
                if match := re.search(r"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_text()):
                    found.setdefault(int(match[1]), pid)  # the workers of its loader inherit the variable
        return found

    def with_torch(self):
        """Return how many of these processes have begun to import torch."""
        count = 0
        for pid in self.family():
            with contextlib.suppress(OSError):  # it has ended
                count += "libtorch" in Path(f"/proc/{pid}/maps").read_text()
        return count

    def interrupt(self):
        """Press Ctrl-C: the terminal signals the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, seconds):
        """Return the exit code once the command and all its processes have ended; fail if that takes longer."""
        limit = time.monotonic() + seconds
        family = set(self.family())
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{' '.join(self.command)}: not at an end after {seconds} s\n{self.said()}")
        while (left := [pid for pid in family if alive(pid)]) and time.monotonic() < limit:
            time.sleep(0.02)
        names = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left if alive(pid)]
        assert not left, f"{' '.join(self.command)}: left behind after {seconds} s: {names}\n{self.said()}"
        for reader in self._readers:
            reader.join(5)
        return self.process.returncode

    def __exit__(self, *_):
        for pid in {*self.family(), *processes_of_session(self.process.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def alive(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


def ours(lines):
    """Return the error lines of the scripts themselves, without those of a launcher."""
    return [line for line in lines if re.match(r"(train|loader)\w*\.py: error: ", line)]
