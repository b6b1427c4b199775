"""The command line: python -m verify COMMAND COMMAND, or python -m verify --watch COMMAND."""
import argparse
import json
import re
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from .comparing import compare, float64_fails, refuse
from .explaining import CAUSES, UNSURE
from .records import Run
from .resuming import LOST, remove, resume
from .running import printed, record
from .tracing import trace
from .values import draws_that_differ
from .watching import watch

VERSION = 1  # of the report as JSON, whose fields README.md lists


def verify(commands, folder, steps=0, timeout=600.0, twice=False, fresh=(), resting=()):
    """Run two commands in float64 and, if that does not suffice, in their own precision. Return the report."""
    def run(commands, steps, whole="", **options):
        folders, failed = [], []
        for command in commands:
            folders.append(Path(tempfile.mkdtemp(dir=folder)))
            failed.append(record(command, folders[-1], timeout, steps=steps, whole=whole, resting=resting, **options))
            whole = whole or str(folders[0])
            remove(fresh)
        return folders, failed

    def judge(folders, failed, native, calm=False):
        return compare(*folders, native, failed, False, [printed(folder) for folder in folders], bool(steps), calm)

    native, whole, notes = False, "", []
    folders, failed = run(commands, steps)
    report = judge(folders, failed, native)
    if report["cause"] in ("start", "unknown") and report["step"] == 1 < report["ranks"][0]:
        whole = str(folders[1])  # A may hold parts of B's tensors
        folders[:1], failed[:1] = run(commands[:1], steps, whole)
        report = judge(folders, failed, native)
    differs = report["verdict"] == "different"
    broken = any(failed) and not differs and not any(failure and failure.hung for failure in failed)
    exact = report["cause"] in ("learning-rate", "rank-lr", "optimizer", "buffers") or (
        report["cause"], report["column"]) == ("clip", "grad")
    low = differs and (report["difference"] or 1) < 1e-5 and not exact
    if {*report["dtypes"]} - {"torch.float64", "torch.complex128"} or broken or low:
        native, notes = True, [float64_fails(failed, report["steps"])] * broken
        if low:
            notes.append(f"in float64, the runs differ by {report['difference']:.1e} in step {report['step']}, as by a "
                         "part that computes in float32, so they had their own precision, which proves less")
        folders, failed = run(commands, steps, whole, native=True)
        report = judge(folders, failed, native)
    for label, failure in zip("AB", failed):
        if failure and report["verdict"] != "different":
            return refuse(report, f"command {label} failed: {failure}")
        if failure and report["cause"] != "rank-stops":
            notes.append(f"command {label} failed: {failure}")
    if twice or report["cause"] in ("start", "samples", "random", "unknown"):
        again, _ = run(commands[:1], report["step"] or steps, whole, native=native)
        own = compare(folders[0], *again, native, again=True)
        if own["parameter"]:
            return refuse(report, f"two runs of command A differ at step {own['step']}: set its seeds", own["step"])
    unclear = report["message"].startswith(UNSURE) or report["cause"] in (
        "samples", "random", "unknown", "no-backward", "forward", "batchnorm", "not-averaged")
    if unclear and (report["column"] == "grad" or report["cause"] == "not-averaged"):
        last = report["step"]
        shown, why = run(commands, last, whole, native=native, outputs_at=last)
        runs = [Run.read(folder, label) for folder, label in zip(shown, "AB")]
        if min(found.length for found in runs) >= last:
            if report["cause"] == "random" and not draws_that_differ(*runs, last - 1):
                report = judge(folders, failed, native, calm=True)
            report = trace(report, *runs)
        else:
            notes += [f"the run that records this step's values failed: {failure}" for failure in why if failure]
    report["notes"] += notes
    return report


def show(report, commands):
    for label, command, ranks, steps in zip("AB", commands, report["ranks"], report["steps"]):
        print(f"{label}: {command}\n   {ranks} rank(s), {steps} steps, {report['precision']} precision")
    show_answer(report, "cause")


def show_answer(report, word):
    said = report["message"]
    if report["verdict"] == "different":
        size = report["difference"] and f"by {report['difference']:.1e}"
        place = ", ".join(filter(None, [f"step {report['step']}", report["parameter"], report["parameter"] and size]))
        said = f"{place}\n{word}: {report['cause']}: {said}"
    print("\n".join([f"{report['verdict']}: {said}", *[f"note: {note}" for note in report["notes"]]]))


def show_watch(report, command):
    print(f"{command}\n   {report['ranks'][0]} rank(s), {report['steps'][0]} steps")
    for finding in report["findings"]:
        place = f"step {finding['step']}: " if finding["step"] else ""
        print(f"{place}{finding['cause']}: {finding['message']}")
    print(report["verdict"] + f": {report['message']}" * bool(report["message"]))


def show_resume(report, command, other):
    print(f"{command}\n   {report['ranks'][0]} rank(s), {report['steps'][0]} steps, {report['precision']} precision; "
          f"saved after steps {', '.join(map(str, report['saves'])) or 'none'}")
    if report["killed"]:
        print(f"killed after step {report['killed']}, resumed: {other}")
    if report["resumed"] is not None:
        print(f"   {report['ranks'][1]} rank(s), from step {report['resumed'] + 1} on, {report['steps'][2]} steps")
    show_answer(report, "lost")


def described(report, causes):
    """Return a report, or a finding of --watch, with what is known of its cause, and the place that it names."""
    known, place = causes.get(report["cause"], {}), re.search(r"([^\s:]+\.py):(\d+)", report["message"])
    more = {name: known.get(name) for name in ("remedy", "pitfall", "copy")}
    return {**report, **more, "file": place and place[1], "line": place and int(place[2])}


def main():
    parser = argparse.ArgumentParser(
        prog="python -m verify", description="Check whether two commands train the same model, or check one command.",
        epilog="exit code: 0 same or sound, 1 different or unsound, 2 not comparable, 3 alike, too coarse to prove")
    parser.add_argument("commands", nargs="+", metavar="COMMAND", type=shlex.split, help="a command, in quotes")
    parser.add_argument("--watch", action="store_true", help="check one command against rules for any correct run")
    parser.add_argument("--resume", action="store_true", help="kill the command, resume it, and compare the rest")
    parser.add_argument("--kill-after", type=int, default=0, metavar="N", help="with --resume: after N optimizer steps")
    parser.add_argument("--signal", default="KILL", metavar="NAME", help="with --resume: as TERM (default: KILL)")
    parser.add_argument("--resume-with", type=shlex.split, metavar="COMMAND", help="with --resume: resume with this "
                        "command, such as one with another number of processes")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="stop after N optimizer steps")
    parser.add_argument("--twice", action="store_true", help="also check that the first command is reproducible")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS",
                        help="time limit for one run (default: 600)")
    parser.add_argument("--fresh", default=[], type=Path, metavar="PATH", action="append",
                        help="delete this output of the commands after each run")
    parser.add_argument("--eval-mode", type=lambda text: text.split(","), default=(), metavar="CLASS,...", help="keep "
                        "modules whose class name contains a CLASS, such as Dropout, in evaluation mode in both runs")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.error = lambda message: parser.exit(2, f"verify: {message}; see --help\n")
    args = parser.parse_args()
    if args.json and not Path(args.json).resolve().parent.is_dir():
        parser.error(f"{args.json}: the folder does not exist")
    for path in args.fresh:
        if path.exists():
            parser.error(f"--fresh {path}: exists already, and would be deleted; move it away first")
    one, sent = args.watch or args.resume, getattr(signal, "SIG" + args.signal.upper().removeprefix("SIG"), None)
    if len(args.commands) != 2 - one:
        parser.error(f"{len(args.commands)} COMMAND given, {2 - one} needed")
    if args.resume and not args.fresh:
        parser.error("--resume needs --fresh PATH, where the command saves")
    if args.resume and args.watch:
        parser.error("--watch and --resume exclude each other")
    if args.kill_after < 0 or not sent:
        parser.error(f"--kill-after {args.kill_after} --signal {args.signal}: no positive number, or no signal")
    if not args.resume and (args.kill_after or args.resume_with or args.signal != "KILL"):
        parser.error("--kill-after, --signal and --resume-with need --resume")
    if not all(args.commands):
        parser.error("a command is empty")
    commands = [shlex.join(words) for words in args.commands]
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # so that a finally block stops the commands
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) != signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        if args.watch:
            failure = record(*commands, Path(folder), args.timeout, steps=args.steps, native=True, outputs_at=1)
            remove(args.fresh)
            report = watch(folder, failure)
            show_watch(report, *commands)
        elif args.resume:
            other = shlex.join(args.resume_with) if args.resume_with else commands[0]
            sent = None if args.signal.upper().endswith("KILL") else sent
            try:
                report = resume(*commands, other, folder, args.fresh, sent, args.kill_after, args.steps, args.timeout,
                                args.eval_mode)
            finally:
                remove(args.fresh)
            show_resume(report, commands[0], other)
        else:
            report = verify(commands, folder, args.steps, args.timeout, args.twice, args.fresh, args.eval_mode)
            show(report, commands)
    if args.json:
        causes = LOST if args.resume else CAUSES
        report = {"version": VERSION, **described(report, causes)}
        report |= {"findings": [described(found, causes) for found in report.get("findings", ())]} if args.watch else {}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return {"same": 0, "sound": 0, "different": 1, "unsound": 1, "not comparable": 2, "alike": 3}[report["verdict"]]


if __name__ == "__main__":
    sys.exit(main())
