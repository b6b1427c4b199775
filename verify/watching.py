"""Check a single run against rules that hold for any correct run."""
import math

from .comparing import LIMITS
from .explaining import REMEDIES, ranks_differ
from .records import Run, equal, worst

ALONE = {
    "never-moves": "check its learning rate, and look for code that restores its old value",
    "not-optimized": "after the last change to the model, create the optimizer from the model's parameters; check "
                     "that the loss is not constant",
    "not-finite": "lower the learning rate, clip the gradients, or look for a division by zero in the loss"}


def watch(folder, failure=None):
    """Return a report on the run recorded in `folder`; the verdict is "sound", "unsound" or "not comparable"."""
    run = Run.read(folder, "the run")
    report = {"verdict": "sound", "steps": [run.length], "ranks": [len(run.ranks)], "findings": [], "message": ""}
    if not run.length or run.doubled:
        why = "its processes did not join one group, or it restarted" if run.doubled else "it took no optimizer step"
        return {**report, "verdict": "not comparable", "message": f"{why}\n{failure or ''}".strip()}
    sixteen = {"torch.float16", "torch.bfloat16"} & run.flags
    findings = [rule(run, LIMITS["16 bits" if sixteen else "own"]) for rule in (
        replicas, one_share, new_order, moving, finite, steps_agree)]
    for cause, evidence, step in filter(None, findings):
        report["findings"].append({"cause": cause, "step": step,
                                   "message": f"{evidence}: {(REMEDIES | ALONE)[cause]}"})
    if failure and not report["findings"]:
        return {**report, "verdict": "not comparable", "message": f"the command failed: {failure}"}
    return {**report, "verdict": "unsound" if report["findings"] else "sound"}


def replicas(run, limits):
    """Check that parameters that start equal on all ranks have equal rates, gradients and values in each step.

    If DDP spans all ranks, all parameters must start equal. Otherwise, parameters that differ may be parts of tensors.
    """
    first = run.at(0)[0]
    alike = [all(row[:2] == rows[0][:2] for row in rows) for rows in zip(*[state["rows"] for state in first])]
    if not all(alike) or len({len(state["rows"]) for state in first}) > 1:
        return None  # stages of a pipeline
    together = [worst([(rows[0], row) for row in rows], "start")[0] <= limits.low
                for rows in zip(*[state["rows"] for state in first])]
    telling = [rows[0].start[0] > 0 for rows in zip(*[state["rows"] for state in first])]  # zeros are equal anyway
    if first[0]["replicas"] and not all(together) or not any(map(min, together, telling)):
        name = first[0]["rows"][together.index(False)].name
        return "start", f"the ranks start with different weights, such as {name}", 1
    split = {number for number, kept in enumerate(map(min, together, telling)) if not kept and not all(together)}
    for step in range(run.length):
        # correct replicas are bit-identical
        if found := ranks_differ(run, step, ("rate", "grad", "value"), 1e-6, skipped=split):
            cause, evidence, step, name, difference = found
            return cause, f"{evidence}; {name} differs by {difference:.1e}", step + 1
    return None


def epochs(run):
    """Return {rank: [(the samples of an epoch in reading order, whether the sampler shuffles), ...]}."""
    found = {}
    for rank, events in run.events.items():
        found[rank], mine = [], []
        for event in events:
            mine += event["samples"] if event["event"] == "step" else []
            if event["event"] == "epoch":
                found[rank].append((mine, event["shuffled"]))
                mine = []
    return found


def one_share(run, limits):
    """If DDP spans all ranks, check that ranks 0 and 1 do not read the same samples in an epoch, except padding."""
    states = run.at(0)[0]
    if len(states) < 2 or not states[0]["replicas"]:
        return None
    whole = zip(*epochs(run).values()) if all(epochs(run).values()) else [[(state["samples"], 0) for state in states]]
    for number, shares in enumerate(whole, 1):
        seen = [{f"{value:.9g}" for value in mine} for mine, _ in shares]
        twice = len(seen[0] & seen[1])  # padding, or a sampler that draws with replacement, also repeats samples
        if len(seen[0]) > 0.9 * len(shares[0][0]) and twice > max(len(seen), 0.6 * len(seen[0])):
            return "samples", f"ranks 0 and 1 both read {twice} of rank 0's {len(seen[0])} samples in epoch {number}", 1
    return None


def new_order(run, limits):
    """Check that a shuffling sampler gives each epoch a different order."""
    for rank, found in epochs(run).items():
        for number, ((one, shuffled), (two, _)) in enumerate(zip(found, found[1:]), 1):
            if shuffled and len({f"{value:.9g}" for value in one}) > 2 and equal(one, two):
                return "set-epoch", f"rank {rank} reads the same order in epochs {number} and {number + 1}", None
    return None


def moving(run, limits):
    """In a run of four steps or more, check that each parameter of the optimizers gets a gradient and moves.

    A bias before BatchNorm need not move: its gradient is only noise.
    """
    for rank, steps in run.ranks.items() if run.length >= 4 else ():
        without, resting, total = {}, {}, max(row.grad[0] for step in steps for row in step["rows"])
        for row in (row for step in steps for row in step["rows"]):
            key = row.name, str(row.shape)
            without[key] = without.get(key, True) and row.grad[0] == 0
            resting[key] = resting.get(key, True) and row.grad[0] > 1e-6 * total and row.value == row.start
        if all(without.values()):
            return "not-optimized", f"no parameter in the optimizer of rank {rank} gets a gradient", None
        for cause, found, what in (("no-gradient", without, "get no gradient"), ("never-moves", resting, "never move")):
            names = [name for (name, _), rests in found.items() if rests]
            if names:
                return cause, f"{len(names)} parameter(s) of rank {rank} {what}, such as {names[0]}", None
    return None


def finite(run, limits):
    for rank, steps in run.ranks.items():
        for number, step in enumerate(steps, 1):
            names = [row.name for row in step["rows"] if not math.isfinite(row.grad[0] + row.value[0])]
            if names:
                return "not-finite", f"rank {rank} has NaN or infinity in {names[0]}", number
    return None


def steps_agree(run, limits):
    counts = [run.kinds(rank).count("begin") for rank in run.ranks]
    return ("rank-stops", f"the ranks begin different numbers of steps: {counts}", None) if len({*counts}) > 1 else None
