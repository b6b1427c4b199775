"""Reintroduce every pitfall of docs/pitfalls.md, one at a time, and check that the test named there fails.

    python tools/mutate.py                # all of them, two at a time, and the report
    python tools/mutate.py D1 D2          # only these, without a report

Each test runs in a copy of the repository with the wrong lines instead of the right ones, so the working tree does not
change. The report is docs/mutations.md. Exit code 1 if a test stays green.
"""
import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import texts
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 400  # a run that hangs counts as detected: the tests end hung runs, and this limit ends hung tests
VERDICTS = {0: "STAYED GREEN", 1: "red", 5: "NO SUCH TEST"}  # pytest's exit codes


def try_out(trap: texts.Trap) -> tuple[str, str, float]:
    """Put a pitfall back and run its test, if any; return (verdict, the first error that pytest reports, seconds)."""
    if not trap.test.startswith("tests/"):
        return f"no test: {trap.test}", "", 0.0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "repository")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", "data", "__pycache__", ".venv"))
        file = copy / trap.file
        file.write_text(trap.put_back(file.read_text()))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", trap.test]
        try:
            result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "red", f"did not end within {SECONDS} s", time.monotonic() - start
    said = [line for line in result.stdout.splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))]
    verdict = VERDICTS.get(result.returncode, f"PYTEST ENDED WITH {result.returncode}")
    if verdict == "STAYED GREEN" and " skipped" in result.stdout and " passed" not in result.stdout:
        verdict = "skipped"
    return verdict, (said or result.stdout.splitlines() or [""])[0].removeprefix("E").strip(), time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a pitfall, such as D1 (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="pitfalls to try at the same time (default: 2)")
    args = parser.parse_args()
    names = args.names
    traps = texts.read_traps(ROOT / "docs/pitfalls.md")
    if set(names) - set(traps):
        parser.error(f"no such pitfall: {', '.join(sorted(set(names) - set(traps)))}")

    chosen = [traps[name] for name in names or traps]
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for trap, (verdict, said, seconds) in zip(chosen, tqdm(pool.map(try_out, chosen), total=len(chosen))):
            rows.append((trap, verdict, said, seconds))
            tqdm.write(f"{trap.name:4} {verdict:14} {seconds:4.0f} s  {said[:100]}")
    if not names:
        report(rows)
    return int(any(verdict not in ("red", "skipped") and not verdict.startswith("no test") for _, verdict, *_ in rows))


def report(rows: list[tuple[texts.Trap, str, str, float]]) -> None:
    """Write docs/mutations.md: the result for every pitfall."""
    import torch

    red = sum(verdict == "red" for _, verdict, _, _ in rows)
    lines = ["# Every pitfall put back", "",
             f"`python tools/mutate.py` on Python {platform.python_version()}, torch {torch.__version__}: of "
             f"{len(rows)} pitfalls, {red} were caught by the test that docs/pitfalls.md names.", "",
             "| pitfall | in | test | result | seconds |", "|---|---|---|---|---:|"]
    for trap, verdict, _, seconds in rows:
        test = f"`{trap.test}`" if trap.test.startswith("tests/") else "-"
        lines.append(f"| {trap.name} {trap.title} | `{trap.file}` | {test} | {verdict} | {seconds:.0f} |")
    (ROOT / "docs/mutations.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
