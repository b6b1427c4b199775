"""The causes of a difference: rules, in the order in which they are tried, and a remedy for each cause.

A rule is a function of a Difference that returns the evidence for its cause, or a false value.
"""
import math
from collections import Counter
from fractions import Fraction
from functools import cached_property

from .records import apart, equal, gap, worst

REMEDIES = {
    "start": "set the same seed on every rank before you create the model, and wrap the model in DDP",
    "not-averaged": "call the DDP wrapper, not the model inside it; run the last micro-batch outside no_sync() "
                    "(pitfall P12)",
    "partial": "sum the gradients over these ranks before the step, as for norms between split layers and for "
               "copies of a tied weight",
    "rank-lr": "call scheduler.step() on every rank, with a metric that is reduced over all ranks (pitfall P15)",
    "set-epoch": "call sampler.set_epoch(epoch) at the start of every epoch (pitfall D1)",
    "scale": "average over ranks instead of summing; divide each micro-batch's loss by the number of micro-batches "
             "(pitfall P5)",
    "group-scale": "divide these gradients by the size of the group that sums them, such as the data-parallel or the "
                   "expert-parallel group",
    "no-gradient": "look for a detach(), a no_grad() or a collective without a backward pass, and for tensors of DDP "
                   "or the optimizer that do not belong to the model",
    "reset": "call zero_grad() only before the first micro-batch of a step, not before each one",
    "no-backward": "a collective in the loss, such as dist.all_reduce or dist.all_gather, has no backward pass: use a "
                   "differentiable one, or reduce only numbers that need no gradient; compute a ratio, such as Dice or "
                   "IoU, from sums over all ranks that pass gradients back",
    "learning-rate": "compare the learning rates, how they scale with the batch size, and the schedulers: when they "
                     "step, and how many steps they expect (pitfall D6)",
    "batch-size": "divide the batch size by the number of processes; compare drop_last and epochs (pitfall D6)",
    "samples": "give each rank its own share, as DistributedSampler does; compare seed, shuffle and drop_last; make "
               "random augmentation depend on (seed, epoch, index), not on num_workers or the worker; "
               "persistent_workers keep the dataset of the first epoch (pitfall D3)",
    "evaluation": "call model.eval() before an evaluation and model.train() after it (pitfall E1)",
    "batchnorm": "BatchNorm normalizes each process's share separately: use SyncBatchNorm, or accept the difference "
                 "and compare the rest with --eval-mode BatchNorm",
    "forward": "compare what this module computes on each rank: positions, masks, slices, gathered inputs",
    "uneven-mean": "divide the sum of the losses by the total count of all ranks and micro-batches, not each sum by "
                   "its own count; compute a ratio, such as Dice or IoU, from sums over all ranks that pass gradients "
                   "back",
    "optimizer": "compare the optimizers, their settings, and any other code that changes the weights or sends them to "
                 "other ranks",
    "rank-stops": "let all ranks decide from the same reduced value when to stop (pitfall P14)",
    "clip": "clip once per step, by the norm of the full gradient, after it is averaged and unscaled",
    "random": "compare the rest with --eval-mode Dropout, or set dropout to 0; make other draws depend on the sample, "
              "not on the rank (pitfall D3)",
    "buffers": "reduce or broadcast the model's buffers, and update averages of the weights on every rank",
    "metric": "unless a metric should cover only one process's samples, reduce sums and counts over all ranks, with "
              "each sample once, before you divide and print (pitfall D2)",
    "unknown": "no known pattern; compare what the two programs do in this step"}


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
        self.split = (len(self.left), self.left[0]["batches"]) != (len(self.right), self.right[0]["batches"])
        one, two = [sum(state["loss"] for state in states) for states in (self.left, self.right)]
        means = [one / len(self.left), two / len(self.right)]
        self.losses = next((pair for pair in ([one, means[1]], [means[0], two])  # ranks may have parts of one sum
                            if math.isclose(*pair)), means)
        self.flags = {flag for state in self.left + self.right for flag in state["flags"]}

    @cached_property
    def factor(self):
        """All gradients of B divided by those of A, or None if the quotients differ."""
        one, two = max(self.pairs, key=lambda pair: pair[0].grad[0])
        factor = two.grad[0] / (one.grad[0] or math.nan)
        bound = min(1e-6, 1e-3 * abs(factor - 1))
        if self.column == "grad" and factor > 0 and worst(multiply(self.pairs, factor), "grad")[0] < bound:
            return factor
        return None

    @cached_property
    def seen(self):
        return "equal samples" if self.ours and self.theirs else "the samples were not seen, so they may differ"

    def explain(self):
        """Return the likely cause, and the evidence for it."""
        for cause, rule in RULES:
            if evidence := rule(self):
                return evidence if isinstance(evidence, tuple) else (cause, evidence)
        raise AssertionError("the last rule always holds")


def read_once(run, step, count):
    """Return a step's samples, sorted. Count ranks with equal samples once if this leaves exactly `count` samples.

    In tensor and pipeline parallelism, each rank of a group reads all samples of the group.
    """
    states, _, samples = run.at(step)
    once = sorted(sum({str(state["samples"]): state["samples"] for state in states}.values(), []))
    return once if len(once) == count else samples


def multiply(pairs, factor):
    return [(one._replace(grad=[factor * value for value in one.grad]), two) for one, two in pairs]


def start(it):
    return it.column == "start" and f"{it.a.label} and {it.b.label} start with different weights"


def batch_size(it):
    if it.ours and it.theirs and len(it.ours) != len(it.theirs) and not it.factor:
        return f"the step reads {len(it.ours)} samples in {it.a.label}, {len(it.theirs)} in {it.b.label}"
    return None


def learning_rate(it):
    if it.column != "rate":
        return None
    one, two = next(pair for pair in it.pairs if pair[0].rate != pair[1].rate)
    ratio, since = two.rate[0] / (one.rate[0] or math.nan), "" if it.step == 0 else ", after equal earlier rates"
    later = [pair for step in range(it.step, min(it.a.length, it.b.length))
             for pair in zip(it.a.at(step)[0][0]["rows"], it.b.at(step)[0][0]["rows"]) if pair[0].name == one.name]
    if later and all(math.isclose(y.rate[0], ratio * x.rate[0], rel_tol=1e-6) for x, y in later):
        since += f", {ratio:.6g} times as high in all {len(later)} steps from here on"
    slow, fast = [[row.rate[0] / max(one.rate + two.rate) for state in next(iter(run.ranks.values()))
                   for row in state["rows"] if row.name == one.name] for run in (it.a, it.b)]
    paces = [(pace, run.label) for pace in range(2, 9) for run, long, short in ((it.b, slow, fast), (it.a, fast, slow))
             if len({*short}) > 2 and len(long) > 2 * pace and equal(short[:len(long[::pace])], long[::pace])]
    since += f"; the schedule of {paces[0][1]} runs {paces[0][0]} times as fast" if paces else ""
    return f"the rate is {one.rate[0]:g} in {it.a.label} and {two.rate[0]:g} in {it.b.label}{since}"


def optimizer(it):
    if it.column != "value":
        return None
    one, two = ({*states[0]["settings"]} for states in (it.left, it.right))
    lines = sorted(line.strip() for line in one ^ two if "lr:" not in line)
    return f"equal gradients, but different updates{': ' * bool(lines)}{', '.join(lines)}"


def evaluation(it):
    resting = [max(state["resting"] for state in states) for states in (it.left, it.right)]
    if resting[0] != resting[1]:
        return f"{resting[0]} layers of {it.a.label} are in evaluation mode, {resting[1]} of {it.b.label}"
    return None


def clip(it):
    plain = it.factor and Fraction(it.factor).limit_denominator(16)
    if it.factor and (plain == 1 or abs(it.factor - plain) > 1e-6) and math.isclose(*it.losses):
        return f"all gradients of {it.b.label} are {it.factor:.9g} times those of {it.a.label}, after equal losses"
    norms = [states[0]["clips"][0][0] if states[0]["clips"] else 0 for states in (it.left, it.right)]
    whole = it.factor and min(abs(max(it.factor, 1 / it.factor) - n) for n in range(2, 65)) < 1e-4
    return (not whole or math.isclose(*norms, rel_tol=1e-6)) and clipped(it.a, it.b, it.left, it.right)


def clipped(a, b, left, right):
    """Return how clipping differs between the ranks or the runs, or None."""
    left, right = [state["clips"] for state in left], [state["clips"] for state in right]
    if len(left[0]) != len(right[0]):
        return f"{a.label} clips {len(left[0])} time(s) in this step, {b.label} {len(right[0])}"
    for one, two in [*zip(left[0], left[-1]), *zip(right[0], right[-1])]:
        if not math.isclose(one[0], two[0], rel_tol=1e-6):
            return f"two ranks clip different norms, {one[0]:.4g} and {two[0]:.4g}"
    for one, two in zip(left[0], right[0]):
        scaled = max(one[0], two[0]) > 100 * min(one[0], two[0])
        if one[1] != two[1] or scaled:
            return (f"{a.label} clips a norm of {one[0]:.4g} to {one[1]:g}, {b.label} {two[0]:.4g} to {two[1]:g}"
                    + ", which is still scaled (pitfall P6)" * scaled)
    return None


def scale(it):
    if not it.factor:
        return None
    norms = [states[0]["clips"][0][0] if states[0]["clips"] else 0 for states in (it.left, it.right)]
    factor = norms[1] / norms[0] if all(norms) else it.factor
    layout = f"{len(it.right)} rank(s) and {it.right[0]['batches']} micro-batch(es)"
    return f"the gradients of {it.b.label} are {factor:.6g} times those of {it.a.label}; {it.b.label} has {layout}"


def no_gradient(it):
    """Some gradients are zero in one run only."""
    if it.column != "grad" or it.factor:
        return None
    for run, number in ((it.b, 1), (it.a, 0)):
        without = [pair[0].name for pair in it.pairs if not pair[number].grad[0] and pair[1 - number].grad[0]]
        if without:
            return f"{len(without)} parameter(s) get no gradient in {run.label}, such as {without[0]}"
    return None


def group_scale(it):
    """Some gradients differ by one common factor, and the others are equal."""
    if it.column != "grad" or it.factor:
        return None
    moved = [pair for pair in it.pairs if worst([pair], "grad")[0] > 1e-6]
    factor = moved[0][1].grad[0] / (moved[0][0].grad[0] or math.nan) if moved else 0
    if 0 < len(moved) < len(it.pairs) and factor > 0 and worst(multiply(moved, factor), "grad")[0] < 1e-6:
        return (f"{len(moved)} of {len(it.pairs)} gradients of {it.b.label} are {factor:.6g} times those of "
                f"{it.a.label}, such as that of {moved[0][0].name}; the others are equal")
    return None


def set_epoch(it):
    if not it.ours or not it.theirs or equal(it.ours, it.theirs):
        return None
    for run, mine, other in ((it.b, it.theirs, it.a), (it.a, it.ours, it.b)):
        for again in {*range(min(it.a.length, it.b.length))} - {it.step}:
            if equal(read_once(run, again, len(mine)), mine) and \
                    not equal(other.at(again)[2], other.at(it.step)[2]):
                fact = f"{run.label} reads the same samples in steps {it.step + 1} and {again + 1}"
                one, two = sampler(run), sampler(other)
                if one != two and "set_epoch" in two:  # as when Lightning replaces a sampler that does not shuffle
                    fact += f" ({one}), {other.label} shuffles ({two})"
                return fact if "set_epoch" in one else ("samples", fact)
    return None


def sampler(run):
    return next((event["sampler"] for events in run.events.values() for event in events if event["event"] == "epoch"),
                "")


def samples(it):
    if not it.ours or not it.theirs or equal(it.ours, it.theirs):
        return None
    if any(equal(sorted(states[0]["samples"]), sorted(state["samples"])) for states, mine in (
            (it.left, it.ours), (it.right, it.theirs)) for state in states[1:] if len(state["samples"]) < len(mine)):
        return "every rank reads the same samples"
    steps = range(min(it.a.length, it.b.length))
    one, two = [Counter(f"{value:.6g}" for step in steps for value in run.at(step)[2]) for run in (it.a, it.b)]
    labels = [[sorted(label for state in run.at(step)[0] for label in state["labels"]) for step in steps]
              for run in (it.a, it.b)]
    common = len({f"{value:.6g}" for value in it.ours} & {f"{value:.6g}" for value in it.theirs})
    fact = f"{common} of the step's {len(it.ours)} samples are in both runs"
    if one == two:
        return f"{fact}; all steps together read the same samples, in a different order"
    if any(map(any, labels[0])) and all(map(equal, *labels)):
        return f"{fact}; the labels agree in all steps, so the same samples have different values"
    return fact + ", and the other steps have none in common: the values may differ, too" * (not one & two)


def no_backward(it):
    """The losses are equal, but the gradients differ: a collective passes back a wrong gradient, or none."""
    if it.ours and it.theirs and len(it.left) != len(it.right) and math.isclose(*it.losses, rel_tol=1e-9):
        return f"equal samples and equal mean losses, {it.losses[0]:.9g}, but different gradients"
    return None


def old_weight(it):
    """A rank computes with the old value of a weight that the optimizer of another rank has since changed."""
    for run, states in ((it.a, it.left), (it.b, it.right)):
        new = {f"weight {row.name}": row.value for row in run.at(it.step - 1)[1]} if it.step else {}
        for rank, state in zip(run.ranks, states):
            for name, _, digest in state["unoptimized"]:
                if name in new and gap(digest, new[name]) > 1e-6:
                    return f"rank {rank} of {run.label} uses a different {name} than the rank that updated it"
    return None


def buffers(it):
    """A buffer, or another tensor that the model holds, differs, so the losses differ, too."""
    for run, states in ((it.a, it.left), (it.b, it.right)):
        for rank, state in zip(run.ranks, states):
            found = apart(it.left[0]["unoptimized"], state["unoptimized"], 1e-6, ("buffer", "average", "other"))
            if found and not math.isclose(*it.losses):
                return f"{found[0]} on rank {rank} of {run.label} differs from that on rank 0 of {it.a.label}"
    return None


def forward(it):
    """All ranks compute with the whole batch, and they have equal losses or parts of the model."""
    for run, states in ((it.a, it.left), (it.b, it.right)):
        alone = all(equal(state["samples"], states[0]["samples"]) for state in states)
        losses = [state["loss"] for state in states]
        whole = run.cut == len(losses) or math.isclose(min(losses), max(losses))
        if len(losses) > 1 and alone and whole and not math.isclose(*it.losses):
            return f"each rank of {run.label} computes the whole loss; {mean_losses(it)}"
    return None


def uneven_mean(it):
    ratio = max(map(abs, it.losses)) / (min(map(abs, it.losses)) or 1e-300)
    if it.split and not math.isclose(*it.losses, rel_tol=1e-9) and ratio < 100:  # a larger ratio means a scaled loss
        return mean_losses(it)
    return None


def mean_losses(it):
    return f"{it.seen}; mean loss {it.losses[0]:.9g} in {it.a.label}, {it.losses[1]:.9g} in {it.b.label}"


RULES = [
    ("start", start), ("batch-size", batch_size), ("learning-rate", learning_rate), ("optimizer", optimizer),
    ("evaluation", evaluation), ("optimizer", old_weight), ("clip", clip), ("scale", scale),
    ("no-gradient", no_gradient), ("group-scale", group_scale), ("set-epoch", set_epoch), ("samples", samples),
    ("reset", lambda it: "reset" in it.b.flags ^ it.a.flags and "gradients are zero before a later micro-batch"),
    ("batchnorm", lambda it: it.split and "batchnorm" in it.flags and mean_losses(it)), ("no-backward", no_backward),
    ("buffers", buffers), ("random", lambda it: "random" in it.flags and mean_losses(it)), ("forward", forward),
    ("uneven-mean", uneven_mean), ("evaluation", lambda it: "evaluated" in it.flags and mean_losses(it)),
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
                return cause, f"ranks 0 and {rank} of {run.label} have different {what}", step, name, difference
    return None


def unmatched(rows, others, pairs):
    """Return the cause and the evidence if only `pairs` of the tensors of two runs match."""
    for side, held in enumerate((rows, others)):
        matched = [pair[side] for pair in pairs]
        for row in (row for row in held if not any(row is other for other in matched)):
            twin = [pair for pair in pairs if pair[side].shape == row.shape and equal(pair[side].start, row.start)]
            if twin:  # such as an embedding that two stages of a pipeline share
                sums = [x + y for x, y in zip(twin[0][side].grad, row.grad)]
                cause = "partial" if equal(sums[1:], twin[0][1 - side].grad[1:]) else "not-averaged"
                cause = "clip" if proportional([(twin[0][side], row)] * 2) else cause
                return cause, f"two copies of {row.name} in {'AB'[side]} have different gradients"
    return "unknown", f"A trains {len(rows)} tensors and B {len(others)}, of which {len(pairs)} match"


def replicas(pairs, others):
    """Return the `pairs` (one row from each of two ranks) whose rows are copies of the same tensor.

    Return all pairs if `others`, the rows of the other run, lack one of the tensors. Pipeline stages, and ranks with
    different experts, have different tensors of the model.
    """
    counts = [sum(two.shape == row.shape and equal(two.start, row.start) for row in others) for _, two in pairs]
    if not all(counts):
        return pairs
    return [pair for pair, count in zip(pairs, counts) if equal(pair[0].start, pair[1].start) and count == 1]


def parts_of(states, rows):
    """Return whether the ranks have different gradients that add up to the other run's gradient, in `rows`."""
    if len(rows) != len(states[0]["rows"]):
        rows = [next((row for row in rows if row[:2] == own[:2]), own) for own in states[0]["rows"]]
    found, groups = [], [*zip(rows, *[state["rows"] for state in states])]
    noise = 1e-6 * max(part.grad[0] for _, *parts in groups for part in parts)
    moved = [any(gap(parts[0].grad, part.grad, noise) > 1e-6 for part in parts) for _, *parts in groups]
    _, factor = max(((parts[0].grad[0], parts[0].grad[0] / (whole.grad[0] or math.nan))  # by which clipping scales
                     for (whole, *parts), differs in zip(groups, moved) if not differs and parts[0].grad[0] > noise),
                    default=(0, 1))
    for (whole, *parts), differs in zip(groups, moved):
        if differs:
            sums = [sum(part.grad[k] for part in parts) for k in (1, 2)]
            found.append(equal(sums, whole.grad[1:]) or equal(sums, [factor * value for value in whole.grad[1:]]))
    return any(found)


def proportional(pairs):
    """Return whether several gradients, not just one, differ by one common factor."""
    factor = pairs[0][1].grad[0] / (pairs[0][0].grad[0] or math.nan)
    return len(pairs) > 1 and worst(multiply(pairs, factor), "grad")[0] < 1e-6


def first_module(a, b, step):
    """Return the first module whose outputs differ in a step, "" if none differs, or None if this is not known.

    Both runs must have recorded the outputs. Outputs are equal if their sums over ranks and micro-batches are equal, or
    if each rank has all outputs. Outputs whose widths differ between the runs are slices, and are not compared.
    """
    if min(a.length, b.length) <= step:
        return None
    left, right = ([state["outputs"] for state in run.at(step)[0]] for run in (a, b))
    ours, theirs = sums(left), sums(right)
    alone = [sums([outputs]) for outputs in (left[0], right[0])]
    shared = [name for name in alone[0] if name in theirs]  # in the order of the forward pass
    for name in shared:
        pairs = [(ours[name], theirs[name]), (alone[0][name], alone[1].get(name, [])),
                 (ours[name], alone[1].get(name, []))]
        pairs = [pair for pair in pairs if pair[0][:1] == pair[1][:1]]  # different sizes mean different padding
        if pairs and not any(equal(*pair) for pair in pairs):
            return name[0]
    return "" if shared else None


def sums(outputs):
    """Return {(module, width): the three numbers of its outputs, each summed over ranks and micro-batches}."""
    found = {}
    for name, width, *numbers in (item for items in outputs for item in items):
        key = (name, *width)
        found[key] = [x + y for x, y in zip(found.get(key, [0, 0, 0]), numbers)]
    return found
