"""Measure verify on the programs in this folder, which reproduce bugs of other projects in these projects' styles.

    python -m verify.bugs                       # everything (an hour on two cores), and the table in verify/README.md
    python -m verify.bugs trainer experts       # some programs, without the table
    python -m verify.bugs --show trainer no-set-epoch     # the wrong form of a program, as a diff

Each program is correct as it is. Its docstring gives the commands A and B that train the same model,
and its bugs:

    A: python {}
    B: torchrun --nproc-per-node=2 {}
    Needs: accelerate
    Bug: transformers-34242: uneven-mean: https://github.com/huggingface/transformers/issues/34242
        What the user saw, and why it happened.
    Options transformers-34242: --accum 2

With "Resume: FOLDER", verify kills A, resumes it with B, and must name what the resumed run has lost. The program saves
in FOLDER.

After the name of a bug come the causes that verify may name, separated by "|". "Needs" names packages besides torch.
"Options" belong to both commands. A comment on a line switches the bug on: in the wrong form of the program, the text
after the comment's colon replaces the line. If the comment is alone on its line, the text is inserted. If no text
follows the colon, the line is deleted.

    dist.all_reduce(count)  # wrong transformers-34242: pass
    # wrong transformers-34242: count = count / 2
"""
import argparse
import ast
import difflib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import measure, tables
from benchmarks.tables import ROOT

FOLDER = Path(__file__).resolve().parent
PAGE, RESULT = FOLDER.parent / "README.md", FOLDER / "results.json"
SWITCH = re.compile(r"^(?P<indent> *)(?P<line>.*?) *# wrong (?P<name>[\w-]+): ?(?P<code>.*)$")
EXAMPLES = [  # of docs/your-own-loop.md: example, bug, cause, the right line, the wrong line, issue
    ("schedule", "schedule-wrong", "rank-lr", "plateau.step(val_loss)",
     "if rank == 0: plateau.step(val_loss)", ""),
    ("schedule", "stop-on-rank-0", "rank-stops", "        if stop:", "        if rank == 0 and stop:", ""),
    ("tokens", "tokens-wrong", "uneven-mean", "dist.all_reduce(count)", "count = count * world_size", ""),
    ("tokens", "transformers-37474", "scale", "targets) * world_size / count", "targets) / count",
     "https://github.com/huggingface/transformers/issues/37474: the mean of DDP is not undone"),
    ("tokens", "prime-rl-2358", "uneven-mean", "            dist.all_reduce(count)\n", "",
     "https://github.com/PrimeIntellect-ai/prime-rl/issues/2358: each rank divides by its own count"),
    ("dice", "dice-wrong", "uneven-mean", "loss_of(add_up(sums_of(parallel_model(images), masks)))",
     "loss_of(sums_of(parallel_model(images), masks))", ""),
    ("dice", "ratio-without-factor", "scale", "dist.get_world_size() * (sums", "(sums", ""),
    ("dice", "average-of-rank-0", "buffers", "            average.update",
     "            if rank == 0:\n                average.update", ""),
    ("weighted_auc", "weighted_auc-wrong", "samples", "generator.manual_seed(1000 * SEED + epoch)",
     "generator.manual_seed(1000 * SEED + epoch + rank)", ""),
    ("lengths", "lengths-wrong", "samples", "yield batch[self.rank::self.world_size]",
     "yield batch[:BATCH_SIZE // self.world_size]", ""),
    ("lengths", "reads-padding", "forward", "pack_sequence([self.embedding(each) for each in signs],",
     "pack_sequence(list(pad_sequence([self.embedding(each) for each in signs], batch_first=True)),", ""),
    ("stream", "stream-wrong", "samples", "yield from batch[self.rank::self.world_size]",
     "yield from batch[:BATCH_SIZE // self.world_size]", ""),
    ("two_optimizers", "two_optimizers-wrong", "not-averaged", "fake = parallel_generator(noise)",
     "fake = generator(noise)", "")]


class Bug(NamedTuple):
    name: str
    causes: list  # what verify may name
    text: str
    options: str = ""
    line: tuple = ()  # the right and the wrong line, if the program has no comments as switches


class Program(NamedTuple):
    name: str
    path: Path
    commands: list  # A and B; {} stands for the path
    needs: list  # packages
    bugs: dict  # name: Bug
    folder: str = ""  # of the checkpoints, if the program is to be killed and resumed


def read(path):
    """Return the program in a file."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    commands = [re.search(rf"^{label}: (.*)", text, re.M)[1] for label in "AB"]
    needs = [package for line in re.findall(r"^Needs: (.*)", text, re.M) for package in line.split()]
    options = dict(re.findall(r"^Options ([\w-]+): (.*)", text, re.M))
    bugs = {name: Bug(name, causes.split("|"), " ".join(said.split()), options.get(name, ""))
            for name, causes, said in re.findall(r"^Bug: ([\w-]+): ([\w|-]+): (.*(?:\n +.*)*)", text, re.M)}
    return Program(path.stem, path, commands, needs, bugs, "".join(re.findall(r"^Resume: (.*)", text, re.M)))


def programs():
    """Return {name: Program}: the programs in this folder, and the examples of docs/your-own-loop.md."""
    found = {path.stem: read(path) for path in sorted(FOLDER.glob("[!_]*.py"))}
    for name, bug, cause, *line, text in EXAMPLES:
        pair = ["python {}", "torchrun --nproc-per-node=2 {}"]
        example = Program(name, ROOT / f"docs/examples/{name}.py", pair, [], {})
        found.setdefault(name, example).bugs[bug] = Bug(bug, [cause], text, line=tuple(line))
    return found


def wrong_form(text, bug):
    """Return a program's text with one bug put in."""
    lines, text = [], text.replace(*bug.line) if bug.line else text
    for line in text.splitlines():
        switch = SWITCH.match(line)
        if switch and switch["name"] == bug.name:
            line = switch["indent"] + switch["code"] if switch["code"] else None
        lines += [line] * (line is not None)
    return "\n".join(lines) + "\n"


def commands(program, bug, folder):
    """Return the two commands to compare: both run the correct program, or B runs its wrong form in `folder`.

    If the program is to be killed and resumed, both run the wrong form.
    """
    path = program.path
    if bug:
        path = Path(folder, program.path.name)
        text = program.path.read_text()
        path.write_text(wrong_form(text, bug))
        assert bug.options or path.read_text() != text, f"no line has a comment with wrong {bug.name}"
    options = f" {bug.options}" if bug and bug.options else ""
    return [command.format(file) + options for command, file in zip(
        program.commands, (path if program.folder else program.path, path))]


def judge(program, bug):
    """Ask verify about a program or one of its bugs; return the row of the result."""
    path = [os.environ.get("PYTHONPATH"), str(ROOT)], [str(Path(sys.executable).parent), os.environ["PATH"]]
    python_path, path = (os.pathsep.join(filter(None, folders)) for folders in path)
    environment = {**os.environ, "PYTHONPATH": python_path, "PATH": path, "OMP_NUM_THREADS": "1",
                   "PET_STANDALONE": "1"}  # torchrun then takes a free port
    with tempfile.TemporaryDirectory() as folder:
        pair, report = commands(program, bug, folder), Path(folder, "report.json")
        start = time.monotonic()
        words = ["--resume", "--fresh", program.folder, "--resume-with", pair[1], pair[0]] if program.folder else pair
        result = subprocess.run([sys.executable, "-m", "verify", "--timeout", "300", "--json", report, *words],
                                cwd=folder, env=environment, capture_output=True, text=True)
        row = {"program": program.name, "bug": bug and bug.name, "seconds": time.monotonic() - start}
        if not report.exists():
            raise RuntimeError(f"{pair}: verify ended with exit code {result.returncode}: {result.stderr}")
        said = json.loads(report.read_text())
        cause = said["cause"] or ("metric" if any(note.startswith("metric") for note in said["notes"]) else None)
        if not bug and not program.folder:
            start = time.monotonic()
            for command in pair:
                for _ in range(3):  # gloo can abort a process at its exit: docs/pitfalls, E15
                    plain = subprocess.run(command.split(), cwd=folder, env=environment, capture_output=True, text=True)
                    if not plain.returncode:
                        break
                else:
                    raise RuntimeError(f"{command} ended with exit code {plain.returncode}: {plain.stderr}")
            row["plain_seconds"] = time.monotonic() - start
        return row | {"verdict": said["verdict"], "cause": cause, "message": said["message"]}


def right(row, program):
    """Return whether verify's answer is the expected one: whether the bug is seen, and whether its cause is right."""
    if not row["bug"]:
        return (row["verdict"] in ("same", "alike"),) * 2
    causes = program.bugs[row["bug"]].causes
    seen = row["verdict"] == "different" or "metric" in causes and row["cause"] == "metric"
    return seen, seen and row["cause"] in causes


def table(rows, found):
    """Return the table of verify/README.md as Markdown, and a line with the cases that verify got wrong."""
    parts = {kind: [row for row in rows if bool(found[row["program"]].folder) == resumed]
             for kind, resumed in (("two commands", False), ("killed and resumed", True))}
    counted = {kind: counts(part, found) for kind, part in parts.items() if part}
    text = tables.table(["", *counted["two commands"]], [[kind, *cells.values()] for kind, cells in counted.items()])
    misses = [f"`{row['bug'] or row['program']}` ({row['cause'] or row['verdict']})" for row in rows
              if not all(right(row, found[row["program"]]))]
    return text + f"\n\nNot as expected: {', '.join(misses) or 'none'}."


def counts(rows, found):
    """Return {column: cell} for the table."""
    correct, wrong = ([row for row in rows if bool(row["bug"]) == kind] for kind in (False, True))
    answers = [right(row, found[row["program"]]) for row in wrong]
    public = {link for row in wrong for link in re.findall(r"github.com/(\S+?)/(?:issues|pull)/(\d+)",
                                                           found[row["program"]].bugs[row["bug"]].text)}
    timed = [row for row in correct if "plain_seconds" in row]  # a run that was continued lacks some times
    factor = [statistics.median(row["seconds"] / row["plain_seconds"] for row in timed)] if timed else []
    last = sum(row["cause"] in ("random", "unknown") for row in wrong)
    return {"correct programs": len(correct), "false alarms": sum(row["verdict"] != "same" for row in correct),
            "bugs": len(wrong), "public issues": len(public), "bugs detected": sum(seen for seen, _ in answers),
            "cause correct": sum(cause for _, cause in answers), "`random` or `unknown`": last,
            "seconds (median)": f"{statistics.median(row['seconds'] for row in rows):.0f}",
            "time relative to the commands without `verify`": "".join(f"{value:.1f}" for value in factor)}


def save(machine, rows):
    """Write the results, a line for each row, so that a diff shows which answers have changed."""
    lines = ",\n".join(json.dumps({key: row[key] for key in row if key != "message"}) for row in rows)
    RESULT.write_text(f'{{"machine": {json.dumps(machine)}, "rows": [\n{lines}\n]}}\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs or bugs (default: all, and the table)")
    parser.add_argument("--show", action="store_true", help="print what the wrong forms change, and run nothing")
    args = parser.parse_args()
    found = programs()
    cases = [(program, bug) for program in found.values() for bug in (None, *program.bugs.values())
             if not args.names or program.name in args.names or bug and bug.name in args.names]
    if args.show:
        for program, bug in cases:
            text = program.path.read_text()
            print(*difflib.unified_diff(text.splitlines(), wrong_form(text, bug).splitlines(), program.name,
                                        bug.name, lineterm="", n=1) if bug else (), sep="\n")
        return 0
    lacking = {package for program, _ in cases for package in program.needs if not importlib.util.find_spec(package)}
    if lacking:
        parser.error(f"not installed: {', '.join(sorted(lacking))}; see requirements/bench.txt")
    before = {(row["program"], row["bug"]): row["cause"] for row in json.loads(RESULT.read_text())["rows"]}
    rows = []
    for program, bug in cases:
        row = judge(program, bug)
        rows.append(row)
        seen, cause = right(row, program)
        moved = before.get((row["program"], row["bug"]), row["cause"])
        print(f"{'right' if cause else 'seen' if seen and bug else 'WRONG':5} {row['seconds']:4.0f} s  "
              f"{row['program']} {row['bug'] or ''}: {row['verdict']} {row['cause'] or ''}"
              + f", was {moved}" * (moved != row["cause"]), flush=True)
        if not (seen and cause):
            print(f"      {row['message']}", flush=True)
    if not args.names:
        print(table(rows, found))
        save(measure.machine(torch.device("cpu"), "verify"), rows)
        tables.fill(PAGE, ["\n" + table(rows, found) + "\n\n"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
