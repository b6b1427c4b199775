"""Compare what two commands recorded and printed, step by step."""
import functools
import itertools
import math
import re
from typing import NamedTuple

from .difference import Difference
from .explaining import UNSURE, explain, options_that_differ, remedy, unmatched, where
from .ranks import ranks_differ
from .records import EQUAL, MIXED, NOISE, UNKNOWN, Run, apart, gap, match, same_probes, trained, without_padding, worst


class Limits(NamedTuple):
    """Two runs differ if a difference exceeds `high`, or exceeds both `low` and 1000 times the greatest earlier one."""

    low: float
    high: float
    floor: float  # smaller fractions of the total norm are noise, as in the gradient of a bias before BatchNorm


LIMITS = {"float64": Limits(1e-9, 1e-4, 1e-6), "own": Limits(1e-4, 0.1, 1e-2), "16 bits": Limits(0.05, 0.5, 0.2)}
HALF = {"torch.float16", "torch.bfloat16"}
KEPT = ("buffer", "average")  # the kinds of unoptimized tensors that must be equal in both runs
METRICS = set("acc accuracy ap auc bits bleu bpb dice err error f1 iou loss losses mae map miou mse norm perplexity "
              "ppl precision psnr recall rmse rouge score ssim top1 top5".split())
LOSSES = {"loss", "losses", "norm"}  # of a training step, unless the line says otherwise
EVALUATED = re.compile(r"(?<![a-z])(val|valid|validation|test|eval|evaluation|evaluated|dev)(?![a-z])", re.I)
NUMBER = r"[-+]?\d{1,40}(?:\.\d{1,40})?(?:[eE][-+]?\d{1,4})?"
PRINTED = re.compile(  # all parts have a limit, and each word is tried once: the time is linear in the output
    r"(?<![\w/.@-])([A-Za-z][\w/.@-]{0,80})[\"']?\s{0,8}[:=]?\s{0,8}[\"'(]?(" + NUMBER + r")(?![\w.]{0,80}[A-Za-z])")
ALONE = re.compile(r"closed by peer|reset by peer|broken pipe|timed? ?out", re.I)  # a collective without a rank
PRECISION = re.compile(r"dtype|scalar type|Double|Float|Half|float(?:16|32|64)")  # in an error
OCCURRENCES = 100_000  # compare so many numbers of a metric, so that memory is bounded


def limits_of(native, *runs):
    """Return the limits for runs in float64 or, with `native`, in their own precision."""
    return LIMITS["float64" if not native else "16 bits" if any(HALF & run.flags for run in runs) else "own"]


class Failure(NamedTuple):
    """How a command failed."""

    why: str
    said: str = ""  # the error that the command printed
    hung: bool = False  # True if the command did not end in time
    training: bool = False  # True if it was still taking optimizer steps at the time limit

    def __str__(self):
        return "\n".join(filter(None, [self.why, self.said]))


def float64_fails(failed, steps):
    """Return a line about the first of the commands that failed in float64, or an empty string."""
    for label, failure, count in zip("AB", failed, steps):
        if failure:
            error = (failure.said.splitlines() or [failure.why])[-1].strip()
            command = f"command {label}" if len(failed) > 1 else "the command"
            change = "; to compare in float64, replace a fixed float32 or complex64 by the dtype of another tensor"
            return (f"in float64, {command} fails after {count} step(s), so the runs had their own precision, which "
                    f"proves less{change * bool(PRECISION.search(failure.said))}: {error}")
    return ""


def compare(folder_a, folder_b, *args, **more):
    """Compare the records in two folders: compare_runs()."""
    return compare_runs(Run.read(folder_a, "A"), Run.read(folder_b, "B"), *args, **more)


def compare_runs(a, b, native=False, failed=(None, None), again=False, printed=("", ""), cut=False, calm=False):
    """Compare the records of two commands, or of two runs of one command (`again`), and return the report.

    With `native`, the runs used their own precision. For each command, `failed` has a Failure or None, and `printed`
    has its output. `cut` is true if the number of steps was limited, and `calm` if the runs draw no random numbers.
    """
    limits = limits_of(native, a, b)
    report = {"verdict": "same", "cause": None, "step": None, "parameter": None, "difference": 0.0, "message": "",
              "precision": "own" if native else "float64", "steps": [a.length, b.length],
              "ranks": [len(a.ranks), len(b.ranks)], "column": None, "notes": [],
              "dtypes": sorted(flag for flag in a.flags | b.flags if flag.startswith("torch."))}

    def different(cause, fact, step, parameter=None, difference=None, column=None):
        return {**report, "verdict": "different", "cause": cause, "step": step + 1, "parameter": parameter,
                "difference": difference, "column": column, "message": f"{fact}: {remedy(cause)}"}

    without_padding(a, b)
    for run in (a, b):
        if not any(run.ranks.values()) or run.doubled:
            reason = "restarted, or its processes did not join one group" if run.doubled else "took no optimizer step"
            return refuse(report, f"command {run.label} {reason}")
    for state in (state for run in (a, b) for steps in run.ranks.values() for state in steps if calm):
        state["flags"] = {*state["flags"]} - {"random"}
    paces = [0 if again else run.trains_apart()[0] for run in (a, b)]
    local = [0 < pace < math.inf for pace in paces]  # local updates: the ranks of this run may differ
    by_rank = all(local) and len(a.ranks) == len(b.ranks)
    untrained = set()  # names
    if 0 < max(paces) < math.inf and not by_rank:
        return meeting(report, a, b, paces)
    for step in range(min(a.length, b.length)):
        limit = min(max(limits.low, 1000 * report["difference"]), limits.high)
        columns = ("start", "rate", "grad", "value")[step > 0:]
        if a.flat or b.flat:
            columns = [column for column in columns if column != "grad"]
        if by_rank:
            states = [run.at(step)[0] for run in (a, b)]
            pairs = [pair for one, two in zip(*states) for pair in match(one["rows"], two["rows"])]
            rows, others = ([row for state in part for row in state["rows"]] for part in states)
        else:
            rows, others = a.at(step)[1], b.at(step)[1]
            pairs = match(rows, others)
            if a.flat or b.flat:
                pairs = [(filled(one, two), filled(two, one)) for one, two in pairs]
        total = math.hypot(*[one.grad[0] for one, _ in pairs])
        moved = [pair for pair in pairs if not max(pair[0].grad[0], pair[1].grad[0]) <= limits.floor * total]
        compared = without_rounding(moved, limit) if native else trained(pairs)
        untrained |= {one.name for one, _ in pairs if not native} - {one.name for one, _ in compared}
        found = [(column, *worst(compared if column == "value" else pairs, column,
                                 limits.floor if column == "grad" else NOISE)) for column in columns]
        report["difference"] = max(report["difference"], *[difference for _, difference, _ in found])
        for run, other, may_differ in ((a, b, local[0]), (b, a, local[1])) if not again else ():
            if not may_differ and (answer := ranks_differ(run, step, columns, limit, other)):
                if step and answer[0] == "not-averaged" and (fact := unequal_steps(run, failed[run is b])):
                    return different("rank-stops", f"{fact}; since step {step + 1}, their gradients differ", step)
                return different(*answer)
        if not len(pairs) == len(rows) == len(others):
            return different(*unmatched(rows, others, pairs), step)
        for column, difference, name in found:
            if difference > limit:
                # a schedule may follow from an average that has differed before
                before = column == "rate" and step and unoptimized_differ(a, b, limit)
                if before and before[2] < step:
                    return different(*before)
                return different(*explain(Difference(a, b, step, column, pairs)), step, name, difference, column)
        if all(any(not math.isfinite(row.value[0]) for row in part) for part in (rows, others)):
            return refuse(report, f"both models contain NaN or infinity after step {step + 1}")
    rows = (row for run in (a, b) for step in range(run.length) for row in run.at(step)[1])
    if min(a.length, b.length) and not any(row.grad[0] or row.value != row.start for row in rows):
        return refuse(report, "all gradients are zero, so nothing is trained: look at the loss and the optimizer")
    for run, failure in zip((a, b), failed):
        if fact := unequal_steps(run, failure):
            return different("rank-stops", fact, run.length)
    if a.length != b.length and not any(failed):
        return different("batch-size", f"A takes {a.length} steps and B {b.length}", min(a.length, b.length))
    if answer := unoptimized_differ(a, b, max(limits.low, 1000 * report["difference"]), again, untrained):
        return different(*answer)
    evaluated = "evaluated" in a.flags & b.flags
    if not any(failed) and (fact := printed_differ(*printed, limits.high if native else EQUAL, cut, evaluated)):
        report["notes"].append(f"metric: {fact}: {remedy('metric')}")
    bound = f" (tolerance {limits.low:g} at first, {limits.high:g} later)" * native
    if report["difference"] > LIMITS["own"].low:
        coarse = f"within {report['difference']:.2g}: too coarse to prove that the models are the same"
        return {**report, "verdict": "alike", "message": f"{a.length} steps, {coarse}{bound}"}
    return {**report, "message": f"{a.length} steps, greatest relative difference {report['difference']:.1e}{bound}"}


def filled(row, other):
    """Return the row with the gradient and the rate of the other run's row in place of unknown ones."""
    return row._replace(grad=other.grad if row.grad == UNKNOWN else row.grad,
                        rate=other.rate if row.rate == MIXED else row.rate)


def without_rounding(pairs, limit):
    """Leave out the values that differ if few do, by not more than both have moved, and no option of an optimizer does.

    Adam makes a whole update of the rounding error of a gradient that should be zero, as of the bias of attention's
    keys, which one tensor may hold with that of the values.
    """
    alike = [pair for pair in pairs if worst([pair], "value")[0] <= limit]
    near = sum(gap(one.value, two.value) <= max(limit, 2 * gap(one.start, one.value)) for one, two in pairs)
    few = 2 * len(alike) > len(pairs) == near
    return alike if few and not options_that_differ(pairs, "A", "B") else pairs


def unequal_steps(run, failure):
    """Return text that says how many steps the ranks of a run take if their numbers differ, or None.

    If a rank has ended, another one may wait for it in a collective of the step that it has not begun, and fail there.
    If none has, all may wait in different collectives, and the first error is that of one that waits.
    """
    lost = [rank for rank in run.ranks if "failed" in run.kinds(rank)]
    counts = {rank: run.kinds(rank).count("begin" if failure or lost else "step") for rank in run.ranks}
    behind = [rank for rank, count in counts.items() if count < max(counts.values())]
    stopped = failure and failure.training or {*behind} & {*lost}
    if behind and not stopped:
        return f"the ranks of {run.label} take {[*counts.values()]} steps"
    ended, waits = [rank for rank in run.ranks if "end" in run.kinds(rank)], failure and ALONE.search(failure.said)
    if behind and waits and {*lost} == {*run.ranks}:
        return (f"{UNSURE}the ranks of {run.label} take {[*counts.values()]} steps, and all fail, as if they waited in "
                f"different collectives: {failure.said.splitlines()[-1]}")
    if not behind and ended and lost and waits:
        return (f"{UNSURE}after {run.length} steps, rank(s) {ended} of {run.label} end, and rank(s) {lost} fail, as if "
                f"waiting for the others: {failure.said.splitlines()[-1]}")


def meeting(report, a, b, paces):
    """Return the report if the ranks of only one run, or of different numbers, train apart: compare where they meet."""
    run, pace = max(zip((a, b), paces), key=lambda pair: pair[1])
    fact = f"the ranks of {run.label} train apart for {pace} step(s), as in local SGD or DiLoCo"
    met = [number for number in run.trains_apart()[1] if number < min(a.length, b.length)]
    if met and all(same_probes(a.states(number)[0]["before"], b.states(number)[0]["before"]) for number in met):
        fact += f"; when they have met, before {len(met)} step(s), A and B have equal weights"
        return {**report, "verdict": "alike", "message": f"{fact}, as far as a few parameters show"}
    if pace == 1 and met:  # in place of the gradients, which is the same only with plain SGD
        fact = f"the ranks of {run.label} step with different gradients, and have equal weights before the next step"
        return {**report, "verdict": "different", "cause": "not-averaged", "step": met[0] + 1,
                "message": f"{fact}: {remedy('not-averaged')}"}
    return refuse(report, f"{fact}; where they meet, A and B need not be equal")


def refuse(report, reason, step=None):
    return {**report, "verdict": "not comparable", "cause": None, "step": step, "message": reason}


def unoptimized_differ(a, b, limit, again=False, untrained=()):
    """Compare buffers and averages of the weights between two runs, and the averages between the ranks of each run.

    Return (cause, evidence, step, name, difference) of the earliest difference, or None. Only tensors with equal names
    and shapes are compared, and no averages of the `untrained` tensors.
    """
    answers = []
    pairs = [("differs between A and B, though all parameters are the same", min(a.ranks), min(b.ranks), a, b, KEPT)]
    pairs += [(f"differs between ranks 0 and {rank} of {run.label}", min(run.ranks), rank, run, run, "average of")
              for run in (a, b) for rank in [*run.ranks][1:]]
    for place, left, right, run, other, kind in pairs[:1 if again else None]:
        known = set()  # the names of the tensors recorded so far
        for number, found in enumerate(zip(run.unoptimized(left), other.unoptimized(right))):
            found = [[row for row in rows if row[0].removeprefix("average of ") not in untrained] for rows in found]
            if differs := apart(*found, limit, kind):
                states = ([{"unoptimized": next(itertools.islice(part.unoptimized(rank), number, None), found[0]),
                            "flags": part.flags} for rank in part.ranks] for part in (a, b))
                ranks = where(differs[0], *states) if kind == KEPT else ""
                cause = "buffers" if kind == KEPT or differs[0] in known else "start"
                ranks += "; copy the model after its weights are equal" * (cause == "start")
                answers.append((cause, f"{differs[0]} {place}{ranks}", max(number - 1, 0), *differs))
                break
            known |= {name for name, *_ in found[0]}
    return min(answers, key=lambda answer: answer[2], default=None)


def metrics(text):
    """Return {name: [(number as text, whether it is of an evaluation), ...]} for printed metrics.

    A metric is NAME NUMBER, NAME: NUMBER or NAME=NUMBER, and a part of NAME must be the name of a metric, such as
    "loss" in val_loss. It is of an evaluation if its line or NAME says so.
    """
    found = {}
    for line in text.splitlines() if isinstance(text, str) else text:
        for name, number in PRINTED.findall(line):
            if METRICS & words(name) and len(found.setdefault(name, [])) < OCCURRENCES:
                found[name].append((number, bool(EVALUATED.search(line.replace("_", " ")))))
    return found


@functools.lru_cache(maxsize=1000)
def words(name):
    return {*re.split(r"[\W_]+", name.lower())}


def printed_differ(one, two, tolerance, cut=False, evaluated=False):
    """Return text that says how a metric that both commands print differs, or None if none differs.

    Compare the metrics of an evaluation: if a line says so or, if both runs have `evaluated`, all but losses. Of other
    metrics, which may cover the share of rank 0, name only those that differ by one whole factor in all lines.
    With `cut`, the commands may print a metric a different number of times, but no line on each rank.
    """
    left, right = metrics(one), metrics(two)
    for name, numbers in left.items():
        others = right.get(name, [])
        if abs(len(numbers) - len(others)) > cut:
            continue
        ratios = {round(float(y) / float(x), 2) for (x, _), (y, _) in zip(numbers, others) if float(x)}
        factor = max([*ratios, *[1 / ratio for ratio in ratios if ratio]], default=1) if len(ratios) == 1 else 1
        certain = evaluated and not LOSSES & words(name)
        for place, ((x, tested), (y, _)) in enumerate(zip(numbers, others), 1):
            digit = max(1.01 * 10.0 ** -len(number.partition(".")[2].partition("e")[0]) for number in (x, y))
            if "e" in (x + y).lower():
                digit = 1e-3 * max(abs(float(x)), abs(float(y)))
            certain |= tested or factor > 1.5 and math.isclose(factor, round(factor), abs_tol=0.02)
            if abs(float(x) - float(y)) > max(digit, tolerance * max(abs(float(x)), abs(float(y)))) and certain:
                return f"A prints {name} {x} and B {y} (occurrence {place} in the output)"
