"""The causes of a difference: rules, in the order in which they are tried, and a remedy for each cause.

A rule is a function of a Difference that returns the evidence for its cause, or a false value.
"""
import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

from .difference import are_inputs, common_factor, loss_of, picked, read_once
from .records import ELSEWHERE, EQUAL, NOISE, UNNAMED, WEIGHT, Starts, apart, equal, gap, load, worst

CAUSES = json.loads(Path(__file__).with_name("causes.json").read_text())  # the remedy, the pitfall, the block to copy
UNSURE = "not sure: "  # precedes the evidence of a rule that only excludes other causes
UNSEEN = "the samples were not seen, so they may differ"


def remedy(cause):
    pitfall = CAUSES[cause]["pitfall"]
    return CAUSES[cause]["remedy"] + f" (pitfall {pitfall})" * bool(pitfall)


def start(diff):
    """The weights differ before the first step. If matrices agree, the seeds do, too: biases may all start at zero."""
    if diff.column == "start":
        unlike, alike = ([one for one, two in diff.pairs if equal(one.start, two.start) == same]
                         for same in (False, True))
        fact = "A and B start with different weights"
        if any(len(row.shape) > 1 and row.start[0] for row in alike):
            fact += (f" only in {some(unlike, diff.pairs)}, so the seeds agree: look for what else sets these, such as "
                     "an initialization from the data of one rank. Otherwise")
        return fact


def batch_size(diff):
    one, two = len(diff.a.samples), len(diff.b.samples)
    if one and two and one != two and not diff.factor:
        return f"the step reads {one} samples{diff.loaders} in A, {two} in B"


def learning_rate(diff):
    if diff.column != "rate":
        return None
    differ = [pair for pair in diff.pairs if pair[0].rate != pair[1].rate]
    one, two = differ[0]
    which = some([row for row, _ in differ], diff.pairs)
    for number, side in enumerate(diff.sides):
        found = {str(pair[number][:4]) for pair in differ}
        ranks = [str(rank) for rank, state in zip(side.run.ranks, side.states)
                 if found & {str(row[:4]) for row in state["rows"]}]
        if len(ranks) < len(side.states):  # such as the stage of a pipeline
            which += f", all on rank(s) {', '.join(ranks)} of {side.label},"
    fact = f"the rate of {which} is {one.rate[0]:g} in A and {two.rate[0]:g} in B"
    for side in diff.sides if diff.step else ():
        before, now = ([{row.rate[0] for row in state["rows"]} for state in side.run.at(step)[0]]
                       for step in (diff.step - 1, diff.step))
        if all(rates == before[0] for rates in before) and any(rates != now[0] for rates in now):
            return "rank-lr", f"{fact}; the ranks of {side.label} had equal rates before"
    fact += ", after equal earlier rates" if diff.step else ""
    rates = [[row.rate[0] for step in diff.steps for row in side.run.at(step)[0][0]["rows"] if row.name == one.name]
             for side in diff.sides]
    ratio, later = two.rate[0] / (one.rate[0] or math.nan), [*zip(*[found[diff.step:] for found in rates])]
    if later and all(math.isclose(y, ratio * x, rel_tol=EQUAL) for x, y in later):
        fact += f", {ratio:.6g} times as high in all {len(later)} steps from here on"
    slow, fast = [[rate / max(one.rate + two.rate) for rate in found] for found in rates]
    for pace in range(2, 9):
        for label, short, long in (("B", fast, slow), ("A", slow, fast)):
            often = long[::pace]
            if len({*often}) > 2 and len(long) > 2 * pace and equal(short[:len(often)], often):
                return f"{fact}; the schedule of {label} runs {pace} times as fast"
    return fact


def optimizer(diff):
    if diff.column == "value" and not diff.flat:
        options = options_that_differ(diff.pairs, "A", "B")
        return f"equal gradients, but different updates{': ' * bool(options)}{options}{unchanged(diff)}"


def none_or_zero(diff):
    """Gradients are None in one run, where the optimizer passes over them, and zeros in the other."""
    if diff.column != "value":
        return None
    least = 1e-3 * worst(diff.pairs, "value")[0]  # smaller differences are rounding errors
    differ = [pair for pair in diff.pairs if gap(pair[0].value, pair[1].value) > least]
    for label, other, number in (("A", "B", 0), ("B", "A", 1)):
        if all(pair[number].reach == 0 != pair[1 - number].reach for pair in differ):
            return (f"grad is None in {label} and zero in {other} for {some([row for row, _ in differ], diff.pairs)}: "
                    "the optimizer passes over None, but decays weights with a gradient of zero, or moves them by "
                    "their momentum; leave it None if it is None on all ranks")


def unchanged(diff):
    """Return text that says how many parameters only one of the runs has not changed since its start."""
    for label, side, other in (("B", 1, 0), ("A", 0, 1)):
        kept = [pair[side].name for pair in diff.pairs if pair[side].value == pair[side].start
                and pair[other].value != pair[other].start]
        if kept:
            return f"; {label} has never changed {len(kept)} of {len(diff.pairs)}, such as {kept[0]}"
    return ""


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
    one, two = (max(state["resting"] for state in side.states) for side in diff.sides)
    if one != two:
        return f"{one} layers of A are in evaluation mode, {two} of B"


def old_weight(diff):
    """A rank computes with the old value of a weight that the optimizer of another rank has since changed."""
    for side in diff.sides:
        new = {f"{WEIGHT}{row.name}": row.value for row in side.run.at(diff.step - 1)[1]} if diff.step else {}
        for rank, state in zip(side.run.ranks, side.states):
            for name, _, digest in state["unoptimized"]:
                if name in new and gap(digest, new[name]) > EQUAL:
                    return f"rank {rank} of {side.label} uses a different {name} than the rank that updated it"


def stale(diff):
    """In one run only, gradients are not zero before the first backward pass of the step.

    Those of flat shards are set by hand, so none is added to them, but one may be added to those of the modules.
    """
    left, right = ({of for state in side.states for of in state["stale"] if ELSEWHERE in of or not diff.flat}
                   for side in diff.sides)
    if bool(left) != bool(right):
        label = "B" if right else "A"
        return f"before the step's first backward pass, {label} still has gradients {min(left | right)}"


def kept(diff):
    """The gradients of one run are those of the other plus its own of the step before, as in an accumulator by hand."""
    for number, (side, reference) in ((1, diff.orders[0]), (0, diff.orders[1])):
        if not diff.step or diff.column != "grad":
            return None
        states, rows, _ = side.run.at(diff.step - 1)
        before = {str(row[:3]): row.grad for row in rows}
        now, theirs, then = (clipped(state) for state in (side.states[0], reference.states[0], states[0]))
        sums = []  # (the gradient, the sum of the other run's and the one before), without clipping
        for pair in diff.pairs:
            mine, other = pair[number].grad, pair[1 - number].grad
            last = before.get(str(pair[number][:3]))
            if not last:
                return None  # another optimizer has made that step
            sums.append((mine, [mine[0], *[now * (other[k] / theirs + last[k] / then) for k in (1, 2)]]))
        if any(mine[0] for mine, _ in sums) and all(gap(mine, whole) < EQUAL for mine, whole in sums):
            return f"the gradients of {side.label} are the other run's plus those of the step before, which were kept"


def other_passes(diff):
    """One run also calls backward() for other losses, such as that of an attack on the inputs, before its own loss.

    The last passes of each group are those of its own loss: their mean is the other run's mean loss.
    """
    for side, other in diff.orders if not diff.factor else ():
        ranks = [state["losses"] for state in side.states]
        count, resets = len(ranks[0]), any("reset" in state["flags"] for state in side.states)
        if resets or any(len(losses) != count for losses in ranks):
            continue  # it sets the gradients of the other passes to zero, or the passes cannot be grouped
        groups = [(size, own) for size in range(2, count + 1) if count % size == 0 for own in range(1, size)]
        for size, own in groups:
            loss = sum(losses[number] for losses in ranks for number in range(count) if number % size >= size - own)
            if loss and math.isclose(loss / len(ranks), other.mean, rel_tol=EQUAL):
                fact = (f"{size - own} of {size} backward passes of {side.label} are of other losses: without them, "
                        f"its mean loss is that of {other.label}, {other.mean:.9g}")
                return ("loss", fact) if side is diff.a else f"{fact}, but it keeps their gradients"


def clipped(state):
    """Return the factor by which clip_grad_norm_ has scaled the gradients of a step."""
    return math.prod(min(1, bound / (norm + 1e-6)) for norm, bound in state["clips"])


def reached(diff):
    """In one run only, a backward pass also reaches the parameters of another optimizer, as without `toggle`."""
    passes = [[{*sum(found, [])} for found in zip(*[state.get("reached", ()) for state in side.states])]
              for side in diff.sides]
    for number, pair in enumerate(zip(*passes) if len(passes[0]) == len(passes[1]) else (), 1):
        for side, less, more in ((diff.b, *pair), (diff.a, *pair[::-1])):
            if less and less < more:
                found = ", ".join(str(optimizer + 1) for optimizer in sorted(more - less))
                return (f"backward pass {number} of the step also reaches parameters of the optimizer that is "
                        f"created as number {found} in {side.label}, and leaves gradients there")


def unreduced(diff):
    """In one run only, the last backward pass of the step changes no gradient: FSDP2 has not reduced it."""
    left, right = (any("unreduced" in state["flags"] for state in side.states) for side in diff.sides)
    if left != right:
        return f"the last backward pass of the step changes no gradient in {'B' if right else 'A'}"


def clip(diff):
    same_norm = math.isclose(diff.a.norm, diff.b.norm, rel_tol=EQUAL)
    if diff.factor:
        factor = before_clipping(diff)
        plain = Fraction(factor).limit_denominator(16)
        if diff.same_loss and (plain == 1 or abs(factor - plain) > EQUAL):
            by_hand = not any(state["clips"] for state in diff.states)
            return f"{UNSURE * by_hand}{times(diff.factor)}" + ", after equal losses" * diff.known
        if not same_norm and min(abs(max(factor, 1 / factor) - n) for n in range(2, 65)) < 1e-4:
            return None  # a whole factor, which scales the norms, too
    left, right = ([state["clips"] for state in side.states] for side in diff.sides)
    by_value = any(not norm for norm, _ in left[0] + right[0])
    if len(left[0]) != len(right[0]) and (left[0] and right[0] or by_value or diff.factor):  # else, one clips by hand
        return f"A clips {len(left[0])} time(s) in this step, B {len(right[0])}"
    for (one, _), (two, _) in [*zip(left[0], left[-1]), *zip(right[0], right[-1])]:
        if not math.isclose(one, two, rel_tol=EQUAL):
            return f"two ranks clip different norms, {one:.4g} and {two:.4g}"
    for (one, bound), (two, other) in zip(left[0], right[0]):
        scaled = max(one, two) > 100 * min(one, two) > 0 and (one > bound or two > other)  # 0: no gradient at all
        if bound != other or scaled:
            fact = f"A clips a norm of {one:.4g} to {bound:g}, B {two:.4g} to {other:g}"
            return fact + ", which is still scaled (pitfall P6)" * scaled


def scale(diff):
    if not diff.factor:
        return None
    factor = before_clipping(diff)
    less = (factor < 1) == (diff.parallel is diff.b)  # the run with more ranks or micro-batches has the lower gradients
    losses, (ranks, micro_batches) = [*map(loss_of, diff.states)], diff.b.layout
    whole = len(diff.parallel.states) > 1 and all(math.isclose(loss, losses[0]) for loss in losses)
    if less and whole and lost(diff):  # the loss of the whole batch, from gathered values
        return "no-backward", f"{times(factor)}, though each rank has the whole loss, {losses[0]:.9g}{lost(diff)}"
    why = ", after equal losses: a sum is divided twice, or a part of the gradient is lost" + lost(diff)
    why *= less and diff.known and math.isclose(diff.a.mean, diff.b.mean)
    return f"{times(factor)}{why}; B has {ranks} rank(s) and {micro_batches} micro-batch(es)"


def before_clipping(diff):
    """Return the factor between the norms that both runs clip or, if one does not clip, between their gradients."""
    return diff.b.norm / diff.a.norm if diff.a.norm and diff.b.norm else diff.factor


def times(factor):
    return f"the gradients of B are {factor:.9g} times those of A"


def lost(diff):
    """Return which collectives without a backward pass were given a tensor that needs a gradient."""
    found = sorted({place for state in diff.states for place in state["lost"]})
    return f"; no gradient passes through {', '.join(found)}" if found else ""


def no_gradient(diff):
    """Some gradients are zero in one run only. A gradient at the level of rounding errors counts as zero, too."""
    noise = NOISE * math.hypot(*[max(one.grad[0], two.grad[0]) for one, two in diff.pairs])
    for label, number in (("B", 1), ("A", 0)):
        without = [pair[number] for pair in diff.pairs if not pair[number].grad[0] and pair[1 - number].grad[0] > noise]
        how = [("grad is None", "autograd does not reach it", "autograd computes zero")[row.reach] for row in without]
        follows = {*how} == {"autograd computes zero"} and not diff.same_loss and not lost(diff)  # from another loss
        if without and not follows:
            fact = f"{len(without)} parameter(s) get no gradient in {label}, such as {without[0].name}: {how[0]}"
            if all(row.name == UNNAMED for row in without):
                fact += (", and no module has them: create the optimizer from the model's parameters, after the model "
                         "is wrapped, moved and cast")
            return fact + lost(diff)


def group_scale(diff):
    """Some gradients differ by one common factor, and the others are equal or differ by another one, as by a clip."""
    noise = NOISE * math.hypot(*[max(one.grad[0], two.grad[0]) for one, two in diff.pairs])
    groups = {}  # {factor: the pairs}
    for pair in (pair for pair in diff.pairs if max(row.grad[0] for row in pair) > noise):
        factor, deviation = common_factor([pair])
        if not factor > 0 or deviation > EQUAL:
            return None
        same = next((known for known in groups if math.isclose(known, factor, rel_tol=EQUAL)), factor)
        groups.setdefault(same, []).append(pair)
    if len(groups) == 2:
        (factor, moved), (others, _) = sorted(groups.items(), key=lambda group: (
            math.isclose(group[0], 1, rel_tol=EQUAL), len(group[1])))
        common = "" if math.isclose(others, 1, rel_tol=EQUAL) else f", up to a common factor {others:.6g}, as of a clip"
        return (f"{len(moved)} of {len(diff.pairs)} gradients of B are {factor / others:.6g} times those of A, such as "
                f"that of {moved[0][0].name}; the others are equal{common}")


def computed_inputs(diff):
    """The samples are inputs of models, which the program may compute with a buffer, such as running statistics."""
    if equal(diff.a.samples, diff.b.samples) or "batchnorm" in diff.flags or not are_inputs(diff.states):
        return None
    if found := apart(diff.a.states[0]["unoptimized"], diff.b.states[0]["unoptimized"], EQUAL, ("buffer",)):
        ranks = where(found[0], diff.a.states, diff.b.states)
        return f"{UNSURE}the inputs of the model differ, and so does {found[0]}{ranks}"


def set_epoch(diff):
    def repeats(run, again):
        indices = picked(run, diff.step)  # augmentation changes the samples of an index
        once = read_once(run, diff.step, len(diff.a.samples)), read_once(run, again, len(diff.a.samples))
        return equal(*once) and any(once[0]) or bool(indices) and indices == picked(run, again)

    for side, other in diff.orders if diff.other_samples else ():
        for again in {*diff.steps} - {diff.step}:
            if repeats(side.run, again) and not repeats(other.run, again):
                fact = f"{side.label} reads the same samples{diff.loaders} in steps {diff.step + 1} and {again + 1}"
                one, two = (next((event["sampler"] for events in found.run.events.values() for event in events
                                  if event["event"] == "epoch"), "") for found in (side, other))
                if one != two and "set_epoch" in two:  # as when Lightning replaces a sampler that does not shuffle
                    fact += f" ({one}), {other.label} shuffles ({two})"
                return fact if "set_epoch" in one else ("samples", fact)
        for rank, again in rank_repeats(side.run, diff.step):
            if not any(rank_repeats(other.run, diff.step)):
                return f"rank {rank} of {side.label} reads the same samples in steps {diff.step + 1} and {again + 1}"


def rank_repeats(run, step):
    """Yield (rank, earlier step) if, from a step on, a rank whose sampler has set_epoch reads earlier samples again."""
    for rank in run.ranks:
        sampler = next((event["sampler"] for event in run.events[rank] if event["event"] == "epoch"), "")
        for again in range(step) if "set_epoch" in sampler else ():
            count = min(step - again, run.length - step)
            for field in ("samples", "indices"):  # augmentation changes the samples of an index
                pairs = [[sorted(run.ranks[rank][number + k][field]) for number in (step, again)] for k in range(count)]
                if all(equal(*pair) for pair in pairs) and sum(len(one) for one, _ in pairs) > 2:
                    yield rank, again


def samples(diff):
    if not diff.other_samples:
        return None
    for side in diff.sides:
        first, *others = [sorted(state["samples"]) for state in side.states]
        if any(len(found) < len(side.samples) and equal(first, found) for found in others):
            return "every rank reads the same samples"
    ours, theirs = ({f"{value:.6g}" for value in side.samples} for side in diff.sides)
    kind = "inputs of models" if are_inputs(diff.states) else "samples"
    fact = f"{len(ours & theirs)} of the step's {len(diff.a.samples)} {kind}{diff.loaders} are in both runs"
    one, two = (Counter(f"{value:.6g}" for step in diff.steps for value in side.run.samples(step))
                for side in diff.sides)
    if one == two:
        return f"{fact}; all steps together read the same samples, in a different order"
    if sum(picked(diff.a.run, diff.step)) and picked(diff.a.run, diff.step) == picked(diff.b.run, diff.step):
        fact += f", after {diff.step} step(s) with equal ones" * bool(diff.step)
        if ours & theirs:  # they may be places in two subsets
            return f"{fact}; the indices agree, so the datasets differ, or only some samples have different values"
        return f"{fact}; the indices agree, so the same samples have different values"
    labels = [[sorted(label for state in side.run.states(step) for label in state["labels"]) for step in diff.steps]
              for side in diff.sides]
    if any(map(any, labels[0])) and all(map(equal, *labels)):
        return f"{fact}; the labels agree in all steps, so the same samples have different values"
    return fact + ", and the other steps have none in common: the values may differ, too" * (not one & two)


def reset(diff):
    """In one run only, gradients are zero before a later micro-batch, but were not in earlier steps, which agree.

    If they were, the program adds them up by hand. If the losses differ, the pass before may be that of another loss.
    """
    runs = diff.a.run, diff.b.run
    if any("reset" in state["flags"] for run in runs for step in range(diff.step) for state in run.states(step)):
        return None
    left, right = ("reset" in run.flags for run in runs)
    if right and not left:
        return f"{UNSURE * (not diff.same_loss)}gradients are zero before a later micro-batch"
    if left and not right and len({len(state["losses"]) for state in diff.states}) == 1:
        return "stale", "A sets gradients to zero between the backward passes of a step, but B does not"


def no_graph(diff):
    """In one run only, gradients that enter the loss are constants.

    If the gradients of all ranks add up to those of the other run, the ranks may share them, as for a population. Then
    each of their models' inputs has as many as in the other run.
    """
    counts = [[state["graphs"] for state in side.states] for side in diff.sides]
    each = [[state["graphs"] * max(len(state["losses"]), 1) / max(len(state["batches"]), 1) for state in side.states]
            for side in diff.sides]
    (one, two), shared = map(max, counts), sum(counts[0]) == sum(counts[1])
    if one != two and not (shared and max(each[0]) == max(each[1])):
        return (f"{UNSURE * shared}for each backward pass, A computes {one:g} gradient(s) with create_graph=True, B "
                f"{two:g}: the others are constants in the loss")


def mixed(diff):
    """On two ranks, different tensors have equal gradients."""
    for side in diff.sides if not diff.flat else ():
        first, *others = side.states
        for rank, state in zip([*side.run.ranks][1:], others):
            for one, two in zip(first["rows"], state["rows"]):
                unlike = one.shape == two.shape and gap(one.start, two.start) > EQUAL
                if unlike and one.grad[0] > 0 and gap(one.grad, two.grad) < EQUAL:
                    return (f"ranks 0 and {rank} of {side.label} have equal gradients for different tensors, "
                            f"{one.name} and {two.name}: a collective adds up gradients of different tensors")
            for one, two in zip(first.get("parts", ()), state.get("parts", ())):
                unlike = one.shape == two.shape and gap(one.start, two.start) > EQUAL
                if unlike and one.grad[0] > 0 and math.isclose(one.grad[0], two.grad[0], rel_tol=EQUAL):
                    return (f"ranks 0 and {rank} of {side.label} have gradients of equal size for different parts of "
                            f"{one.name}: a collective adds up gradients of different parts")


def clip_of_shards(diff):
    """The gradients of all ranks' flat shards have another norm than that to which the other run clips its own."""
    for side, other in diff.orders if diff.same_loss else ():
        if side.run.flat and not other.run.flat and clipped(other.states[0]) < 1:
            shards = {str(row[:5]): row.grad[0] for state in side.run.states(diff.step) for row in load(state)["rows"]}
            norm, bound = math.hypot(*shards.values()), other.states[0]["clips"][-1][1]
            if not math.isclose(norm, bound, rel_tol=1e-4):  # clip_grad_norm_ adds 1e-6 to a norm
                return (f"{other.label} clips the norm of its gradients to {bound:g}, but those of the flat shards of "
                        f"{side.label} have together the norm {norm:.6g}")


def flat(diff):
    """The optimizer of a run holds tensors that no module has, such as flat shards, so gradients are not compared."""
    if diff.flat and diff.same_loss:
        options = [{option for state in side.run.states(diff.step) for row in load(state)["rows"]
                    for option in row.options.items() if option[0] != "group"} for side in diff.sides]
        unlike = ", ".join(f"{name} {value}" for name, value in sorted(options[0] ^ options[1]))
        moved = some([one for one, two in diff.pairs if gap(one.value, two.value) > EQUAL], diff.pairs)
        return (f"{UNSURE * (not unlike)}equal losses, but different values of {moved} after the step{unchanged(diff)}"
                + f"; only one run has the option(s) {unlike}" * bool(unlike)
                + "; an optimizer holds tensors that no module has, so no gradients were compared: "
                "these may be averaged or clipped differently" * (not unlike))


def no_backward(diff):
    """The losses are equal, but the gradients differ: a collective passes back a wrong gradient, or none."""
    if diff.same_loss and any(diff.losses) and len(diff.a.states) != len(diff.b.states):
        for side in diff.sides:
            losses = [loss_of(state) for state in side.states if state["losses"]]
            alike = all(equal(state["samples"], side.states[0]["samples"]) for state in side.states)
            if side.run.cut == len(losses) > 1 and alike and diff.seen and not math.isclose(min(losses), max(losses)):
                return "loss", (f"{UNSURE}the ranks of {side.label} have parts of tensors and read equal samples, but "
                                f"have different losses, {losses[0]:.9g} and {losses[1]:.9g}")
        fact = f"equal mean losses, {diff.losses[0]:.9g}, but different gradients" + which_agree(diff)
        if lost(diff):
            return fact + lost(diff)
        zero = "; or a term of the loss that is 0 here, such as log(sigma) at the start, counts differently"
        return UNSURE + fact + zero * bool(which_agree(diff))


def which_agree(diff):
    """Return text that says which gradients agree if only some differ: an error is where these begin."""
    least = NOISE * math.hypot(*[one.grad[0] for one, _ in diff.pairs])
    found = [(gap(one.grad, two.grad, least) > EQUAL, one.name) for one, two in diff.pairs if one.grad[0] > least]
    wrong, right = ([name for differs, name in found if differs == kind] for kind in (True, False))
    if wrong and right:
        return f"; {len(wrong)} of {len(found)} differ, such as that of {wrong[0]}, but not that of {right[0]}"
    return ""


def buffers(diff):
    """A buffer, or another tensor that the model holds, differs, so the losses differ, too."""
    ranks = [(side, rank, state) for side in diff.sides for rank, state in zip(side.run.ranks, side.states)]
    for kinds in ("average", ("buffer", "other")):  # averages follow from weights, a buffer perhaps from a teacher
        for side, rank, state in ranks if not diff.same_loss else ():
            if found := apart(diff.a.states[0]["unoptimized"], state["unoptimized"], EQUAL, kinds):
                fact = f"{found[0]} on rank {rank} of {side.label} differs from that on rank 0 of A"
                fact += where(found[0], diff.a.states, diff.b.states)
                # an average that differs before its weights have moved is a copy of other ones
                first = all(state["optimizer"] not in {one["optimizer"] for one in side.run.states(number)}
                            for number in range(diff.step))
                return ("start", fact) if first and found[0].startswith("average") else fact


def where(name, *runs):
    """Return text that says whether the buffers or averages of a module differ between ranks, given the name of one.

    `runs` has the states of each run. The text is empty if such tensors are sharded: their digests are those of the
    whole tensors, which all ranks have.
    """
    if any("sharded" in state["flags"] for states in runs for state in states):
        return ""
    module = name[:name.rfind(".") + 1] or name
    differs = any(apart(states[0]["unoptimized"], state["unoptimized"], EQUAL, module)
                  for states in runs for state in states[1:])
    return "; ranks differ, too" if differs else "; the ranks of each run agree"


def forward(diff):
    """All ranks compute with the whole batch, and they have equal losses or parts of the model."""
    for side in diff.sides if not diff.same_loss else ():
        shares, losses = [state["samples"] for state in side.states], [*map(loss_of, side.states)]
        alone = shares[0] and all(equal(share, shares[0]) for share in shares)
        whole = side.run.cut == len(losses) or math.isclose(min(losses), max(losses))
        if len(losses) > 1 and alone and whole:
            return f"each rank of {side.label} computes the whole loss; {mean_losses(diff)}"


def reweighted(diff):
    """Weighting the losses of ranks and micro-batches by their counts gives the other run's loss."""
    for side, other in diff.orders if not diff.same_loss else ():
        every, counts, factors = parts_of_mean(side.states)
        for weights, losses in grouped(counts, every, len(side.states)):
            whole = sum(x * y for x, y in zip(weights, losses))
            means = [factor * whole / (sum(weights) or math.nan) for factor in factors]
            if math.isclose(whole, other.loss, rel_tol=EQUAL) or any(
                    math.isclose(mean, other.mean, rel_tol=EQUAL) for mean in means):
                return (f"{mean_losses(diff)}; {len(weights)} losses of {side.label}, weighted by the counts "
                        f"{', '.join(f'{value:g}' for value in weights[:8])}, give the other run's loss")


def grouped(counts, losses, ranks):
    """Yield pairs of counts and losses: as given, then summed over each rank's micro-batches, and over the ranks.

    A program may divide all losses of a rank, or all losses of a micro-batch, by one count. Equal counts are left out.
    """
    every, each = [*range(len(losses))], len(losses) // ranks  # losses of each rank
    parts = [[number] for number in every], [every[rank * each:][:each] for rank in range(ranks)], [
        every[number::each] for number in range(each)]
    for weights in counts:
        for groups in parts:
            summed = [[sum(values[number] for number in group) for group in groups] for values in (weights, losses)]
            if len({*summed[0]}) > 1:
                yield summed


def class_weights(diff):
    """The losses weight the classes differently, as if each rank counted the labels of its own share."""
    first = diff.a.states[0]["weights"]
    for side in diff.sides if not diff.same_loss else ():
        for rank, state in zip(side.run.ranks, side.states):
            for one, two in zip(first, state["weights"]):
                if one[0] == two[0] and gap(one[1], two[1]) > EQUAL:
                    return (f"the argument {one[0]} on rank {rank} of {side.label} differs from that on rank 0 of A; "
                            f"{mean_losses(diff)}")


def parts_of_mean(states):
    """Return the losses of all ranks and micro-batches, lists of counts that they may be divided by, and factors.

    The program may also have divided the losses by the factors: the numbers of ranks, of micro-batches, or of both.
    """
    losses = [loss for state in states for loss in state["losses"]]
    kinds = [[found for state in states for found in state["counts"]]]  # of targets, and of all parts of the batches
    each = max(len(states[0]["batches"]) // max(len(states[0]["losses"]), 1), 1)  # from so many loaders comes a loss
    if all(len(state["batches"]) == each * len(state["losses"]) for state in states):
        kinds.append([sum((found for batch in state["batches"][number * each:][:each] for found in batch[1]), [])
                      for state in states for number in range(len(state["losses"]))])
    counts = [column for found in kinds if len({*map(len, found)}) == 1 for column in zip(*found)]
    parts = [len(states), max(len(state["losses"]) for state in states)]
    return losses, counts, {1, *parts, math.prod(parts)}


def labels(diff):
    """The losses have as many targets in both runs, but other numbers of them are ignored."""
    sizes, known = ([sum(sum(found[place::4]) for state in side.states for found in state["counts"])
                     for side in diff.sides] for place in (0, 1))
    if not diff.same_loss and sizes[0] == sizes[1] and known[0] != known[1]:
        return f"{mean_losses(diff)}; of equally many targets, {known[0]:g} are not ignored in A, and {known[1]:g} in B"


def zero_loss(diff):
    """In one run only, a rank has a loss of exactly 0 in this step, but not in all of its steps."""
    for side, other in diff.orders if not diff.same_loss else ():
        for rank, state in zip(side.run.ranks, side.states):
            every = {loss for step in side.run.ranks[rank] for loss in step["losses"]}
            if 0.0 in state["losses"] and every != {0.0} and not any(0.0 in one["losses"] for one in other.states):
                return (f"{UNSURE}{mean_losses(diff)}; a loss on rank {rank} of {side.label} is exactly 0, as if a "
                        "part without targets returns early, without its other terms")


def uneven_mean(diff):
    """The parts have different counts of elements or labels, and the other run's loss is between those of the parts."""
    for side, other in diff.orders if diff.split and not diff.same_loss else ():
        losses, counts, factors = parts_of_mean(side.states)
        between = any(min(losses) * n < other.mean < max(losses) * n for n in factors if losses)
        if between and any(min(weights) != max(weights) for place, weights in enumerate(counts) if place % 4 != 3):
            return (f"{UNSURE}{mean_losses(diff)}; counts, such as those of labels, differ between the ranks or "
                    "micro-batches, and so may weights, thresholds and selections that are computed from a share"
                    f"{which_agree(diff)}")


def mean_losses(diff):
    seen = "equal samples" if diff.seen else UNSEEN
    if not diff.known:
        return f"{seen}; without backward(), no loss is known"
    return f"{seen}; mean loss {diff.losses[0]:.9g} in A, {diff.losses[1]:.9g} in B"


# The first rule that holds names the cause, so a rule stands before all rules whose condition its cause also meets:
RULES = [
    # what precedes the gradients: each of these changes all that follows
    ("start", start),
    ("batch-size", batch_size), ("learning-rate", learning_rate), ("no-gradient", none_or_zero),
    ("optimizer", optimizer),
    # from here on, the gradients differ
    ("evaluation", evaluation), ("optimizer", old_weight), ("stale", stale), ("stale", kept), ("stale", reached),
    ("stale", other_passes), ("no-gradient", unreduced),
    # gradients that are proportional or zero: other samples or losses cannot make them so
    ("clip", clip), ("scale", scale), ("no-gradient", no_gradient), ("group-scale", group_scale),
    # other samples: all that is computed from them differs
    ("buffers", computed_inputs), ("set-epoch", set_epoch), ("samples", samples),
    # from here on, the samples are equal, or they were not seen
    ("reset", reset),
    # with equal losses, the outputs are equal, too: then statistics of all ranks normalize, or BatchNorm rests
    ("batchnorm", lambda diff: "batchnorm" in diff.flags and diff.split and not diff.same_loss and mean_losses(diff)),
    ("no-gradient", no_graph), ("unknown", mixed), ("clip", clip_of_shards), ("optimizer", flat),
    ("no-backward", no_backward),
    ("buffers", buffers), ("uneven-mean", reweighted), ("loss", class_weights),
    ("random", lambda diff: "random" in diff.flags and mean_losses(diff)), ("forward", forward),
    ("loss", labels),
    # fallbacks: they hold for most differences of the loss, so the answer says "not sure"
    ("loss", zero_loss), ("uneven-mean", uneven_mean),
    ("evaluation", lambda diff: "evaluated" in diff.flags and UNSURE + mean_losses(diff)),
    ("loss", lambda diff: not diff.same_loss and UNSURE + mean_losses(diff) + lost(diff)), ("unknown", mean_losses)]


def unmatched(rows, others, pairs):
    """Return the cause and the evidence if only `pairs` of the tensors of two runs match."""
    for side, mine in enumerate((rows, others)):
        matched = [pair[side] for pair in pairs]
        starts, known = Starts(matched), {*map(id, matched)}
        for row in (row for row in mine if id(row) not in known):
            if alike := starts.alike(row):  # such as an embedding that two stages of a pipeline share
                twin, whole = matched[alike[0]], pairs[alike[0]][1 - side].grad
                one, two = (row.grad[place] + twin.grad[place] for place in (1, 2))
                # clipping scales one run's gradients by one factor
                cause = "partial" if equal([one * whole[2]], [two * whole[1]]) else "not-averaged"
                cause = "clip" if common_factor([(twin, row)])[1] < EQUAL else cause
                fact = f"two copies of {row.name} in {'AB'[side]} have different gradients"
                if cause == "clip":
                    return cause, f"{fact}, proportional to each other: ranks clip or divide them by different numbers"
                return cause, (f"{fact}; if they should be one tensor, tie them again after the model is moved, split "
                               "or wrapped")
    return "unknown", f"A trains {len(rows)} tensors and B {len(others)}, of which {len(pairs)} match"


def explain(diff):
    """Return the likely cause of a Difference, and the evidence for it."""
    answers = ((cause, rule(diff)) for cause, rule in RULES)
    cause, evidence = next(answer for answer in answers if answer[1])  # the last rule always holds
    return evidence if isinstance(evidence, tuple) else (cause, evidence)
