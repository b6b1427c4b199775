"""Kill processes with SIGKILL at random moments and during saves, and check that nothing saved is lost.

    PYTHONPATH=.:tools python tests/random_kills.py --kills 50    # about 20 minutes; writes docs/random-kills.md
    PYTHONPATH=.:tools python tests/random_kills.py --kills 5 --scripts train_mp.py --report -

Each script first runs undisturbed. Then the tool kills a second run again and again, and restarts it with --resume auto
until it completes. After every kill, all processes of the launch must end by themselves. last.pt must be complete, must
not go back and must include every reported epoch; the next start must resume from it. In the end, last.pt and best.pt
must be bit-identical to those of the undisturbed run, including the optimizer state.

train_DCP.py writes folders in the background. A kill may lose the one that is being written, but not the one before it,
which is at most --snapshot-every steps older.
"""
import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from conftest import ROOT, command, load, same
from conftest import SCRIPTS as ALL
from live import Live

from common import folders

EPOCHS = 6
STEPS, EVERY = 14, 5  # in an epoch of train_DCP.py, and between its snapshots
ARGUMENTS = ["--epochs", EPOCHS, "--batch-size", 96, "--workers", 1, "--log-every", 2, "--resume", "auto"]
SPECIAL = {"train_amp.py": ["--batch-size", 480]}  # bf16 is slow on most CPUs
COMMANDS = {script: [*command(script), *ARGUMENTS, *SPECIAL.get(script, [])] for script in ALL}


class Lost(AssertionError):
    """A checkpoint was lost or damaged, or a process was left running."""


def check(holds: bool, what: str, live: Live) -> None:
    if not holds:
        raise Lost(f"{what}\n{live.said()}")


def position(folder: Path) -> tuple[int, int]:
    """Return the progress of the newest checkpoint in `folder`, as (epochs done, steps of the next), else (0, 0)."""
    if whole := folders.whole_folders(folder):
        folders.check(whole[-1])
        content = {keys[0]: value for keys, value in json.loads((whole[-1] / "values.json").read_text())}
    else:
        content = load(folder / "last.pt") if (folder / "last.pt").exists() else {"epoch": 0}
    return content["epoch"], content.get("step", 0)


def begun(folder: Path) -> set[str]:
    """Return the names of the files and folders that are being written, or were when a run was killed."""
    return {path.name for path in [*folder.glob(".*.tmp"), *folders.all_folders(folder)]} - {
        path.name for path in folders.whole_folders(folder)}


def wait_for_save(live: Live, folder: Path, skip: int) -> None:
    """Skip `skip` saves and return during the next one, or when the run has ended."""
    before = begun(folder)
    while live.process.poll() is None:
        now = begun(folder)
        skip -= len(now - before)
        if skip < 0:
            return
        before = now


def one_life(command: list[str], folder: Path, chance: random.Random) -> tuple[str, str] | None:
    """Start a run and kill one of its processes; return what was killed and when, or None if the run finished first."""
    arguments = [*command, "--output-dir", folder]
    before, left = position(folder), begun(folder)
    with Live(*arguments) as live:
        plan = chance.choice(["start-up", "any moment", "any moment", "in a save", "in a save"])
        if plan == "in a save":
            wait_for_save(live, folder, chance.randrange(4))
        else:
            if plan == "any moment":
                live.wait_for("^cpu: batch|^epoch|Traceback")
            with contextlib.suppress(subprocess.TimeoutExpired):
                live.process.wait(chance.uniform(0.5, 6) if plan == "start-up" else chance.uniform(0, 4))
        family = live.family()
        if live.process.poll() is not None or not family:
            check(live.end(30) == 0, f"the run failed by itself, exit code {live.process.returncode}", live)
            return None
        victim = chance.choice(family)
        try:
            who = "the launcher" if victim == family[0] and "-m" in command else "a process or loader's worker"
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            who = "nobody: it had just ended"
        torn = begun(folder) - left
        code = live.end(40)
        after = position(folder)
        done = [int(line.split("/")[0].split()[1]) for line in live.out if line.startswith("epoch")
                and "/" in line.split("  ")[0]]
        resumed = [line for line in live.out if line.startswith("resume")]
        if resumed:
            [(steps, epoch)] = re.findall(r"(?:(\d+) steps of )?epoch (\d+) (?:is|are) done", resumed[0])
            start = (int(epoch) - 1, int(steps)) if steps else (int(epoch), 0)
            check(start == before, f"resumed from {start}, but {before} was saved", live)
        check(after >= before, f"the newest checkpoint went back from {before} to {after}", live)
        if "train_DCP.py" in command:
            reached = max([0, *(epoch * STEPS for epoch in done), *map(folders.steps_of, folders.all_folders(folder))])
            check(after[0] * STEPS + after[1] >= reached - EVERY, f"at step {reached}, {after} was the newest", live)
        else:
            check(not done or after[0] >= done[-1], f"epoch {done[-1:]} was reported, and last.pt holds {after}", live)
        if code == 0:  # the killed process was no longer needed
            return None
    return who, "in a save" if torn else plan.replace("in a save", "any moment")


def disturb(script: str, kills: int, seed: int) -> tuple[collections.Counter[tuple[str, str]], int]:
    """Kill runs of a script `kills` times; return a Counter of what was killed and when, and the number of runs."""
    command = list(map(str, COMMANDS[script]))
    chance = random.Random(f"{script} {seed}")
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        arguments = [*command, "--output-dir", whole]
        with Live(*arguments) as live:
            check(live.end(300) == 0, "the undisturbed run failed", live)
        done: collections.Counter[tuple[str, str]] = collections.Counter()
        runs = 0
        while done.total() < kills:
            runs += 1
            disturbed = Path(folder, f"disturbed{runs}")
            disturbed.mkdir()
            while position(disturbed)[0] < EPOCHS:
                if done.total() < kills:
                    killed = one_life(command, disturbed, chance)
                    done.update([killed] if killed else [])
                    continue
                with Live(*[str(disturbed) if part == whole else part for part in arguments]) as live:
                    check(live.end(300) == 0, "the last start failed", live)
            for place in (whole, disturbed):
                for newest in folders.whole_folders(place)[-1:]:
                    folders.main(newest, place / "last.pt")
            for name in ("last.pt", "best.pt") if (whole / "best.pt").exists() else ["last.pt"]:
                if not same(load(whole / name), load(disturbed / name)):
                    raise Lost(f"{script}: {name} differs from the undisturbed run's")
    return done, runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="number of kills in total, over all scripts")
    parser.add_argument("--scripts", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", default=str(ROOT / "docs/random-kills.md"), help="file to write; - for none")
    args = parser.parse_args()
    lines = []
    for number, script in enumerate(args.scripts):
        share = args.kills // len(args.scripts) + (number < args.kills % len(args.scripts))
        begin = time.monotonic()
        done, runs = disturb(script, share, args.seed)
        by_moment = collections.Counter(moment for _, moment in done.elements())
        launchers = sum(count for (who, _), count in done.items() if who == "the launcher")
        lines.append(f"| `{script}` | {done.total()} | {by_moment['start-up']} | {by_moment['any moment']} | "
                     f"{by_moment['in a save']} | {launchers} | {runs} | 0 | yes | {time.monotonic() - begin:.0f} |")
        print(lines[-1], flush=True)
    if args.report != "-":
        command = f"PYTHONPATH=.:tools python tests/random_kills.py --kills {args.kills} --seed {args.seed}"
        columns = ["script", "kills", "at start-up", "at any moment", "in a save", "kills of the launcher",
                   "runs completed", "saved epochs or snapshots lost", "final files bit-equal", "seconds"]
        head = (f"# kill -9, at random\n\nWritten by `{command}` on {time.strftime('%Y-%m-%d')}. The program stops\n"
                "as soon as a run has lost an epoch or a snapshot.\n\n"
                f"| {' | '.join(columns)} |\n|---|{'---:|' * 7}---|---:|\n")
        Path(args.report).write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
