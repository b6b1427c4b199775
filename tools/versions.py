"""Run every script with several versions of torch on CPUs, and write docs/versions.md: a table, script by version.

    python -m tools.versions 2.11 2.13 2.15
    python -m tools.versions 2.11 --steps resume --only "train_T|train_DCP" --environments ~/environments
    python -m tools.versions --here                                        # this environment's torch; prints JSON

Each version gets a new virtual environment with requirements.txt, which takes 5.5 GB and is deleted afterwards, except
with --environments. A script that a launcher starts gets two processes, others get one. A training script trains two
epochs and saves both, resumes after the first one, evaluates the result, and tries --freeze-layers and --compile if it
has them. One process imports torch and forks all others, so no run waits for an import.

Only a complete run writes docs/versions.md. Exit code 1: a run failed, or a version could not be installed.
"""
import argparse
import atexit
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import IO

import torch

from benchmarks.measure import machine
from benchmarks.tables import ROOT, table
from common.launch import end_with_parent

PAGE = ROOT / "docs/versions.md"
LIMIT = 300  # seconds for one run
# What makes a run short, by the first pattern that fits the script; loader workers would import torch again
SMALL = {"minimal/": ["--device", "cpu", "--output", "best.pt", "--epochs", "2"],
         "check": ["--cpu"],
         "loader": ["--device", "cpu", "--workers", "0", "--epochs", "2"],
         "language/train_LoRA": ["--batch-size", "12", "--windows", "52", "--length", "128", "--sample", ""],
         "language/train_GRPO": ["--batch-size", "12", "--windows", "24", "--length", "128", "--max-new", "8",
                                 "--sample", ""],
         "language/train_SFT": ["--batch-size", "12", "--windows", "52", "--length", "128", "--sample", ""],
         "language/train_DPO": ["--batch-size", "12", "--windows", "52", "--length", "128", "--sample", ""],
         "language/": ["--batch-size", "24", "--windows", "104", "--length", "32", "--sample", ""],
         "detection/": ["--batch-size", "128", "--image-size", "32"],
         "train_amp": ["--batch-size", "480"],  # bf16 is slow on many CPUs
         "train": ["--batch-size", "96", "--lr", "0.003"]}  # higher rates would amplify the rounding of compiled code
TRAIN = ["--device", "cpu", "--workers", "0", "--epochs", "2", "--save-every", "1", "--output-dir"]
WARNING = re.compile(r"^.*(?:Warning: |Traceback \(most|^(?:\[rank\d+\]:)?\[?[WE]\d{4} ).*$", re.M)
QUIET = re.compile(r"site-packages/(?!torch/)|"  # a package's warning of its own code
                   "No CUDA runtime is found, using CUDA_HOME|"  # a CPU, on a machine with CUDA's compiler
                   "is_opaque_value is deprecated|"  # torch 2.14, of its own code, in --compile
                   "AOTAutograd cache unable to serialize|"  # torch 2.15 compiles again in the next run
                   "FSDP2-wrapped module")  # train_TP.py: split layers return views; nothing changes them in place
# A script's one line about a newer torch, or about another package
REFUSED = re.compile(r"error: .*?(torch \d+\.\d+ or newer|requirements/\w+\.txt)")
SCRIPTS = {path.relative_to(ROOT).as_posix(): path for pattern in (
    "minimal/train*.py", "train*.py", "language/train*.py", "detection/train*.py", "loader*.py", "check.py")
    for path in sorted(ROOT.glob(pattern))}
TEXT = """# Versions of torch

Each training script trains two epochs on a CPU, with two processes where a launcher starts it. It saves each epoch,
resumes after the first one and prints the same numbers, evaluates the last one, and tries `--freeze-layers` and
`--compile`. "ok" also means that torch printed no warning. A workflow repeats this every week. To write this page:

    python -m tools.versions {versions}    # on {date}: commit {commit}, Python {python}, {cpu}, {cores} cores

{table}

torch 2.10 and older are not supported: `train_TP.py --freeze-layers` silently trained nearly all layers there, and
`train_PP.py` aborted in gloo with torch 2.9.
"""


class Failed(Exception):
    """A run did not do what it should; the message says what."""


def fork(rank: int, processes: int, port: int, command: list[str], streams: list[IO[str]]) -> int:
    """Start rank `rank` of a command in a process that has already imported torch; return its process ID."""
    if pid := os.fork():
        return pid
    code: object = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams, 1):
            os.dup2(stream.fileno(), number)
        if processes > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank),
                           "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        sys.argv = command
        if (Path(command[0]).parent / "__init__.py").exists():  # as `python -m language.train` does
            runpy.run_module(".".join(Path(command[0]).with_suffix("").parts[-2:]), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # sys.exit() would return into the process that forks
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def wait(ranks: list[int]) -> list[int]:
    """Return the exit codes of processes; like a launcher, end the others after a failure, and all after LIMIT."""
    left, codes, end = {*ranks}, [], time.monotonic() + LIMIT
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            left.remove(pid)
            codes.append(os.waitstatus_to_exitcode(status))
        if any(codes) or time.monotonic() > end:
            for other in left:
                os.kill(other, signal.SIGKILL if time.monotonic() > end else signal.SIGTERM)
        time.sleep(0.1 if left and not pid else 0)
    return codes


def run(script: Path, *options: str, processes: int, folder: Path) -> tuple[str, str]:
    """Run a script in a folder and return its two outputs; raise Failed unless all of its processes exit with 0."""
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        os.chdir(folder)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        codes = wait([fork(rank, processes, port, [str(script), *options], [out, err]) for rank in range(processes)])
        out.seek(0), err.seek(0)
        said, errors = out.read(), err.read()
    if any(codes):
        lines = re.findall(r"^.*(?:error|Error|Exception): .*$", errors, re.M) or errors.split("\n") or ["no message"]
        raise Failed(f"exit codes {codes}: {lines[-1]}")
    return said, errors


class Trial:
    """Tries one script in an empty folder. `trainable` says what --freeze-layers leaves to train, by root script."""

    def __init__(self, script: Path, folder: Path, trainable: dict[str, str]) -> None:
        self.script, self.folder, self.trainable = script, folder, trainable
        self.name = script.relative_to(ROOT).as_posix()
        self.processes = 2 if re.search("^    (torchrun|python -m torch)", script.read_text(), re.M) else 1
        self.small = next(options for prefix, options in SMALL.items() if self.name.startswith(prefix))
        self.trains = script.name.startswith("train") and script.parent.name != "minimal"
        self.warnings: set[str] = set()
        self.epochs: dict[str, str] = {}

    def run(self, only: str = "") -> dict[str, str]:
        """Train, and take the other steps whose names match `only`; return {step: "", or what is wrong}."""
        steps: dict[str, Callable[[], object]] = {"start": lambda: self.start("")}
        if self.trains:
            steps = {"train": self.train, "--resume": self.resume, "--evaluate": self.evaluate}
            more = {"--freeze-layers": self.freeze_layers, "--compile": self.compile}
            steps |= {option: step for option, step in more.items() if f'"{option}"' in self.script.read_text()}
            steps = {name: step for name, step in steps.items() if name == "train" or re.search(only, name)}
        results = {}
        for name, step in steps.items():
            try:
                step()
                results[name] = ""
            except Failed as error:
                results[name] = str(error)
                if name == "train":
                    break
        return results | {"warnings": "; ".join(sorted(self.warnings))}

    def start(self, output: str, *options: str) -> str:
        """Run the script and return what it prints."""
        common = [*TRAIN, output] if self.trains else []
        said, errors = run(self.script, *common, *self.small, *options, processes=self.processes, folder=self.folder)
        self.warnings.update(line.strip() for line in WARNING.findall(errors) if not QUIET.search(line))
        return said

    def train(self) -> None:
        self.epochs = self.epochs_of(self.start("whole"))
        if self.epochs.keys() != {"1", "2"}:
            raise Failed(f"prints the epochs {[*self.epochs]} instead of 1 and 2")

    @staticmethod
    def epochs_of(said: str) -> dict[str, str]:
        """Return {number of the epoch: its losses and metrics as printed}."""
        return dict(re.findall(r"^epoch +(\d+)/\d+  (.*?)  lr", said, re.M))

    def checkpoint(self, epoch: int) -> str:
        """Return a file, or a DCP script's folder, that is saved after an epoch."""
        found = sorted((self.folder / "whole").glob("step-*")) or [
            self.folder / f"whole/epoch-{number:03}.pt" for number in (1, 2)]
        return str(found[epoch - 1])

    def resume(self) -> None:
        said = self.epochs_of(self.start("resumed", "--resume", self.checkpoint(1)))
        if said != {"2": self.epochs["2"]}:
            raise Failed(f"{said} instead of {self.epochs['2']}")

    def evaluate(self) -> None:
        said = self.start("evaluated", "--evaluate", "--resume", self.checkpoint(2))
        expected = self.epochs["2"].partition("  ")[2]
        if expected not in said:
            raise Failed(f"{said.splitlines()[-1:]} instead of {expected!r}")

    def freeze_layers(self) -> None:
        said = self.start("frozen", "--freeze-layers")
        found = re.findall(r"[\d,]+ of [\d,]+ parameters", said)[0]
        expected = self.trainable.setdefault(self.script.parent.name, found)
        if found != expected:
            raise Failed(f"trains {found} instead of {expected}")

    def compile(self) -> None:
        said = self.epochs_of(self.start("compiled", "--compile"))["2"]
        found, expected = ([*map(float, re.findall(r"[\d.]+", text))] for text in (said, self.epochs["2"]))
        if any(abs(one - two) > 0.02 * max(1, two) for one, two in zip(found, expected, strict=True)):
            raise Failed(f"{said} instead of {self.epochs['2']}")


def try_all(only: str, steps: str) -> dict[str, dict[str, str]]:
    """Run `steps` of the scripts whose names match `only`, with this environment's torch; return each one's results."""
    sys.path.insert(0, str(ROOT))
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)  # torch has read OMP_NUM_THREADS already
    # everything that takes long to import; none of these imports starts a thread, which a fork would lose
    for module in ("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint",
                   "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
                   "torch.utils.tensorboard", "torchvision"):
        importlib.import_module(module)
    results, trainable = {}, dict[str, str]()
    for name, script in SCRIPTS.items():
        if not re.search(only, name):
            continue
        begin = time.monotonic()
        folder = tempfile.mkdtemp()  # at its exit, a fork would delete a TemporaryDirectory
        results[name] = Trial(script, Path(folder), trainable).run(steps)
        shutil.rmtree(folder)
        wrong = "; ".join(f"{step}: {said}" for step, said in results[name].items() if said)
        print(f"{name}: {wrong or 'ok'} ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
    return results


def is_wrong(said: str) -> bool:
    """Return whether a step of a script failed, not counting what the script refuses, naming what it needs."""
    return bool(said) and not REFUSED.search(said)


def try_version(asked: str, environment: Path, options: list[str]) -> dict:
    """Run the scripts with torch `asked` in a new or existing environment; return its versions and their results."""
    python = environment / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", f"torch=={asked}.*"]
        if subprocess.run([*pip, "-r", "requirements.txt", "-r", "requirements/streaming.txt"], cwd=ROOT).returncode:
            shutil.rmtree(environment)  # or the next command would reuse it
            return {"title": f"{asked}: not installed", "scripts": {}}
    return json.loads(subprocess.run([python, "-m", "tools.versions", "--here", *options], cwd=ROOT, text=True,
                                     stdout=subprocess.PIPE, check=True).stdout)


def cell(results: dict[str, str]) -> str:
    """Return what the table says of one script with one version."""
    said = []
    for step, text in results.items():
        if is_wrong(text):
            said.append(f"{step}: **fails**")
        elif text:
            said.append(f"{step}: needs {REFUSED.findall(text)[0]}")
    return "; ".join(said) or "ok"


def write(found: list[dict], asked: list[str]) -> None:
    """Write the page."""
    rows = [[f"`{name}`", *(cell(each["scripts"][name]) if each["scripts"] else "-" for each in found)]
            for name in SCRIPTS]
    PAGE.write_text(TEXT.format(versions=" ".join(asked), **machine(torch.device("cpu")), table=table(
        ["script", *(each["title"] for each in found)], rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="such as 2.11 or 2.14")
    parser.add_argument("--here", action="store_true", help="only this environment's torch; print the results as JSON")
    parser.add_argument("--only", default="", help="only the scripts whose names match this expression")
    parser.add_argument("--steps", default="", help="after training, take only the steps whose names match this "
                        "expression: --resume, --evaluate, --freeze-layers, --compile")
    parser.add_argument("--environments", type=Path, help="keep the environments in this folder, and reuse them")
    args = parser.parse_args()
    if args.here == bool(args.versions):
        parser.error("pass versions, or --here")
    if args.here:
        end_with_parent("SIGTERM")
        scripts = try_all(args.only, args.steps)
        print(json.dumps({"title": f"{version('torch')}, torchvision {version('torchvision')}", "scripts": scripts}))
        return
    options = ["--only", args.only, "--steps", args.steps]
    found = []
    for asked in args.versions:
        with tempfile.TemporaryDirectory() as temporary:
            environment = (args.environments or Path(temporary)).expanduser().resolve() / asked
            found.append(try_version(asked, environment, options))
    if not args.only and not args.steps:
        write(found, args.versions)
    wrong = [f"{each['title']}: {name}: {step}: {said}" for each in found for name, results in each["scripts"].items()
             for step, said in results.items() if is_wrong(said)]
    wrong += [each["title"] for each in found if not each["scripts"]]
    print("\n".join(wrong) or "every script runs")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
