"""CPU time and memory of `python -m verify`, relative to the two commands alone; also of these in float64.

    python -m benchmarks.verify
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.measure import in_turns, machine
from benchmarks.tables import ROOT, fill, path_of, ratio, read, save, spread, verify_table
from common import cli

PROGRAM = """import sys
import torch
torch.manual_seed(0)
if sys.argv[1:]:
    torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(64, {width}), torch.nn.ReLU(), torch.nn.Linear({width}, {width}),
                            torch.nn.ReLU(), torch.nn.Linear({width}, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(64 * {steps}, 64), torch.randint(10, (64 * {steps},)))
for x, y in torch.utils.data.DataLoader(data, 64):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    for line in range({lines}):
        print(f"line {{line}}: loss {{loss.item():.4f}}", "." * 80)
"""
PROGRAMS = {"2,000 steps of a small perceptron": {"width": 64, "steps": 2000, "lines": 0},
            "700 steps that print 20 lines each": {"width": 64, "steps": 700, "lines": 20},
            "6 steps of a perceptron with 100 million parameters": {"width": 10_000, "steps": 6, "lines": 0}}


def run(*words):
    """Run Python with these words; return the CPU time and the largest memory of its processes (s, MiB)."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, stdout=output, stderr=output,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)  # with the descendants for which the process waited
        if status:
            output.seek(0)
            sys.exit(f"{words} failed:\n{output.read()[-2000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main():
    parser = cli.ArgumentParser(__doc__)
    parser.add_argument("--rounds", type=cli.positive_int, default=3, help="how many times to measure")
    args, found = parser.parse_args(), {}
    where, page = machine(torch.device("cpu"), "verify", "benchmarks/verify.py"), ROOT / "verify/README.md"
    with tempfile.TemporaryDirectory() as folder:
        for name, values in PROGRAMS.items():
            path = Path(folder, "program.py")
            path.write_text(PROGRAM.format(**values))
            command = f"{sys.executable} {path}"
            ways = {"plain": [path], "float64": [path, "float64"], "verify": ["-m", "verify", command, command]}
            runs = {way: [] for way in ways}
            for _, way in in_turns([*ways], args.rounds):
                runs[way].append(run(*ways[way]))
            seconds = {way: [time * (1 if way == "verify" else 2) for time, _ in each]  # of both commands
                       for way, each in runs.items()}
            found[name] = {"seconds": seconds,
                           "relative": {way: ratio(seconds[way], seconds["plain"]) for way in ("verify", "float64")},
                           "peak_mib": {way: spread(peak for _, peak in each) for way, each in runs.items()}}
            print(name, found[name], flush=True)
            save(path_of("verify", where), {"arguments": vars(args), "machine": where, "table": found})
            fill(page, ["\n" + "\n\n".join(map(verify_table, read("verify"))) + "\n\n"],
                 ("<!-- cost -->\n", "<!-- /cost -->\n"))


if __name__ == "__main__":
    main()
