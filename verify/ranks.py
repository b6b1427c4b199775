"""How the ranks of one run differ, where they should agree."""
import math

from .difference import common_factor
from .explaining import UNSURE, options_that_differ, parts_of_mean
from .records import EQUAL, NOISE, Starts, equal, gap, same_probes, worst

RANKS = {"start": ("start", "initial weights"), "rate": ("rank-lr", "learning rates"),  # what differs between ranks
         "grad": ("not-averaged", "gradients"), "value": ("optimizer", "weights")}


def ranks_differ(run, step, columns, limit, other=None, skipped=()):
    """If the ranks of a run differ, return the cause, evidence, step, parameter and difference; else None.

    `other` is the other command's run, if any. It shows whether the ranks have parts of a gradient. Rows whose number
    is in `skipped` may differ.
    """
    states = run.at(step)[0]
    for place, (rank, state) in enumerate(zip(run.ranks, states)):
        pairs = [pair for number, pair in enumerate(zip(states[0]["rows"], state["rows"])) if number not in skipped]
        if any(one[:2] != two[:2] for one, two in pairs):
            continue  # stages of a pipeline
        if other and not all(equal(one.start, two.start) for one, two in pairs):
            pairs = copies(pairs, other.at(step)[1])
        for column in columns:
            difference, name = worst(pairs, column)
            if difference <= limit:
                continue
            cause, what = RANKS[column]
            differ = [pair for pair in pairs if worst([pair], column)[0] > limit]
            whole = other and all(len(state["samples"]) == len(other.samples(step)) > 0 for state in states)
            unsure = ""
            shares = other and not equal(states[0]["samples"], state["samples"]) and equal(
                run.samples(step), other.samples(step))  # of the batch; else, they may be parts of the same samples
            parts = column == "grad" and other and parts_of(states, other.at(step)[0][0]["rows"])
            if parts and not shares:
                cause = "partial"
            elif column == "grad" and not step and other and (own := unshared(run, other, differ)):
                cause, what = "start", own
            elif column == "grad" and len(differ) > 1 and common_factor(differ)[1] < EQUAL:
                cause, why, unsure = divided(states, place, common_factor(differ)[0])
                what = f"gradients, proportional to each other{why}"
            elif column == "grad" and other and (found := of_split(run, states, place)):
                cause, what, unsure = found
            elif column == "value" and (options := options_that_differ(pairs, "rank 0", f"rank {rank}")):
                what += f": {options}"
            elif column == "value" and (movers := moved_on(run, step)):
                what += (f": since the step before, only on rank(s) {movers}, something other than the optimizer has "
                         "changed these, such as the load of a checkpoint")
            elif column == "value" and "lbfgs" in pairs[0][0].options.get("optimizer", "").lower():  # of any library
                what += "; L-BFGS moves by the loss that its closure returns: return the mean of all ranks' losses"
            if cause in ("not-averaged", "partial") and any(
                    one.grad[0] > 0 and worst([(one, two)], "grad")[0] <= limit for one, two in pairs):
                what += f" of {len(differ)} of {len(pairs)} tensors, such as {name}"
                if parts and shares:
                    what += f", whose sum over the ranks is that of {other.label}: add these up, too"
                elif cause == "not-averaged":
                    what += ", so average these, too" + ", or sum parts of a sequence" * (not shares)
            if cause == "not-averaged" and whole:  # in a tensor-parallel group, samples are equal
                unsure = UNSURE
            return cause, f"{unsure}ranks 0 and {rank} of {run.label} have different {what}", step, name, difference


def moved_on(run, step):
    """Return the ranks on which some weights are not those that the step before has left, or [] if it is so on all."""
    pairs = [*zip(run.states(step - 1), run.states(step))] if step else []
    ranks = [rank for rank, (before, now) in zip(run.ranks, pairs) if before.get("optimizer") == now.get("optimizer")
             and not same_probes(before.get("after"), now.get("before"))]
    return ranks if len(ranks) < len(run.ranks) else []


def unshared(run, other, differ):
    """Return text that says so if ranks have equal initial weights in place of different parts, such as experts."""
    have, shapes = Starts(run.at(0)[1]), {str(one.shape) for one, _ in differ}
    lacking = [row for row in other.at(0)[1] if str(row.shape) in shapes and not have.alike(row)]
    if lacking:
        return (f"gradients for equal initial weights, while {len(lacking)} tensor(s) of {other.label}, such as "
                f"{lacking[0].name}, start with values that no rank of {run.label} has")


def of_split(run, states, place):
    """Return the cause, what differs, and UNSURE or "" if rank 0 and another rank have different parts of tensors.

    Such ranks should read the same samples; experts, whose ranks do not, have no replicas that read the same ones.
    """
    held = [[row.part[0] for row in state.get("parts", ())] for state in states]
    alike = [equal(states[0]["samples"], state["samples"]) for state in states]
    if held[0] == held[place] or not states[0]["samples"]:
        return None
    if alike[place]:
        return "no-backward", ("gradients of tensors that they share, for equal samples: the backward pass from the "
                               "split tensors does not add them up over the ranks"), UNSURE
    twin = next((number for number, parts in enumerate(held) if number and parts == held[0] and alike[number]), None)
    if twin is not None:
        return "samples", (f"samples, though they have different parts of split tensors; ranks 0 and "
                           f"{[*run.ranks][twin]}, which have the same parts, read the same samples"), ""


def divided(states, place, factor):
    """Return the cause and the evidence if a rank's gradients are `factor` times those of rank 0, and UNSURE or ""."""
    losses, counts, _ = parts_of_mean(states)
    each = len(losses) // len(states)  # losses of each rank
    for weights in counts if each else ():
        ours, theirs = (sum(weights[number * each:][:each]) for number in (0, place))
        if math.isclose(theirs * factor, ours, rel_tol=EQUAL) and ours:
            return "uneven-mean", f": each is divided by its own count, {ours:g} and {theirs:g}", ""
    if states[0]["clips"] != states[place]["clips"]:
        return "clip", "", ""
    return "clip", ", after equal clip calls: something else clips or divides them on each rank", UNSURE


def copies(pairs, others):
    """Return the `pairs` (one row from each of two ranks) whose rows are copies of the same tensor.

    Return all pairs if `others`, the rows of the other run, lack one of the tensors. Pipeline stages, and ranks with
    different experts, have different tensors of the model.
    """
    starts = Starts(others)
    counts = [len(starts.alike(two)) for _, two in pairs]
    if not all(counts):
        return pairs
    return [pair for pair, count in zip(pairs, counts) if equal(pair[0].start, pair[1].start) and count == 1]


def parts_of(states, rows):
    """Return whether the ranks have different gradients that add up to the other run's gradient, in `rows`."""
    if len(rows) != len(states[0]["rows"]):
        rows = [next((row for row in rows if row[:2] == own[:2]), own) for own in states[0]["rows"]]
    groups = [*zip(rows, *[state["rows"] for state in states])]
    noise = NOISE * max(part.grad[0] for _, *parts in groups for part in parts)
    factors = []  # by which clipping scales each rank's gradients
    for rank in range(len(states)):
        pairs = [(whole, parts[rank]) for whole, *parts in groups if whole.grad[0] > noise]
        pairs = [pair for pair in pairs if common_factor([pair])[1] < EQUAL]
        factors.append(common_factor(pairs)[0] or 1 if pairs else 1)
    found = False
    for whole, *parts in groups:
        if any(gap(parts[0].grad, part.grad, noise) > EQUAL for part in parts):
            size = max(part.grad[0] for part in parts)
            totals = [[size, *[sum(part.grad[k] / by for part, by in zip(parts, divisors)) for k in (1, 2)]]
                      for divisors in (factors, [1] * len(parts))]
            found |= min(gap(total, [size, *whole.grad[1:]]) for total in totals) < EQUAL
    return found
