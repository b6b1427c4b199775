"""The causes of a difference: rules, in the order in which they are tried, and a remedy for each cause.

A rule is a function of a Difference that returns the evidence for its cause, or a false value.
"""
import json
import math
from collections import Counter
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from .records import EQUAL, INPUTS, NOISE, Starts, apart, equal, gap, worst

CAUSES = json.loads(Path(__file__).with_name("causes.json").read_text())  # what is found, the remedy, the pitfall
UNSURE = "not sure: "  # precedes the evidence of a rule that only excludes other causes
SIZES = 3  # the place of a value whose size differs between the runs: first_value()


def remedy(cause):
    pitfall = CAUSES[cause]["pitfall"]
    return CAUSES[cause]["remedy"] + f" (pitfall {pitfall})" * bool(pitfall)


class Difference:
    """Describes the first step at which two runs differ. `column` is the field of `Row` that differs."""

    def __init__(self, a, b, step, column, pairs):
        self.a, self.b, self.step, self.column, self.pairs = a, b, step, column, pairs
        (self.left, _, self.ours), (self.right, _, self.theirs) = a.at(step), b.at(step)
        counts = len(self.ours), len(self.theirs)
        self.ours, self.theirs = read_once(a, step, counts[1]), read_once(b, step, counts[0])
        sizes = [{state["size"] for state in states} for states in (self.left, self.right)]
        if len(self.ours) != len(self.theirs) and sizes[0] != sizes[1]:
            self.theirs = self.ours  # context parallelism: each input of the model is only a part of a sample
        layouts = [(len(states), len(states[0]["batches"])) for states in (self.left, self.right)]
        self.split = layouts[0] != layouts[1]
        self.parallel = self.right if layouts[1] > layouts[0] else self.left  # the states of the run with more parts
        one, two = [sum(map(loss_of, states)) for states in (self.left, self.right)]
        self.means = [one / len(self.left), two / len(self.right)]
        sums = [one, self.means[1]], [self.means[0], two]  # ranks may have parts of a sum
        self.losses = next((pair for pair in sums if math.isclose(*pair)), self.means)
        self.flags = {flag for state in self.left + self.right for flag in state["flags"]}
        self.norms = [states[0]["clips"][0][0] if states[0]["clips"] else 0 for states in (self.left, self.right)]

    @cached_property
    def factor(self):
        """All gradients of B divided by those of A, or None if the quotients differ."""
        one, two = max(self.pairs, key=lambda pair: pair[0].grad[0])
        factor = two.grad[0] / (one.grad[0] or math.nan)
        bound = min(EQUAL, 1e-3 * abs(factor - 1))
        if self.column == "grad" and factor > 0 and worst(multiply(self.pairs, factor), "grad")[0] < bound:
            return factor
        return None

    @cached_property
    def other_losses(self):
        return self.column == "grad" and not math.isclose(*self.losses, rel_tol=1e-9)

    def explain(self):
        """Return the likely cause, and the evidence for it."""
        for cause, rule in RULES:
            if evidence := rule(self):
                return evidence if isinstance(evidence, tuple) else (cause, evidence)
        raise AssertionError("the last rule always holds")


def loss_of(state):
    return sum(state["losses"])


def read_once(run, step, count):
    """Return a step's samples, sorted. Count ranks with equal samples once if this leaves exactly `count` samples.

    In tensor and pipeline parallelism, each rank of a group reads all samples of the group.
    """
    states, samples = run.states(step), run.samples(step)
    once = sorted(sum({str(state["samples"]): state["samples"] for state in states}.values(), []))
    return once if len(once) == count else samples


def multiply(pairs, factor):
    return [(one._replace(grad=[factor * value for value in one.grad]), two) for one, two in pairs]


def start(diff):
    return diff.column == "start" and f"{diff.a.label} and {diff.b.label} start with different weights"


def batch_size(diff):
    if diff.ours and diff.theirs and len(diff.ours) != len(diff.theirs) and not diff.factor:
        return f"the step reads {len(diff.ours)} samples in {diff.a.label}, {len(diff.theirs)} in {diff.b.label}"


def learning_rate(diff):
    if diff.column != "rate":
        return None
    differ = [pair for pair in diff.pairs if pair[0].rate != pair[1].rate]
    one, two = differ[0]
    ratio, since = two.rate[0] / (one.rate[0] or math.nan), "" if diff.step == 0 else ", after equal earlier rates"
    rates = [[row.rate[0] for step in range(min(diff.a.length, diff.b.length)) for row in run.at(step)[0][0]["rows"]
              if row.name == one.name] for run in (diff.a, diff.b)]
    later = [*zip(*[found[diff.step:] for found in rates])]
    if later and all(math.isclose(y, ratio * x, rel_tol=EQUAL) for x, y in later):
        since += f", {ratio:.6g} times as high in all {len(later)} steps from here on"
    slow, fast = [[rate / max(one.rate + two.rate) for rate in found] for found in rates]
    orders = (diff.b, slow, fast), (diff.a, fast, slow)
    paces = [(pace, run.label) for pace in range(2, 9) for run, long, short in orders
             if len({*short}) > 2 and len(long) > 2 * pace and equal(short[:len(long[::pace])], long[::pace])]
    since += f"; the schedule of {paces[0][1]} runs {paces[0][0]} times as fast" if paces else ""
    which = some([row for row, _ in differ], diff.pairs)
    return f"the rate of {which} is {one.rate[0]:g} in {diff.a.label} and {two.rate[0]:g} in {diff.b.label}{since}"


def optimizer(diff):
    if diff.column == "value":
        options = options_that_differ(diff.pairs, diff.a.label, diff.b.label)
        return f"equal gradients, but different updates{': ' * bool(options)}{options}"


def options_that_differ(pairs, one, two):
    """Return text that names the options of the optimizers that differ, and for which parameters, or an empty string.

    `one` and `two` say where the rows of each pair come from.
    """
    found = {}  # {(option, its values): the rows}
    for pair in pairs:
        options = ["optimizer"] if len({row.options.get("optimizer") for row in pair}) > 1 else sorted(
            {*pair[0].options, *pair[1].options} - {"group"})
        for option in options:
            values = [row.options.get(option) for row in pair]
            if values[0] != values[1]:
                found.setdefault((option, *values), []).append(pair[0])
    return "; ".join(f"{option} is {ours} in {one} and {theirs} in {two} for {some(rows, pairs)}"
                     for (option, ours, theirs), rows in [*found.items()][:3])


def some(rows, pairs):
    """Return text that says which of the parameters in `pairs` the `rows` are, and names a group of an optimizer."""
    if len(rows) == len(pairs):
        return "all parameters"
    group = rows[0].options.get("group")
    place = f" in group {group}" if group is not None else ""
    return f"{len(rows)} of {len(pairs)} parameters, such as {rows[0].name}{place}"


def evaluation(diff):
    resting = [max(state["resting"] for state in states) for states in (diff.left, diff.right)]
    if resting[0] != resting[1]:
        return f"{resting[0]} layers of {diff.a.label} are in evaluation mode, {resting[1]} of {diff.b.label}"


def clip(diff):
    plain = diff.factor and Fraction(diff.factor).limit_denominator(16)
    if diff.factor and (plain == 1 or abs(diff.factor - plain) > EQUAL) and math.isclose(*diff.losses):
        return f"{times(diff, diff.factor)}, after equal losses"
    whole = diff.factor and min(abs(max(diff.factor, 1 / diff.factor) - n) for n in range(2, 65)) < 1e-4
    return (not whole or math.isclose(*diff.norms, rel_tol=EQUAL)) and clipped(diff.a, diff.b, diff.left, diff.right)


def clipped(a, b, left, right):
    """Return how clipping differs between the ranks or the runs, or None."""
    left, right = [state["clips"] for state in left], [state["clips"] for state in right]
    if len(left[0]) != len(right[0]):
        return f"{a.label} clips {len(left[0])} time(s) in this step, {b.label} {len(right[0])}"
    for one, two in [*zip(left[0], left[-1]), *zip(right[0], right[-1])]:
        if not math.isclose(one[0], two[0], rel_tol=EQUAL):
            return f"two ranks clip different norms, {one[0]:.4g} and {two[0]:.4g}"
    for one, two in zip(left[0], right[0]):
        scaled = max(one[0], two[0]) > 100 * min(one[0], two[0])
        if one[1] != two[1] or scaled:
            return (f"{a.label} clips a norm of {one[0]:.4g} to {one[1]:g}, {b.label} {two[0]:.4g} to {two[1]:g}"
                    + ", which is still scaled (pitfall P6)" * scaled)


def whole_loss(diff):
    """Each rank computes the loss of the whole batch, from gathered values, but gets only a part of its gradient."""
    less = diff.factor and (diff.factor < 1) == (diff.parallel is diff.right)
    losses = [loss_of(state) for state in diff.left + diff.right]
    if less and len(diff.parallel) > 1 and lost(diff) and all(math.isclose(loss, losses[0]) for loss in losses):
        return f"{times(diff, diff.factor)}, though each rank has the whole loss, {losses[0]:.9g}{lost(diff)}"


def times(diff, factor):
    return f"the gradients of {diff.b.label} are {factor:.9g} times those of {diff.a.label}"


def scale(diff):
    if not diff.factor:
        return None
    factor = diff.norms[1] / diff.norms[0] if all(diff.norms) else diff.factor
    layout = f"{len(diff.right)} rank(s) and {len(diff.right[0]['batches'])} micro-batch(es)"
    less = (factor < 1) == (diff.parallel is diff.right) and math.isclose(*diff.means)
    why = ", after equal losses: a sum is divided twice, or a part of the gradient is lost" if less else ""
    return f"{times(diff, factor)}{why}{lost(diff) if less else ''}; {diff.b.label} has {layout}"


def lost(diff):
    """Return which collectives without a backward pass were given a tensor that needs a gradient."""
    found = sorted({place for state in diff.left + diff.right for place in state["lost"]})
    return f"; no gradient passes through {', '.join(found)}" if found else ""


def no_gradient(diff):
    """Some gradients are zero in one run only. A gradient at the level of rounding errors counts as zero, too."""
    if diff.column != "grad" or diff.factor:
        return None
    noise = NOISE * math.hypot(*[max(one.grad[0], two.grad[0]) for one, two in diff.pairs])
    for run, number in ((diff.b, 1), (diff.a, 0)):
        without = [pair[number] for pair in diff.pairs if not pair[number].grad[0] and pair[1 - number].grad[0] > noise]
        if without:
            how = ("grad is None", "autograd does not reach it", "autograd computes zero")[without[0].reach]
            return (f"{len(without)} parameter(s) get no gradient in {run.label}, such as {without[0].name}: {how}"
                    + lost(diff))


def stale(diff):
    """In one run only, gradients are not zero before the first backward pass of the step."""
    left, right = ({name for state in states for name in state["stale"]} for states in (diff.left, diff.right))
    for run, found, other in ((diff.b, right, left), (diff.a, left, right)):
        if found and not other:
            return f"before the step's first backward pass, {run.label} still has gradients that {min(found)} left"


def group_scale(diff):
    """Some gradients differ by one common factor, and the others are equal."""
    if diff.column != "grad" or diff.factor:
        return None
    moved = [pair for pair in diff.pairs if worst([pair], "grad")[0] > EQUAL]
    factor = moved[0][1].grad[0] / (moved[0][0].grad[0] or math.nan) if moved else 0
    if 0 < len(moved) < len(diff.pairs) and factor > 0 and worst(multiply(moved, factor), "grad")[0] < EQUAL:
        return (f"{len(moved)} of {len(diff.pairs)} gradients of {diff.b.label} are {factor:.6g} times those of "
                f"{diff.a.label}, such as that of {moved[0][0].name}; the others are equal")


def computed_inputs(diff):
    """The samples are inputs of models, which the program may compute with a buffer, such as running statistics."""
    if equal(diff.ours, diff.theirs) or "batchnorm" in diff.flags or not are_inputs(diff.left + diff.right):
        return None
    found = [apart(diff.left[0]["unoptimized"], state["unoptimized"], EQUAL, ("buffer",)) for state in diff.right]
    return found and found[0] and (f"{UNSURE}the inputs of the model differ, and so does {found[0][0]}"
                                   f"{where(found[0][0], diff.left, diff.right)}")


def are_inputs(states):
    """Return whether all samples are inputs of models, because no loader has delivered them."""
    return all(batch[0] == INPUTS for state in states for batch in state["batches"])


def set_epoch(diff):
    if not diff.ours or not diff.theirs or equal(diff.ours, diff.theirs):
        return None
    for run, mine, other in ((diff.b, diff.theirs, diff.a), (diff.a, diff.ours, diff.b)):
        for again in {*range(min(diff.a.length, diff.b.length))} - {diff.step}:
            if equal(read_once(run, again, len(mine)), mine) and \
                    not equal(other.samples(again), other.samples(diff.step)):
                fact = f"{run.label} reads the same samples in steps {diff.step + 1} and {again + 1}"
                one, two = sampler(run), sampler(other)
                if one != two and "set_epoch" in two:  # as when Lightning replaces a sampler that does not shuffle
                    fact += f" ({one}), {other.label} shuffles ({two})"
                return fact if "set_epoch" in one else ("samples", fact)


def sampler(run):
    return next((event["sampler"] for events in run.events.values() for event in events if event["event"] == "epoch"),
                "")


def samples(diff):
    if not diff.ours or not diff.theirs or equal(diff.ours, diff.theirs):
        return None
    for states, mine in ((diff.left, diff.ours), (diff.right, diff.theirs)):
        if any(equal(sorted(states[0]["samples"]), sorted(state["samples"])) for state in states[1:]
               if len(state["samples"]) < len(mine)):
            return "every rank reads the same samples"
    steps = range(min(diff.a.length, diff.b.length))
    one, two = [Counter(f"{value:.6g}" for step in steps for value in run.samples(step)) for run in (diff.a, diff.b)]
    labels = [[sorted(label for state in run.states(step) for label in state["labels"]) for step in steps]
              for run in (diff.a, diff.b)]
    common = len({f"{value:.6g}" for value in diff.ours} & {f"{value:.6g}" for value in diff.theirs})
    kind = "inputs of models" if are_inputs(diff.left + diff.right) else "samples"
    fact = f"{common} of the step's {len(diff.ours)} {kind} are in both runs"
    if one == two:
        return f"{fact}; all steps together read the same samples, in a different order"
    if any(map(any, labels[0])) and all(map(equal, *labels)):
        return f"{fact}; the labels agree in all steps, so the same samples have different values"
    return fact + ", and the other steps have none in common: the values may differ, too" * (not one & two)


def batchnorm(diff):
    """With equal losses, the outputs are equal, too: then statistics of all ranks normalize, or BatchNorm rests."""
    return diff.split and not math.isclose(*diff.losses, rel_tol=1e-9) and flagged("batchnorm", diff)


def no_backward(diff):
    """The losses are equal, but the gradients differ: a collective passes back a wrong gradient, or none."""
    if diff.ours and diff.theirs and len(diff.left) != len(diff.right) and math.isclose(*diff.losses, rel_tol=1e-9):
        fact = f"equal samples and equal mean losses, {diff.losses[0]:.9g}, but different gradients"
        return fact + lost(diff) if lost(diff) else UNSURE + fact


def old_weight(diff):
    """A rank computes with the old value of a weight that the optimizer of another rank has since changed."""
    for run, states in ((diff.a, diff.left), (diff.b, diff.right)):
        new = {f"weight {row.name}": row.value for row in run.at(diff.step - 1)[1]} if diff.step else {}
        for rank, state in zip(run.ranks, states):
            for name, _, digest in state["unoptimized"]:
                if name in new and gap(digest, new[name]) > EQUAL:
                    return f"rank {rank} of {run.label} uses a different {name} than the rank that updated it"


def buffers(diff):
    """A buffer, or another tensor that the model holds, differs, so the losses differ, too."""
    for run, states in ((diff.a, diff.left), (diff.b, diff.right)):
        for rank, state in zip(run.ranks, states):
            found = apart(diff.left[0]["unoptimized"], state["unoptimized"], EQUAL, ("buffer", "average", "other"))
            if found and not math.isclose(*diff.losses):
                fact = f"{found[0]} on rank {rank} of {run.label} differs from that on rank 0 of {diff.a.label}"
                return fact + where(found[0], diff.left, diff.right)


def where(name, *runs):
    """Return text that says whether a buffer or an average differs between ranks. `runs` has the states of each run."""
    differs = any(apart(states[0]["unoptimized"], state["unoptimized"], EQUAL, name)
                  for states in runs for state in states[1:])
    return "; ranks differ, too" if differs else "; the ranks of each run agree"


def forward(diff):
    """All ranks compute with the whole batch, and they have equal losses or parts of the model."""
    for run, states in ((diff.a, diff.left), (diff.b, diff.right)):
        alone = states[0]["samples"] and all(equal(state["samples"], states[0]["samples"]) for state in states)
        losses = [*map(loss_of, states)]
        whole = run.cut == len(losses) or math.isclose(min(losses), max(losses))
        if len(losses) > 1 and alone and whole and not math.isclose(*diff.losses):
            return f"each rank of {run.label} computes the whole loss; {mean_losses(diff)}"


def reweighted(diff):
    """Weighting the losses of ranks and micro-batches by their counts gives the other run's loss."""
    sides = (diff.b, diff.right, diff.means[0]), (diff.a, diff.left, diff.means[1])
    for run, states, target in sides if diff.other_losses else ():
        losses, counts, factors = parts_of_mean(states)
        for weights in (weights for weights in counts if min(weights) != max(weights)):
            mean = sum(x * y for x, y in zip(weights, losses)) / (sum(weights) or math.nan)
            if any(math.isclose(factor * mean, target, rel_tol=EQUAL) for factor in factors):
                return (f"{mean_losses(diff)}; the {len(weights)} losses of {run.label}, weighted by the counts "
                        f"{', '.join(f'{value:g}' for value in weights[:8])}, give the other run's loss")


def parts_of_mean(states):
    """Return the losses of all ranks and micro-batches, lists of counts that they may be divided by, and factors.

    The program may also have divided the losses by the factors: the numbers of ranks, of micro-batches, or of both.
    """
    losses = [loss for state in states for loss in state["losses"]]
    counts = [found for state in states for found in state["counts"]]
    if all(len(state["losses"]) == len(state["batches"]) for state in states):
        batches = [sum(batch[1], []) for state in states for batch in state["batches"]]
        counts = [[*one, *two] for one, two in zip(counts, batches)] if counts else batches
    parts = [len(states), max(len(state["losses"]) for state in states)]
    return losses, [*zip(*counts)] if len({*map(len, counts)}) == 1 else [], {1, *parts, math.prod(parts)}


def uneven_mean(diff):
    """The parts have different counts of elements or labels, and the other run's loss is between those of the parts."""
    sides = (diff.right, diff.means[0]), (diff.left, diff.means[1])
    for states, target in sides if diff.split and diff.other_losses else ():
        losses, counts, factors = parts_of_mean(states)
        between = any(min(losses) * n < target < max(losses) * n for n in factors if losses)
        if between and any(min(weights) != max(weights) for place, weights in enumerate(counts) if place % 4 != 3):
            return (f"{UNSURE}{mean_losses(diff)}; counts, such as those of labels, differ between the ranks or "
                    "micro-batches")


def loss(diff):
    return diff.other_losses and f"{UNSURE}{mean_losses(diff)}{lost(diff)}"


def mean_losses(diff):
    seen = "equal samples" if diff.ours and diff.theirs else "the samples were not seen, so they may differ"
    return f"{seen}; mean loss {diff.losses[0]:.9g} in {diff.a.label}, {diff.losses[1]:.9g} in {diff.b.label}"


def flagged(flag, diff):
    return flag in diff.flags and mean_losses(diff)


# The first rule that holds names the cause, so a rule stands before all rules whose condition its cause also meets:
RULES = [
    # what precedes the gradients: each of these changes all that follows
    ("start", start), ("batch-size", batch_size), ("learning-rate", learning_rate), ("optimizer", optimizer),
    ("evaluation", evaluation), ("optimizer", old_weight), ("stale", stale),
    # gradients that are proportional or zero: other samples or losses cannot make them so
    ("clip", clip), ("no-backward", whole_loss), ("scale", scale), ("no-gradient", no_gradient),
    ("group-scale", group_scale),
    # other samples: all that is computed from them differs
    ("buffers", computed_inputs), ("set-epoch", set_epoch), ("samples", samples),
    # from here on, the samples are equal, or they were not seen
    ("reset", lambda diff: "reset" in diff.b.flags ^ diff.a.flags and "gradients are zero before a later micro-batch"),
    ("batchnorm", batchnorm), ("no-backward", no_backward),
    ("buffers", buffers), ("uneven-mean", reweighted), ("random", lambda diff: flagged("random", diff)),
    ("forward", forward),
    # fallbacks: they hold for most differences of the loss, so the answer says "not sure"
    ("uneven-mean", uneven_mean),
    ("evaluation", lambda diff: flagged("evaluated", diff) and UNSURE + mean_losses(diff)), ("loss", loss),
    ("unknown", mean_losses)]


def ranks_differ(run, step, columns, limit, other=None, skipped=()):
    """If the ranks of a run differ, return the cause, evidence, step, parameter and difference; else None.

    `other` is the other command's run, if any. It shows whether the ranks have parts of a gradient. Rows whose number
    is in `skipped` may differ.
    """
    states = run.at(step)[0]
    for rank, state in zip(run.ranks, states):
        pairs = [pair for number, pair in enumerate(zip(states[0]["rows"], state["rows"])) if number not in skipped]
        if any(one[:2] != two[:2] for one, two in pairs):
            continue  # stages of a pipeline
        if other and not all(equal(one.start, two.start) for one, two in pairs):
            pairs = replicas(pairs, other.at(step)[1])
        for column in columns:
            difference, name = worst(pairs, column)
            if difference > limit:
                cause, what = {"start": ("start", "initial weights"), "rate": ("rank-lr", "learning rates"),
                               "grad": ("not-averaged", "gradients"), "value": ("optimizer", "weights")}[column]
                if column == "grad" and other and parts_of(states, other.at(step)[0][0]["rows"]):
                    cause = "partial"
                elif column == "grad" and proportional([pair for pair in pairs if worst([pair], column)[0] > limit]):
                    cause, what = "clip", "gradients, proportional to each other"
                options = column == "value" and options_that_differ(pairs, "rank 0", f"rank {rank}")
                what += f": {options}" if options else ""
                return cause, f"ranks 0 and {rank} of {run.label} have different {what}", step, name, difference


def unmatched(rows, others, pairs):
    """Return the cause and the evidence if only `pairs` of the tensors of two runs match."""
    for side, mine in enumerate((rows, others)):
        matched = [pair[side] for pair in pairs]
        starts, known = Starts(matched), {*map(id, matched)}
        for row in (row for row in mine if id(row) not in known):
            if alike := starts.alike(row):  # such as an embedding that two stages of a pipeline share
                twin = pairs[alike[0]]
                one, two = (row.grad[place] + twin[side].grad[place] for place in (1, 2))
                whole = twin[1 - side].grad  # clipping scales one run's gradients by one factor
                cause = "partial" if equal([one * whole[2]], [two * whole[1]]) else "not-averaged"
                cause = "clip" if proportional([(twin[side], row)] * 2) else cause
                return cause, f"two copies of {row.name} in {'AB'[side]} have different gradients"
    return "unknown", f"A trains {len(rows)} tensors and B {len(others)}, of which {len(pairs)} match"


def replicas(pairs, others):
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
    found, groups = [], [*zip(rows, *[state["rows"] for state in states])]
    noise = NOISE * max(part.grad[0] for _, *parts in groups for part in parts)
    factors = [max(((whole.grad[0], parts[rank].grad[0] / whole.grad[0]) for whole, *parts in groups  # of clipping
                    if whole.grad[0] > noise and worst(multiply([(whole, parts[rank])], parts[rank].grad[0]
                                                                / whole.grad[0]), "grad")[0] < EQUAL),
                   default=(0, 1))[1] or 1 for rank in range(len(states))]
    for whole, *parts in groups:
        if any(gap(parts[0].grad, part.grad, noise) > EQUAL for part in parts):
            size = max(part.grad[0] for part in parts)
            totals = [[size, *[sum(part.grad[k] / by for part, by in zip(parts, divisors)) for k in (1, 2)]]
                      for divisors in (factors, [1] * len(parts))]
            found.append(min(gap(total, [size, *whole.grad[1:]]) for total in totals) < EQUAL)
    return any(found)


def proportional(pairs):
    """Return whether several gradients, not just one, differ by one common factor."""
    factor = pairs[0][1].grad[0] / (pairs[0][0].grad[0] or math.nan)
    return len(pairs) > 1 and worst(multiply(pairs, factor), "grad")[0] < EQUAL


def trace(report, a, b):
    """Return the report, once both runs have recorded the values and draws of its step: what first differs there."""
    step, cause = report["step"] - 1, report["cause"]
    value, draws = first_value(a, b, step), draws_that_differ(a, b, step)
    counts = len(a.samples(step)), len(b.samples(step))
    one, two = read_once(a, step, counts[1]), read_once(b, step, counts[0])
    if one and equal(one, two):  # what differs is innocent, such as a shuffle of each rank's own share
        agree = value is not None and not (value and "input" in value[0] and value[2] == 1)
        innocent = ", loader)", *[", integers)", ", at the start)"] * agree  # or initial weights, which are equal
        draws = [site for site in draws if not site.endswith(innocent)]
    fact, said = "", f"\nrandom numbers that differ: {', '.join(draws[:3])}" * bool(draws)
    if value:
        kind, module, place = value
        before = {0: "", 1: ": look before the model", 2: ", though the outputs before it agree"}.get(place)
        fact = f"the {kind} of {module} differs{before if 'input' in kind else ''}"
        if place == SIZES:
            fact = (f"the {kind} of {module} has another size, so it was not compared; if it is padded to another "
                    "length, look for a layer that reads padding")
    given = [site for site in draws if ", module " not in site and "(torch." not in site]
    if given and given == draws and cause in ("random", "uneven-mean", "loss", "unknown"):
        cause, fact = "samples", fact or "the program draws other random numbers for this step"  # not in the model
    elif cause in ("uneven-mean", "loss", "unknown") and value and place != SIZES:
        cause = ("forward", "samples", "loss")[value[2] if "input" in value[0] else 0]
    elif cause == "samples" and not (value and are_inputs(a.states(step) + b.states(step))):
        fact = ""
    elif value == ():
        part = "loss" if cause in ("uneven-mean", "loss") else "backward pass"
        fact = f"the outputs of all modules agree, so the {part} differs"
    message = report["message"].removeprefix(UNSURE) if cause == "loss" and value == () else report["message"]
    changed = {"cause": cause, "message": f"{fact}: {remedy(cause)}{said}"} if cause != report["cause"] else {
        "message": message + f"\n{fact}" * bool(fact) + said}
    return {**report, **changed}


def first_value(a, b, step):
    """Return (kind, module, place) of the first input or output that differs in a step, () if none does, else None.

    Both runs must have recorded them. Two values are equal if their sums over ranks and micro-batches are equal, or if
    each rank has the whole value. Values whose widths or sizes differ are slices or padded, and are not compared.
    `place` is 0 inside a model, 1 for the first models, 2 for a model or loss that follows the output of another one,
    and SIZES if no value differs, but the size of a model's output does.
    """
    if min(a.length, b.length) <= step:
        return None
    left, right = ([sums(state["passed"], 4) for state in run.at(step)[0]] for run in (a, b))
    place, unlike, shared = 1, None, [key for key in left[0] if key in right[0]]
    for kind, name, outermost, width in shared:  # in the order of the forward pass
        shifted = "integers" in kind and place * outermost == 1  # an index into the batch depends on the split
        if not shifted and all_differ(left, right, (kind, name, outermost, width)):
            return kind, name, place * outermost
        place = 2 if outermost and "output" in kind else place
        if outermost and "output" in kind and not comparable(left, right, (kind, name, outermost, width)):
            unlike = kind, name, SIZES
    return unlike or (() if shared else None)


def draws_that_differ(a, b, step):
    """Return where the program of B, or else that of A, drew random numbers that the other one did not draw.

    A site is a line of the program, with the library and the module. Sites are compared by the sums of their numbers.
    """
    left, right = ([sums(state["sites"], 1) for state in run.at(step)[0]] for run in (a, b))
    for mine, others in ((right, left), (left, right)):
        found = [site for site in mine[0] if all(
            all_differ([{site: sites.get(other, [])} for sites in others], mine, site) for other in others[0])]
        if found:
            return [label for (label,) in found]
    return []


def all_differ(left, right, key):
    """Return whether a value differs: summed over all ranks, on rank 0, and between the sum and rank 0."""
    pairs = comparable(left, right, key)
    return bool(pairs or not key[1:]) and not any(equal(*pair) for pair in pairs)


def comparable(left, right, key):
    """Return the pairs of a value's sums over all ranks, or on rank 0, that have equal sizes."""
    ours, theirs = ([*map(sum, zip(*[sums[key] for sums in run if sums.get(key)]))] for run in (left, right))
    one, two = left[0].get(key, []), right[0].get(key, [])
    pairs = [(ours, theirs), (one, two), (ours, two), (one, theirs)]
    return [pair for pair in pairs if pair[0][:1] == pair[1][:1]]


def sums(items, length):
    """Return {the first `length` values of an item: the sums of its other values over all items}."""
    found = {}
    for item in items:
        key, numbers = tuple(item[:length]), item[length:]
        found[key] = [x + y for x, y in zip(found.get(key, [0] * len(numbers)), numbers)]
    return found
