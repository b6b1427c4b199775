"""Kill processes with SIGKILL at random moments and during saves, and check that nothing saved is lost.

Each script first runs undisturbed. A second run is killed, and restarted with --resume auto until it completes. After
every kill, all processes of the launch must end by themselves. last.pt must be complete, must not go back and must
include every reported epoch; the next start must resume from it. In the end, last.pt and best.pt must be bit-identical
to those of the undisturbed run, including the optimizer state.

Scripts with DCP write folders in the background. A kill may lose the one that is being written, but not the one before
it, which is at most --snapshot-every steps older.
"""
import contextlib
import datetime
import itertools
import json
import os
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import SCRIPTS, command, load, same
from live import Live

from common import dcp_folders

EPOCHS = 6
DCP = {"train_DCP.py", "language.train_4D"}
STEPS, EVERY = 14, 5  # in an epoch of these, and between their snapshots
ARGUMENTS = ["--epochs", EPOCHS, "--batch-size", 96, "--workers", 1, "--log-every", 2, "--resume", "auto"]
SPECIAL = {"train_amp.py": ["--batch-size", 480],  # bf16 is slow on most CPUs
           "language/train_4D.py": ["--windows", 1344, "--length", 16, "--sample", ""]}


def position(folder: Path) -> tuple[int, int]:
    """Return the progress of the newest checkpoint in `folder`, as (epochs done, steps of the next), else (0, 0)."""
    if whole := dcp_folders.whole_folders(folder):
        dcp_folders.check(whole[-1])
        content = {keys[0]: value for keys, value in json.loads((whole[-1] / "values.json").read_text())}
    else:
        content = load(folder / "last.pt") if (folder / "last.pt").exists() else {"epoch": 0}
    return content["epoch"], content.get("step", 0)


def begun(folder: Path) -> set[str]:
    """Return the names of the files and folders that are being written, or were when a run was killed."""
    return {path.name for path in [*folder.glob(".*.tmp"), *dcp_folders.all_folders(folder)]} - {
        path.name for path in dcp_folders.whole_folders(folder)}


def wait_for_save(live: Live, folder: Path, skip: int) -> None:
    """Skip `skip` saves and return during the next one, or when the run has ended."""
    before = begun(folder)
    while live.process.poll() is None:
        now = begun(folder)
        skip -= len(now - before)
        if skip < 0:
            return
        before = now


def one_life(start: list, folder: Path, chance: random.Random) -> bool:
    """Start a run and kill one of its processes; return whether that ended the run."""
    before = position(folder)
    with Live(*start, "--output-dir", folder) as live:
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
            assert live.end(30) == 0, f"the run failed by itself\n{live.said()}"
            return False
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(chance.choice(family), signal.SIGKILL)
        code = live.end(120)  # without a process that it no longer needs, the run goes on to its end
        after = position(folder)
        done = [int(number) for line in live.out for number in re.findall(r"^epoch +(\d+)/", line)]
        if resumed := [line for line in live.out if line.startswith("resume")]:
            [(steps, epoch)] = re.findall(r"(?:(\d+) steps of )?epoch (\d+) (?:is|are) done", resumed[0])
            found = (int(epoch) - 1, int(steps)) if steps else (int(epoch), 0)
            assert found == before, f"resumed from {found}, but {before} was saved\n{live.said()}"
        assert after >= before, f"the newest checkpoint went back from {before} to {after}\n{live.said()}"
        if DCP & {*start}:
            steps = map(dcp_folders.steps_of, dcp_folders.all_folders(folder))
            reached = max([0, *(epoch * STEPS for epoch in done), *steps])
            assert after[0] * STEPS + after[1] >= reached - EVERY, f"at step {reached}, {after} was the newest"
        else:
            assert not done or after[0] >= done[-1], f"epoch {done[-1]} was reported, and last.pt holds {after}"
        return code != 0  # otherwise the killed process was no longer needed


def undisturbed(start: list, folder: Path) -> None:
    with Live(*start, "--output-dir", folder) as live:
        assert live.end(300) == 0, live.said()


def contents(folder: Path) -> list[dict]:
    """Return the last and the best checkpoint of a run; of DCP, the last folder."""
    for newest in dcp_folders.whole_folders(folder)[-1:]:
        dcp_folders.main(newest, folder / "last.pt")
    return [load(folder / name) for name in ("last.pt", "best.pt") if (folder / name).exists()]


@pytest.mark.nightly
@pytest.mark.parametrize("script", [*SCRIPTS, "language/train_4D.py"])
def test_nothing_is_lost_to_kills(tmp_path, script):
    """At moments that differ from day to day."""
    start = [*command(script), *ARGUMENTS, *SPECIAL.get(script, [])]
    chance = random.Random(f"{script} {datetime.date.today()}")
    undisturbed(start, tmp_path / "whole")
    kills, numbers = 5, itertools.count()
    while kills:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        while position(folder)[0] < EPOCHS:
            if kills:
                kills -= one_life(start, folder, chance)
            else:
                undisturbed(start, folder)
        assert same(contents(tmp_path / "whole"), contents(folder))
