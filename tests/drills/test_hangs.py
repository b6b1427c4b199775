"""docs/hangs.md and docs/errors.md show what programs with several processes really print."""
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, py_spy, run
from live import Live

BLOCKS = re.findall(r"```console\n(.*?)\n```", (ROOT / "docs/hangs.md").read_text(), re.S)
COMMANDS = {command: lines.splitlines() for block in BLOCKS
            for command, lines in re.findall(r"^\$ (.+)\n?((?:(?!\$ ).+\n?)*)", block, re.M)}
ENDING = [command for command in COMMANDS if "torchrun" in command and ("--timeout" in command or "DETAIL" in command)]


def split(command):
    """Return (environment, command for this Python)."""
    words = command.split()
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = words[len(variables):]
    assert words[0] == "torchrun"
    return variables, [sys.executable, "-m", "torch.distributed.run", *words[1:]]


def shows(output, line):
    """Return whether a line of the page is in an output; `...` and machine-dependent parts match anything."""
    parts = re.split(r"\.\.\.|(?<=c10d\.py:)\d+|(?<=queue\.py:)\d+|(?<=\[rank\d\]: )|(?<=File \")", line)
    return re.search("[^\n]*".join(map(re.escape, parts)), output)


@pytest.mark.parametrize("command", [
    ENDING[0], *(pytest.param(command, marks=pytest.mark.nightly) for command in ENDING[1:])])
def test_a_command_prints_what_the_page_shows(command):
    variables, words = split(command)
    result = run(*words, env=variables, seconds=120)
    assert result.code == 1 and COMMANDS[command]
    for line in COMMANDS[command]:
        assert shows(result.out + result.err, line), f"{line}\nis not in\n{result.out}{result.err}"


@pytest.mark.parametrize("stuck", [pytest.param([], marks=pytest.mark.nightly), ["--stuck"]])
def test_py_spy_finds_the_missing_rank(stuck):
    """All ranks except the missing one are in the all-reduce, and each stack contains the lines on the page."""
    if not py_spy():
        pytest.skip("no py-spy: pip install -r requirements/drill.txt")
    block, = (block for block in BLOCKS if "py-spy" in block and ("--stuck" in block) == bool(stuck))
    start, dump = (command for command in re.findall(r"^\$ (.+)", block, re.M))
    with Live(*split(start)[1]) as launch:
        for rank in range(2):
            launch.wait_for(f"rank {rank}: 3 steps are done")
        waits = {0: "validate", 1: "next_batch" if stuck else "barrier"}
        found = {}
        while found != waits:  # a rank prints a moment before it waits; hang.py's own timeout would end this
            said = run(py_spy(), *dump.split("$(")[0].split()[1:], launch.process.pid, seconds=60)
            assert said.code == 0, said.err
            found = {rank_of(stack): next((name for name in waits.values() if f"    {name} (" in stack), None)
                     for stack in said.out.split("\nProcess ") if "hang.py:" in stack}
            assert launch.process.poll() is None, launch.said()
    for line in block.splitlines():
        if line.startswith("    "):
            assert shows(said.out, line), line


@pytest.mark.parametrize(("name", "message"), [
    ("shared_memory", "is killed by signal: Bus error. It is possible that dataloader's workers are out of shared"),
    *(pytest.param(*row, marks=pytest.mark.nightly) for row in (
        ("shapes", "appears not to match sizes of the same param in process 0."),
        ("peer", "Connection (reset|closed) by peer"),
        ("sizes", "Received data size doesn't match expected size."),
        ("worker_exits", r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"),
        ("worker_raises", "Caught RuntimeError in DataLoader worker process 0."),
        ("open_files", "Too many open files. Communication with the workers is no longer possible.")))])
def test_an_example_with_processes_produces_the_message(name, message):
    result = run(sys.executable, "docs/examples/errors.py", name)
    assert result.code == 1 and re.search(message, result.err), result.err


def rank_of(stack):
    pid = re.search(r"(\d+):", stack)[1]
    return int(re.search(r"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_text())[1])
