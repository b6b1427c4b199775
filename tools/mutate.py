"""Put back every pitfall in tools/mutations.txt, one at a time, and check that the test named there fails.

    python tools/mutate.py                # all of them, two at a time
    python tools/mutate.py D1 D2.2        # only these

Each test runs in a copy of the repository with the wrong lines instead of the right ones, so the working tree does not
change. Prints a table in Markdown. Exit code 1 if a test stays green.
"""
import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import texts
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 400  # a run that hangs counts as detected: the tests end hung runs, and this limit ends hung tests
VERDICTS = {0: "STAYED GREEN", 1: "red", 5: "NO SUCH TEST"}  # pytest's exit codes


def try_out(mutation: texts.Mutation) -> tuple[str, str, float]:
    """Put a pitfall back and run its test, if any; return (verdict, the first error that pytest reports, seconds)."""
    if not mutation.test.startswith("tests/"):
        return f"no test: {mutation.test.removeprefix('none: ')}", "", 0.0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "repository")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", "data", "__pycache__", ".venv"))
        file = copy / mutation.file
        file.write_text(mutation.put_back(file.read_text()))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", mutation.test]
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
    parser.add_argument("names", nargs="*", metavar="NAME", help="a mutation, such as D1 (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="pitfalls to try at the same time (default: 2)")
    args = parser.parse_args()
    mutations = texts.read_mutations(ROOT / "tools/mutations.txt")
    if unknown := set(args.names) - set(mutations):
        parser.error(f"no such pitfall: {', '.join(sorted(unknown))}")

    chosen = [mutations[name] for name in args.names or mutations]
    print("| pitfall | file | test | result | seconds | first error |\n|---|---|---|---|---:|---|", flush=True)
    verdicts = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutation, (verdict, said, seconds) in zip(chosen, tqdm(pool.map(try_out, chosen), total=len(chosen))):
            verdicts.append(verdict)
            test = f"`{mutation.test}`" if mutation.test.startswith("tests/") else "-"
            said = said[:100].replace("|", "\\|")
            tqdm.write(f"| {mutation.name} | `{mutation.file}` | {test} | {verdict} | {seconds:.0f} | {said} |")
    print(f"\n{verdicts.count('red')} of {len(verdicts)} mutations make their test fail (Python "
          f"{platform.python_version()}, torch {version('torch')}).")
    return int(any(verdict not in ("red", "skipped") and not verdict.startswith("no test") for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
