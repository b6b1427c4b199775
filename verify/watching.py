"""Check a single run against rules that hold for any correct run."""
import math

from .comparing import limits_of, unequal_steps
from .explaining import remedy
from .ranks import ranks_differ
from .records import EQUAL, NOISE, REACHED, Run, apart, equal, gap, without_padding, worst


def watch(folder, failure=None):
    """Return a report on the run recorded in `folder`; the verdict is "sound", "unsound" or "not comparable"."""
    run = Run.read(folder, "the run")
    without_padding(run)
    report = {"verdict": "sound", "cause": None, "message": "", "findings": [], "steps": [run.length],
              "ranks": [len(run.ranks)]}
    still = not any(state["rows"] for step in range(run.length) for state in run.at(step)[0])
    if still or run.doubled:
        why = ("its processes did not join one group, or it restarted" if run.doubled else
               "no parameter in its optimizers requires a gradient" if run.length else "it took no optimizer step")
        return {**report, "verdict": "not comparable", "message": f"{why}\n{failure or ''}".strip()}
    findings = [rule(run, limits_of(True, run)) for rule in (replicas, rates, one_share, new_order, moving, finite)]
    fact = unequal_steps(run, failure)
    findings.append(fact and ("rank-stops", fact, None))
    for cause, evidence, step in filter(None, findings):
        if cause not in {known["cause"] for known in report["findings"]}:
            report["findings"].append({"cause": cause, "step": step, "message": f"{evidence}: {remedy(cause)}"})
    if failure and not report["findings"]:
        return {**report, "verdict": "not comparable", "message": f"the command failed: {failure}"}
    if report["findings"]:
        return {**report, "verdict": "unsound", "cause": report["findings"][0]["cause"]}
    return report


def replicas(run, limits):
    """Check that parameters that start equal on all ranks have equal rates, gradients and values in each step.

    If DDP spans all ranks, all parameters must start equal. Otherwise, parameters that differ may be parts of tensors.
    Ranks that train apart and meet again, as in local SGD, pass.
    """
    if 0 < run.trains_apart()[0] < math.inf:
        return None
    split = {}  # {(optimizer, its number of parameters): the numbers of those that may be parts of tensors}
    known = set()  # the names of the copies recorded so far; those of a GAN's generator come with its optimizer
    for step in range(run.length):
        states = run.at(step)[0]
        key = states[0].get("optimizer"), len(states[0]["rows"])  # others may join it in some steps
        if key not in split:
            groups = [*zip(*[state["rows"] for state in states])]  # the rows of one parameter on all ranks
            if len({len(state["rows"]) for state in states}) > 1 or any(
                    row[:2] != rows[0][:2] for rows in groups for row in rows):
                return None  # stages of a pipeline
            alike = [worst([(rows[0], row) for row in rows], "start")[0] <= limits.low for rows in groups]
            split[key] = set() if all(alike) else {  # zeros are equal anyway
                number for number, rows in enumerate(groups) if not alike[number] or not rows[0].start[0] > 0}
            # parts of a tensor have different gradients, averaged gradients of replicas are equal
            averaged = any(worst([(rows[0], row) for row in rows], "grad")[0] <= EQUAL and rows[0].grad[0] > 0
                           for number, rows in enumerate(groups) if not alike[number])
            if not all(alike) and (states[0]["replicas"] or len(split[key]) == len(groups) or averaged):
                name = groups[alike.index(False)][0].name
                return "start", f"the ranks start with different weights, such as {name}", step + 1
            for state in states[1:] if not any(split.values()) else ():
                copies = [copy for copy in state["unoptimized"] if copy[0] not in known]
                if found := apart(states[0]["unoptimized"], copies, EQUAL, "average of"):
                    fact = f"the ranks start with different weights: copies of the model differ, such as {found[0]}; "
                    fact += "copy the model after its weights are equal"
                    return "start", fact, step + 1
            known |= {name for name, *_ in states[0]["unoptimized"]}
        # correct replicas are bit-identical
        if found := ranks_differ(run, step, ("rate", "grad", "value"), EQUAL, skipped=split[key]):
            cause, evidence, step, name, difference = found
            return cause, f"{evidence}; {name} differs by {difference:.1e}", step + 1


def rates(run, limits):
    """Check that ranks with equal learning rates in the first step have equal ones later; so do a pipeline's stages."""
    for step in range(run.length):
        states = run.at(step)[0]
        found = [{row.rate[0] for row in state["rows"]} for state in states]
        if any(other != found[0] for other in found) and len({state["optimizer"] for state in states}) == 1:
            rank = next(rank for rank, other in zip(run.ranks, found) if other != found[0])
            return ("rank-lr", f"ranks 0 and {rank} have different learning rates", step + 1) if step else None


def epochs(run, field=1):
    """Return {rank: {loader: [(the samples of an epoch in reading order, whether the order is shuffled), ...]}}.

    With `field` 2, return the indices instead of the samples. The last epoch of a loader may be cut short.
    """
    found = {}
    for rank, events in run.events.items():
        found[rank], mine = {}, {}
        for event in events:
            for read in event["read"] if event["event"] == "step" else ():
                mine.setdefault(read[0], []).extend(read[field])
            if event["event"] == "epoch":
                found[rank].setdefault(event["loader"], []).append((mine.pop(event["loader"], []), event["shuffled"]))
        for loader, samples in mine.items():
            found[rank].setdefault(loader, []).append((samples, False))
    return found


def one_share(run, limits):
    """Check for each loader that no two ranks whose gradients are reduced together read the same samples in an epoch.

    Reduced together are all ranks if DDP spans them and, without DDP, ranks with equal weights, and with equal inputs
    and outputs of all modules in the first step: others may divide the sequence or the layers of the same samples.
    """
    states, read = run.at(0)[0], epochs(run)
    for one in sorted(run.ranks):
        for two in (rank for rank in sorted(run.ranks) if rank > one):
            ours, theirs = (states[sorted(run.ranks).index(rank)] for rank in (one, two))
            passed, rows = ([state[kind] for state in (ours, theirs)] for kind in ("passed", "rows"))
            alone = all(row.name == "parameter" for row in rows[0])  # the program has no modules
            same = (passed[0] or alone) and len(passed[0]) == len(passed[1]) and len(rows[0]) == len(rows[1])
            same = same and all(equal(x[4:], y[4:]) for x, y in zip(*passed))
            same = same and all(gap(x.start, y.start) < EQUAL for x, y in zip(*rows))
            for loader in {*read[one]} & {*read[two]} if same or ours["replicas"] else ():
                for number, shares in enumerate(zip(read[one][loader], read[two][loader]), 1):
                    seen = [{f"{value:.9g}" for value in mine} for mine, _ in shares]
                    twice = len(seen[0] & seen[1])  # padding, or a draw with replacement, also repeats samples
                    whole = len(seen[0]) > 0.9 * len(shares[0][0])
                    shared = whole and twice > max(len(run.ranks), 0.6 * len(seen[0]))
                    if shared or same and seen[0] == seen[1] != set():
                        return "samples", (f"ranks {one} and {two} both read {twice} of rank {one}'s {len(seen[0])} "
                                           f"samples in epoch {number}"), 1


def new_order(run, limits):
    """Check that no loader that shuffles has the same order in two epochs. Augmentation changes only the samples."""
    for rank, which, found in ((rank, f" of loader {loader + 1}" * (len(loaders) > 1), found) for field in (1, 2)
                               for rank, loaders in epochs(run, field).items() for loader, found in loaders.items()):
        for number, ((one, shuffled), (two, _)) in enumerate(zip(found, found[1:]), 1):
            if shuffled and len({f"{value:.9g}" for value in one}) > 2 and equal(one, two):
                return "set-epoch", f"rank {rank} reads the same order{which} in epochs {number} and {number + 1}", None


def moving(run, limits):
    """In a run of four steps or more, check that autograd reaches each parameter of the optimizers and that each moves.

    A gradient that autograd computes may be zero, and a bias before BatchNorm need not move: its gradient is noise.
    """
    total = max((row.grad[0] for step in range(run.length) for row in run.at(step)[1]), default=0)
    trained, reached, moved = {}, {}, {}  # {rank: whether}, and {(rank, name, shape): whether}
    for step in range(run.length if run.length >= 4 else 0):
        for rank, state in zip(run.ranks, run.at(step)[0]):
            for row in state["rows"]:
                key = rank, row.name, str(row.shape)
                trained[rank] = trained.get(rank) or row.grad[0] != 0
                reached[key] = reached.get(key) or row.reach == REACHED
                moved[key] = moved.get(key) or row.value != row.start or not row.grad[0] > NOISE * total
    for rank in trained:
        if not trained[rank]:
            return "not-optimized", f"no parameter in the optimizer of rank {rank} gets a gradient", None
        for cause, table, what in (("no-gradient", reached, "get no gradient"), ("never-moves", moved, "never move")):
            names = [key[1] for key, fine in table.items() if key[0] == rank and not fine]
            if names:
                return cause, f"{len(names)} parameter(s) of rank {rank} {what}, such as {names[0]}", None


def finite(run, limits):
    for number in range(run.length):
        for rank, state in zip(run.ranks, run.at(number)[0]):
            names = [row.name for row in state["rows"] if not math.isfinite(row.grad[0] + row.value[0])]
            if names:
                return "not-finite", f"rank {rank} has NaN or infinity in {names[0]}", number + 1
