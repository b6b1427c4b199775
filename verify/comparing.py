"""Compare what two commands recorded and printed, step by step."""
import math
import re
from typing import NamedTuple

from .explaining import REMEDIES, Difference, ranks_differ, unmatched
from .records import Run, apart, match, worst


class Limits(NamedTuple):
    """Two runs differ if a difference exceeds `high`, or exceeds both `low` and 1000 times the greatest earlier one."""

    low: float
    high: float
    floor: float  # smaller fractions of the total norm are noise, as in the gradient of a bias before BatchNorm


LIMITS = {"float64": Limits(1e-9, 1e-4, 1e-6), "own": Limits(1e-4, 0.1, 1e-2), "16 bits": Limits(0.05, 0.5, 0.2)}
KEPT = ("buffer", "average")  # the kinds of unoptimized tensors that must be equal in both runs
METRICS = set("acc accuracy ap auc bits bleu bpb dice err error f1 iou loss losses mae map miou mse norm perplexity "
              "ppl precision psnr recall rmse rouge score ssim top1 top5".split())
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
PRINTED = re.compile(r"([A-Za-z][\w/.@-]*)[\"']?\s*[:=]?\s*[\"'(]?(" + NUMBER + r")(?![\w.]*[A-Za-z])")


class Failure(NamedTuple):
    """How a command failed."""

    why: str
    said: str = ""  # the error that the command printed
    hung: bool = False  # True if the command did not end in time
    training: bool = False  # True if it was still taking optimizer steps at the time limit

    def __str__(self):
        return "\n".join(filter(None, [self.why, self.said]))


def compare(folder_a, folder_b, native=False, failed=(None, None), again=False, printed=("", ""), cut=False,
            calm=False):
    """Compare the records of two commands, or of two runs of one command (`again`), and return the report.

    With `native`, the runs used their own precision. For each command, `failed` has a Failure or None, and `printed`
    has its output. `cut` is true if the number of steps was limited, and `calm` if the runs draw no random numbers.
    """
    a, b = Run.read(folder_a, "A"), Run.read(folder_b, "B")
    sixteen = native and {"torch.float16", "torch.bfloat16"} & (a.flags | b.flags)
    limits = LIMITS["16 bits" if sixteen else "own" if native else "float64"]
    report = {"verdict": "same", "cause": None, "step": None, "parameter": None, "difference": 0.0, "message": "",
              "precision": "own" if native else "float64", "steps": [a.length, b.length],
              "ranks": [len(a.ranks), len(b.ranks)], "column": None, "notes": [],
              "dtypes": sorted(flag for flag in a.flags | b.flags if flag.startswith("torch."))}

    def different(cause, fact, step, parameter=None, difference=None, column=None):
        return {**report, "verdict": "different", "cause": cause, "step": step + 1, "parameter": parameter,
                "difference": difference, "column": column, "message": f"{fact}: {REMEDIES[cause]}"}

    for run in (a, b):
        if not any(run.ranks.values()) or run.doubled:
            reason = "restarted, or its processes did not join one group" if run.doubled else "took no optimizer step"
            return refuse(report, f"command {run.label} {reason}")
    for state in (state for run in (a, b) for steps in run.ranks.values() for state in steps):
        state["flags"] = {*state["flags"]} - {"random"} if calm else state["flags"]
    a.join()
    b.join()
    answer = None
    for step in range(min(a.length, b.length)):
        limit = min(max(limits.low, 1000 * report["difference"]), limits.high)
        columns = ("start", "rate", "grad", "value")[step > 0:]
        rows, others = a.at(step)[1], b.at(step)[1]
        pairs = match(rows, others)
        total = math.hypot(*[one.grad[0] for one, _ in pairs])
        moved = [pair for pair in pairs if not max(pair[0].grad[0], pair[1].grad[0]) <= limits.floor * total]
        found = [(column, *worst(moved if native and column == "value" else pairs, column,
                                 limits.floor if column == "grad" else 1e-6)) for column in columns]
        for run, other in () if again else ((a, b), (b, a)):
            if not answer and (mine := ranks_differ(run, step, columns, limit, other)):
                answer = mine
        if not answer and not len(pairs) == len(rows) == len(others):
            answer = *unmatched(rows, others, pairs), step, None, None
        for column, difference, name in found:
            if not answer and difference > limit:
                answer = *Difference(a, b, step, column, pairs).explain(), step, name, difference, column
        report["difference"] = max(report["difference"], *[difference for _, difference, _ in found])
        if not answer and all(any(not math.isfinite(row.value[0]) for row in part) for part in (rows, others)):
            return refuse(report, f"both models contain NaN or infinity after step {step + 1}")
    if answer:
        return different(*answer)
    rows = (row for run in (a, b) for step in range(run.length) for row in run.at(step)[1])
    if min(a.length, b.length) and not any(row.grad[0] or row.value != row.start for row in rows):
        return refuse(report, "all gradients are zero, so nothing is trained: look at the loss and the optimizer")
    for run, failure in zip((a, b), failed):
        if failure and failure.training:
            continue
        counts = {rank: run.kinds(rank).count("begin" if failure else "step") for rank in run.ranks}
        behind = [rank for rank, count in counts.items() if count < max(counts.values())]
        if behind and not any("failed" in run.kinds(rank) for rank in behind):
            return different("rank-stops", f"the ranks of {run.label} take {[*counts.values()]} steps", run.length)
    if a.length != b.length and not any(failed):
        return different("batch-size", f"A takes {a.length} steps and B {b.length}", min(a.length, b.length))
    if answer := unoptimized_differ(a, b, max(limits.low, 1000 * report["difference"]), again):
        return different("buffers", *answer)
    if not any(failed) and (fact := printed_differ(*printed, limits.high if native else 1e-6, cut)):
        report["notes"].append(f"metric: {fact}: {REMEDIES['metric']}")
    bound = f" (tolerance {limits.low:g} at first, {limits.high:g} later)" * native
    return {**report, "message": f"{a.length} steps, greatest relative difference {report['difference']:.1e}{bound}"}


def refuse(report, reason, step=None):
    return {**report, "verdict": "not comparable", "cause": None, "step": step, "message": reason}


def unoptimized_differ(a, b, limit, again=False):
    """Compare buffers and averages of the weights between two runs, and the averages between the ranks of each run.

    Return (evidence, step, name, difference) or None. Only tensors with equal names and shapes are compared.
    """
    pairs = [("differs between A and B, though all parameters are the same", a.unoptimized(), b.unoptimized(), KEPT)]
    pairs += [(f"differs between ranks 0 and {rank} of {run.label}", *([step["unoptimized"] for step in run.ranks[one]]
                                                                     for one in (min(run.ranks), rank)), "average of")
              for run in (a, b) for rank in [*run.ranks][1:]]
    for where, left, right, kind in pairs[:1 if again else None]:
        for number, digests in enumerate(zip(left, right)):
            if found := apart(*digests, limit, kind):
                return f"{found[0]} {where}", max(number - 1, 0), *found
    return None


def metrics(text):
    """Return {name: [number as text, ...]} for metrics printed as NAME NUMBER, NAME: NUMBER or NAME=NUMBER.

    A part of NAME must be the name of a metric, such as "loss" in val_loss.
    """
    found = {}
    for name, number in PRINTED.findall(text):
        if METRICS & {*re.split(r"[\W_]+", name.lower())}:
            found.setdefault(name, []).append(number)
    return found


def printed_differ(one, two, tolerance, cut=False):
    """Return text that says how a metric that both commands print differs, or None if none differs.

    With `cut`, the commands may print a metric different numbers of times; otherwise, such a metric is not compared.
    """
    left, right = metrics(one), metrics(two)
    for name, numbers in left.items():
        others = right.get(name, [])
        if not cut and len(numbers) != len(others):
            continue  # for example, because each rank prints a line
        for place, (x, y) in enumerate(zip(numbers, others), 1):
            digit = max(1.01 * 10.0 ** -len(number.partition(".")[2].partition("e")[0]) for number in (x, y))
            if "e" in (x + y).lower():
                digit = 1e-3 * max(abs(float(x)), abs(float(y)))
            if abs(float(x) - float(y)) > max(digit, tolerance * max(abs(float(x)), abs(float(y)))):
                return f"A prints {name} {x} and B {y} (occurrence {place} in the output)"
    return None
