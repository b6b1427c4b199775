"""Run a command so that its processes record their steps, and kill all processes that it started."""
import collections
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from .comparing import Failure

SITE = """import gc, importlib.machinery, importlib.util, os, sys, types
gc.set_threshold(10_000)  # with the default, 700, the collector would take an eighth of the time to load torch
class OnTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            if spec := importlib.util.find_spec(name):
                load = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (sys.meta_path.remove(self), load(module), record())
            sys.meta_path.insert(0, self)  # some libraries only check that torch exists
            return spec
def record():  # under another name, as the program may have a module that is called verify
    sys.modules["_verify"] = types.ModuleType("_verify")
    sys.modules["_verify"].__path__ = [{package!r}]
    importlib.import_module("_verify.recording").Recorder(**{options!r})
sys.meta_path.insert(0, OnTorch())
path = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize", path):  # the program's own sitecustomize
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
LONGEST, TAIL = 10_000, 10_000  # characters of a line, and lines at the end of the output, that are read
LAST = 15  # how many lines of a failed command's output to show if it has no traceback


def environment(folder, **options):
    """Return the environment variables that make a command record its steps in `folder`. `options` are Recorder's."""
    site = Path(folder).resolve() / "site"
    site.mkdir(parents=True)
    options = {"folder": str(site.parent), **options}
    (site / "sitecustomize.py").write_text(SITE.format(package=str(Path(__file__).resolve().parent), options=options))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}


def record(command, folder, timeout, sent=None, **options):
    """Run a command until it ends, records the last requested step or times out; return None or a Failure.

    If a signal is to be `sent`, the command gets it when it has recorded the last requested step, and may then go on.
    """
    env = {**os.environ, **environment(folder, **options)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    end, code = time.monotonic() + timeout, None
    with open(folder / "output", "w+") as output:
        try:
            process = subprocess.Popen(shlex.split(command), env=env, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=output, start_new_session=True)
        except OSError as error:
            return Failure(str(error))
        try:
            while code is None and time.monotonic() < end:
                done = [path.name for path in folder.glob("done-*")]
                reached = done and len(done) == int(done[0].split("-")[-1])
                if reached and sent and not (folder / "signalled").exists():
                    process.send_signal(sent)
                    (folder / "signalled").touch()
                code = 0 if reached and not sent else process.poll()
                time.sleep(0.05)
        finally:
            stop(process, folder)
    if code == 0:
        return None
    text = own_error("".join(collections.deque(printed(folder), TAIL)))
    if code is not None:
        return Failure(f"exit code {code}", text)
    quiet = time.time() - max((path.stat().st_mtime for path in folder.glob("*.jsonl")), default=0.0)
    training = quiet < min(60, timeout / 4)
    busy = ", still training: raise --timeout or pass --steps" if training else ""
    return Failure(f"did not end within {timeout:g} s{busy}", text, hung=True, training=training)


def printed(folder):
    """Yield the lines that a command has printed, cut to LONGEST characters."""
    with open(Path(folder, "output"), errors="replace") as file:
        while line := file.readline(LONGEST):
            yield line


def own_error(text):
    """Return the last lines of the first traceback that is not the launcher's, or the last lines of the output.

    Leave out lines that only rule off, as around torchrun's summary.
    """
    lines = [re.sub(r"^\[(?:rank)?\d+\]:\s?", "", line) for line in text.splitlines() if line.strip(" =-")]
    for start in (number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")):
        end = next((number for number in range(start + 1, len(lines)) if not lines[number].startswith((" ", "\t"))),
                   len(lines) - 1)
        if "ChildFailedError" not in lines[end]:
            return "\n".join(lines[max(start + 1, end - 4):end + 1])
    end = next((number for number, line in enumerate(lines) if re.match(r"\w*Error: ", line)), None)  # SyntaxError
    return "\n".join(lines[-LAST:] if end is None else lines[max(0, end - 3):end + 1])


def stop(process, folder):
    """Kill a command and, on Linux, all its processes, which have the folder in their environment."""
    process.kill()
    found = True
    while found:
        found = False
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{folder.resolve()}/site".encode() in entry.read_bytes():
                    os.kill(int(entry.parent.name), 9)
                    found = True
            except OSError:
                continue
    process.wait()
