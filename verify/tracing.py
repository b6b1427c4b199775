"""What first differs in one step, for which both runs have recorded values, draws and gradients, too."""
import collections
import itertools
import math
import statistics

from .difference import Difference, are_inputs, common_factor, read_once
from .explaining import UNSEEN, UNSURE, explain, remedy, some
from .records import CONSTANT, EQUAL, FROZEN, PRODUCTS, QUIET, equal, match, worst

INSIDE, FIRST, LATER, SIZES = range(4)  # where a value differs: first_value()
EARLY = ", before the first forward pass)"  # ends the place of draws in draws.py


def trace(report, a, b):
    """Return the report, once both runs have recorded the values and draws of its step: what first differs there."""
    step, cause, message = report["step"] - 1, report["cause"], report["message"]
    value, draws = first_value(a, b, step, ordered=cause != "no-backward"), draws_that_differ(a, b, step)
    if cause != "not-averaged" and (fact := frozen_weights(a, b, step)):
        cause = "buffers" if step else "start"  # such as an average of another model
        return {**report, "cause": cause, "message": f"{fact}: {remedy(cause)}"}
    if cause != "not-averaged" and (fact := moved_between(a, b, step)):
        return {**report, "cause": "optimizer", "message": f"{fact}: {remedy('optimizer')}"}
    drawn = [site for site in draws if ", module " not in site and ", loader)" not in site]
    if cause == "not-averaged" and value == () and drawn and averaged_before(report, a, b):
        fact = (f"{UNSURE}the ranks had equal gradients in the step before, all outputs of modules agree, and the "
                f"program draws other random numbers in this step, {', '.join(drawn[:3])}")
        return {**report, "cause": "random", "message": f"{fact}: {remedy('random')}"}
    change = changed_on_ranks if cause == "not-averaged" else before_changes
    if answer := change(a, b, step, cause, draws):
        cause, fact = answer
        return {**report, "cause": cause, "message": f"{fact}: {remedy(cause)}"}
    if cause == "not-averaged" and not message.startswith(UNSURE):
        return report
    kind, module, place = value or ("", "", None)
    unclear = cause in ("uneven-mean", "loss", "unknown") or cause == "reset" and message.startswith(UNSURE)
    is_input = "input" in kind
    origin = next((state["computed"][module] for run in (a, b) for state in run.at(step)[0]
                   if place == FIRST and module in state.get("computed", ())), "")
    norms = {name for run in (a, b) for state in run.at(step)[0] for name in state.get("norms", ())}
    if cause == "batchnorm" and (value == () or kind == CONSTANT or is_input and place == FIRST
                                 or value and "output" in kind and module not in norms):
        cause, unclear = "loss", True  # BatchNorm's outputs agree, as if it had statistics of all ranks
    if cause == "evaluation" and message.startswith(UNSURE) and (value == () or kind == CONSTANT):
        cause, unclear = "loss", True  # in evaluation mode, outputs would differ
    draws = without_innocent(draws, a, b, step, value, cause)
    quiet = first_value(a, b, step, True) if value == () or kind == CONSTANT else None
    quiet = quiet and quiet[2] != SIZES and quiet[:2]
    fact, before = "", {FIRST: ": look before the model", LATER: ", though the outputs before it agree"}
    if quiet:  # a teacher, a target network or a policy computes what enters the loss
        fact = f"the {quiet[0].removeprefix(QUIET)} of {quiet[1]}, which computes without gradients, differs"
    elif place == SIZES:
        fact = (f"the {kind} of {module} has another size, so it was not compared; if it is padded to another "
                "length, look for a layer that reads padding")
    elif kind == CONSTANT:
        places = {state["places"][module]: 0 for run in (b, a) for state in run.at(step)[0]
                  if state.get("places", {}).get(module)}
        module += f", {' or '.join(places)}" * bool(places)
        fact = ("the outputs of all modules agree, but what enters the loss besides them differs, such as a mask, "
                f"weights, what they are divided by, or a selection (an operand of {module})")
    elif "targets" in kind:
        fact = f"the targets of {module} differ"
    elif value:
        before[FIRST] = f", {origin}" if origin else before[FIRST]
        fact = f"the {kind} of {module} differs{before.get(place, '') if is_input else ''}"
    in_loss = unclear and (value == () or kind == CONSTANT or is_input and place == LATER)  # or before another module
    which = f"before {module} agree" if is_input else "of all modules agree"
    if (in_loss or unclear and place == SIZES) and (divided := unequal_divisors(a, b, step)):
        divided = f"the outputs {which}; " * in_loss + divided
        return {**report, "cause": "uneven-mean", "message": f"{divided}: {remedy('uneven-mean')}"}
    own = in_loss and own_statistic(a, b, step)
    if cause == "uneven-mean" and value == () and not own and (divisor := common_divisor(a, b, step)):
        return {**report, "cause": "loss", "message": (
            f"{UNSURE}the outputs of all modules agree, and both programs divide their losses by {divisor:.9g}, so the "
            f"losses differ in another way: {remedy('loss')}")}
    changed = unclear and value and not is_input and changed_weights(a, b, step, module)
    in_model = [site for site in draws if ", module " in site or "(torch." in site]
    fallback = cause in ("buffers", "not-averaged") and message.startswith(UNSURE)
    if draws and not in_model and (unclear or cause == "random" or fallback):
        one, two = samples_of_both(a, b, step)
        noise = equal(one, two) and (not value or "output" in kind)  # no input differs, such as noise on the weights
        cause = "random" if noise else "samples"
        fact = fact * (place != SIZES) or "the program draws other random numbers for this step"
    elif changed:
        cause, fact = changed
    elif quiet and unclear:
        cause = "forward"
    elif own:
        return {**report, "cause": "uneven-mean", "message": f"the outputs {which}, but {own}: {remedy('uneven-mean')}"}
    elif kind == CONSTANT and unclear:
        return {**report, "cause": "loss", "message": f"{fact}: {remedy('loss')}"}
    elif unclear and "targets" in kind:
        cause = "loss" if all(read_once(run, step, 0) for run in (a, b)) else "samples"
    elif unclear and value and place != SIZES:
        cause = {FIRST: "samples", LATER: "loss"}.get(place) if is_input and not origin else None
        cause = cause or "forward"
    elif cause == "samples" and not (value and are_inputs(a.states(step) + b.states(step))):
        fact = ""
    elif value == ():
        passes = {len(state["losses"]) for run in (a, b) for state in run.states(step)}
        part = "loss" if cause in ("uneven-mean", "loss") else "backward pass"
        part = part if passes - {0} else "loss, or what the program makes of its gradients,"
        fact = f"the outputs of all modules agree, so the {part} differs"
        sure = cause == "loss" and len(passes) == 1 or cause == "not-averaged"  # else, other passes have other losses
        message = message.removeprefix(UNSURE) if sure else message
        message = message.replace(f"{UNSEEN}; ", "")  # the inputs agree, too
    said = f"\nrandom numbers that differ: {', '.join(draws[:3])}" * bool(draws)
    if cause != report["cause"]:
        return {**report, "cause": cause, "message": f"{fact}: {remedy(cause)}{said}"}
    return {**report, "message": message + f"\n{fact}" * bool(fact) + said}


def unequal_divisors(a, b, step):
    """Return text that says so if one run divides its losses by different numbers, whose sum the other divides by.

    A program may have multiplied these numbers by the number of ranks.
    """
    for once in (True, False):
        one, two = (divisors_of(run, step, once) for run in (a, b))
        for run, mine, other, others in ((b, two, a, one), (a, one, b, two)):
            for found, wanted in itertools.product(mine.values(), others.values()):  # one run may divide once more
                parts, whole = ([sums for sums, _ in part] for part in (found, wanted))
                total, expected = ([*map(sum, zip(*part))] for part in (parts, whole))
                unlike = len(parts) > len(whole) and not all(equal(part, parts[0]) for part in parts)
                if unlike and any(equal(total, [by * value for value in expected]) for by in (1, len(run.ranks))):
                    vectors = "vectors whose sums are " * (len(parts[0]) > 1)
                    said = [vectors + ", ".join(f"{part[0]:.9g}" for part in sums[:8]) for sums in (parts, whole)]
                    return (f"the ranks or micro-batches of {run.label} divide by {said[0]} ({found[0][1]}), and "
                            f"{other.label} by {said[1]}")


def divisors_of(run, step, once):
    """Return {which: [(sums, file and line), ...]} of all ranks and micro-batches, or one that a rank's all share."""
    found = {}
    for state in run.at(step)[0]:
        own = {}
        for which, *divisor in state.get("divisors", ()):
            own.setdefault(which, []).append(divisor)
        for which, divisors in own.items():
            shared = once and all(equal(sums, divisors[0][0]) for sums, _ in divisors)
            found.setdefault(which, []).extend(divisors[:1] if shared else divisors)
    return found


def own_statistic(a, b, step):
    """Return text that says so if the ranks of one run compute a term of the loss from a statistic of their samples.

    Such a statistic is an operand of as many values as in the other run, but with other values on each rank, and the
    loss does not depend on it linearly: the mean of such terms is not the term of the mean. A product has two.
    """
    every = [{}, {}]  # {(name, shapes): [(digests, place) of all ranks and micro-batches]}
    for run, found in zip((a, b), every):
        for state in run.at(step)[0]:
            for name, shapes, digests, place in state.get("operands", ()):
                found.setdefault((name, shapes), []).append((digests, place))
    for run, mine, other, theirs in ((b, every[1], a, every[0]), (a, every[0], b, every[1])):
        for key, parts in mine.items() if run.cut == 1 else ():
            kind = key[0].partition(" ")[0]
            known = [digests for (name, shapes), found in theirs.items() for digests, _ in found
                     if (name.partition(" ")[0], shapes) == (kind, key[1])]
            unlike = [any(not equal(digests[number], parts[0][0][number]) for digests, _ in parts)
                      for number in range(len(parts[0][0]))]
            enough = all(unlike) if kind in PRODUCTS else any(unlike)
            if enough and len(parts) > len(theirs.get(key, parts)) and not any(
                    equal(sum(digests, []), sum(one, [])) for digests, _ in parts for one in known):
                return (f"an operand of {key[0]}, {parts[0][1]}, is another one "
                        f"on each rank of {run.label}, of the size that it has in {other.label}: a term of the loss, "
                        "such as a ratio or a product of means, is computed from each rank's own samples")
    return ""


def common_divisor(a, b, step):
    """Return the number that divides all losses of both runs, such as the count of all ranks' tokens, or None.

    It is at least the number of samples: others may be the number of micro-batches, or a temperature.
    """
    least = min(len(found) for found in samples_of_both(a, b, step))
    found = [[sums[0] for which, sums, _ in state.get("divisors", ()) if "," not in which and sums[0] >= least > 0]
             for run in (a, b) for state in run.at(step)[0]]
    if all(found) and equal([min(map(min, found))], [max(map(max, found))]):
        return found[0][0]


def without_innocent(draws, a, b, step, value, cause):
    """Leave out draws that differ without effect, such as a shuffle of each rank's own share, if samples are equal."""
    if cause != "start":  # then initial weights are equal
        draws = [site for site in draws if not ("(torch." in site and site.endswith(EARLY))]
    one, two = samples_of_both(a, b, step)
    if not one or not equal(one, two):
        return draws
    innocent = [", loader)"]
    kind, _, place = value or ("", "", None)
    if value is not None and not ("input" in kind and place == FIRST):
        innocent.append(EARLY)  # such as initial weights, which are equal
        if kind != "input (integers)" or are_inputs(a.states(step) + b.states(step)):  # else, such as negatives
            innocent.append(", integers)")
    return [site for site in draws if not site.endswith(tuple(innocent))]


def samples_of_both(a, b, step):
    """Return the samples that A and B read in a step, sorted."""
    return [read_once(run, step, len(other.samples(step))) for run, other in ((a, b), (b, a))]


def before_changes(a, b, step, cause, draws):
    """Return the cause and the evidence if the gradients after the last backward pass tell them, else None.

    The program may have changed these gradients before the step. If they agree, this change differs; if they do not,
    it may hide what is missing or scaled, as a clip does.
    """
    pairs = after_backward(a, b, step)
    if pairs and worst(pairs, "grad")[0] < EQUAL:
        if drawn := without_innocent(draws, a, b, step, (), cause):  # such as noise that is added to the gradients
            return "random", f"the program draws other random numbers in this step, {', '.join(drawn[:3])}"
        return "clip", (UNSURE + "the gradients agree after the last backward pass, so what changes them before the "
                        "step differs, such as averaging, clipping or scaling by hand")
    if pairs:
        found, fact = explain(Difference(a, b, step, "grad", pairs))
        if cause == "clip" or found in ("clip", "scale", "group-scale", "no-gradient"):
            unsure = UNSURE * fact.startswith(UNSURE)
            return found, f"{unsure}after the last backward pass, {fact.removeprefix(UNSURE)}"


def changed_on_ranks(a, b, step, cause, draws):
    """Return the cause and the evidence if the ranks differ in how they change gradients after the last backward pass.

    Then no tensor has equal gradients on all ranks, and at least one rank does more than to scale them.
    """
    drawn = [site for site in without_innocent(draws, a, b, step, (), cause) if ", module " not in site]
    for run in (run for run in (b, a) if len(run.ranks) > 1):
        ranks = [[row for row in state["rows"] if row.grad[0]] for state in run.at(step)[0]]
        groups = [*zip(*ranks)]
        alike = all([row[:2] for row in rows] == [row[:2] for row in ranks[0]] for rows in ranks)  # else, stages
        if not groups or not alike or any(equal(row.grad, rows[0].grad) for rows in groups for row in rows[1:]):
            continue
        for rows in ranks[1:]:
            pairs = [pair for pair in zip(ranks[0], rows) if equal(pair[0].start, pair[1].start)]  # else, slices
            by = statistics.median([two.grad[0] / one.grad[0] for one, two in pairs] or [0])
            apart = [one for one, two in pairs if not equal([value * by for value in one.grad], two.grad)]
            if 0 < len(apart) < len(pairs) / 2:
                return cause, (f"up to a factor, such as that of a clip, the ranks of {run.label} have equal "
                               f"gradients, but not of {some(apart, pairs)}, so average these, too")
        if not all(row.computed for rows in ranks for row in rows):
            continue
        if all(common_factor([(row._replace(grad=row.computed), row) for row in rows])[1] < EQUAL for rows in ranks):
            continue  # they are only scaled, as by a clip
        if drawn:
            return "random", (f"the ranks of {run.label} change their gradients after the last backward pass, and the "
                              f"program draws other random numbers in this step, {', '.join(drawn[:3])}")
        if all(equal(row.computed, rows[0].computed) for rows in groups for row in rows):
            return "clip", (f"{UNSURE}the ranks of {run.label} have equal gradients after the last backward pass, so "
                            "something changes them on each rank before the step, such as a clip by hand")
        return cause, (f"{UNSURE}the ranks of {run.label} have different gradients after the last backward pass, and "
                       "something other than an average changes them before the step, such as a clip by hand")


def averaged_before(report, a, b):
    """Return whether all ranks had an equal gradient, not of zero, of the parameter that differs, one step earlier."""
    for run in (run for run in (a, b) if report["step"] > 1 and len(run.ranks) > 1):
        found = [row.grad for state in run.at(report["step"] - 2)[0] for row in state["rows"]
                 if row.name == report["parameter"]]
        if found and found[0][0] and all(equal(found[0], grad) for grad in found):
            return True
    return False


def after_backward(a, b, step):
    """Return pairs of rows, whose gradients are those after a step's last backward pass, or none if they are not known.

    If the ranks have not averaged them yet, they are means or sums over the ranks.
    """
    sides, summed = [], 1
    for run in (a, b):
        ranks = [state["rows"] for state in run.at(step)[0]]
        groups, count = [*zip(*ranks)], len(ranks)  # the replicas of each parameter
        if run.cut > 1 or len({*map(len, ranks)}) > 1 or not all(
                row.computed and row.shape == rows[0].shape and equal(row.start, rows[0].start)
                for rows in groups for row in rows):
            return []
        if not all(equal(row.computed, rows[0].computed) for rows in groups for row in rows):
            summed *= count
        means = [[sum(values) / count for values in zip(*[row.computed[1:] for row in rows])] for rows in groups]
        sides.append([rows[0]._replace(grad=[math.hypot(*mean), *mean]) for rows, mean in zip(groups, means)])
    pairs = match(*sides)
    factor = common_factor(pairs)[0] if pairs else 0
    if any(math.isclose(factor, by, rel_tol=EQUAL) for by in (summed, 1 / summed)):
        pairs = [(one, two._replace(grad=[value / factor for value in two.grad])) for one, two in pairs]
    return pairs


def changed_weights(a, b, step, module):
    """Return the cause and the evidence if a module's weights are equal in its first call of a step, but not later."""
    theirs, mine = ([[row[5:] for row in state["passed"] if row[:2] == ["weights", module]]
                     for state in run.at(step)[0]] for run in (a, b))
    for cause, who, ranks in (("not-averaged", "the ranks of B", mine), ("not-averaged", "the ranks of A", theirs),
                              ("optimizer", "A and B", [theirs[0], mine[0]])):
        alike = [all(equal(calls[0], other) for other in calls) for calls in zip(*ranks)]
        if not all(alike) and alike[0]:
            if cause == "optimizer" and not first_losses_agree(a, b, step):
                return "loss", UNSURE + "the losses of the step's first backward pass differ"
            gradients = " from gradients that are not averaged" * (cause == "not-averaged")
            return cause, (f"the weights of {module} are equal on {who} in the first call, but not in a later one: "
                           f"something, such as SAM, has changed them in between{gradients}")


def moved_between(a, b, step):
    """Return text that says so if, in one run only, weights have changed since the optimizer's step before."""
    one, two = (moved(run, step) for run in (a, b))
    for run, names in ((b, two - one), (a, one - two)):
        if names:
            return (f"since the step before, only in {run.label}, something other than the optimizer has changed the "
                    f"weights of {min(names)}, such as the load of a checkpoint")
    return ""


def moved(run, step):
    """Return the names of modules whose weights on rank 0 are not those that the step before has left."""
    left = {}  # {name of a module: sums of the digests of its parameters}
    for row in run.at(step - 1)[0][0]["rows"] if step else ():
        name = row.name.rpartition(".")[0]
        left[name] = [x + y for x, y in zip(left.get(name, (0, 0)), row.value)]
    found = {row[1]: row[5:] for row in reversed(run.at(step)[0][0]["passed"]) if row[0] == "weights"}
    return {name for name in found if name in left and not equal(found[name], left[name])}


def frozen_weights(a, b, step):
    """Return text that says so if a rank has a frozen module with weights that no module of rank 0 of A has."""
    found = [(run, rank, {(row[1], row[4]): row[5:] for row in reversed(state["passed"]) if row[0] == FROZEN})
             for run in (a, b) for rank, state in zip(run.ranks, run.at(step)[0])]
    first = found[0][2]
    for run, rank, modules in found[1:]:
        for key, weights in modules.items():
            if key in first and not any(equal(weights, other) for other in first.values()):
                return (f"the weights of {key[0]}, which are frozen, differ between rank 0 of A and rank {rank} of "
                        f"{run.label}")
    return ""


def first_losses_agree(a, b, step):
    """Return whether the losses of a step's first backward pass have equal means or sums over the ranks in both runs.

    They cannot be compared, and so agree, if the ranks have different numbers of backward passes.
    """
    one, two = ([state["losses"] for state in run.at(step)[0]] for run in (a, b))
    if len({*map(len, one + two)}) > 1 or not one[0]:
        return True
    first = [sum(losses[0] for losses in ranks) for ranks in (one, two)]
    return any(math.isclose(first[0] / x, first[1] / y, rel_tol=EQUAL) for x in (1, len(one)) for y in (1, len(two)))


def first_value(a, b, step, quiet=False, ordered=True):
    """Return (kind, module, place) of the first input or output that differs in a step, () if none does, else None.

    Both runs must have recorded them. Two values are equal if their sums over ranks and micro-batches are equal, or if
    each rank has the whole value. Values whose widths or sizes differ are slices or padded, and are not compared. With
    `ordered` False, as after equal losses, values that only stand in another order are equal, too.
    `place` is 0 inside a model, 1 for the first models, 2 for a model or loss that follows the output of another one,
    and SIZES if no value differs, but the size of a model's output does. If `quiet`, look at calls without gradients.
    """
    if min(a.length, b.length) <= step:
        return None
    left, right = (sums(run.at(step)[0], "passed", 4) for run in (a, b))
    other = other_modules(a, b, step)
    shared = [key for key in left[1] if key in right[1] and key[0] not in ("weights", FROZEN)
              and key[0].startswith(QUIET) == quiet and not f"{key[1]}.".startswith(other)]
    place, unlike, indices, integers = FIRST, None, [], None
    digits = 3 if ordered else 2  # of [size, squared norm, wave]
    calls = collections.Counter(tuple(item[:4]) for state in a.at(step)[0] for item in state["passed"])
    usual = {key[:3]: number for key, number in sorted(calls.items(), key=lambda pair: pair[1])}
    uneven = {key[:3] for key in shared if not comparable(left, right, key)}
    for key in shared:  # in the order of the forward pass
        kind, name, outermost, _ = key
        pairs = comparable(left, right, key)
        if key[:3] in uneven and calls[key] < usual[key[:3]]:
            pairs = []  # of some calls, as a length is: their micro-batches may be of other samples
        shifted = "integers" in kind and "targets" not in kind and outermost and place == FIRST
        if pairs and not shifted and not any(equal(one[:digits], two[:digits]) for one, two in pairs):
            if kind == CONSTANT and (unlike or any(proportional(*pair) for pair in pairs)):
                continue  # such as a mask that one program has divided by the number of ranks, or one for other outputs
            passed_on = "integers" in kind and pairs in indices  # by the outermost module
            found = kind, name, place if outermost or passed_on else INSIDE
            if kind != "input (integers)":
                return integers or found
            integers = integers or found
        elif pairs and "integers" not in kind:
            integers = None  # they depend on the split, as the edges of a collated graph: what follows from them agrees
        if shifted:  # an index into the batch depends on the split
            indices.append(pairs)
        if outermost and "output" in kind:
            place, unlike = LATER, unlike if pairs else (kind, name, SIZES)
    return integers or unlike or (() if shared else None)


def proportional(one, two):
    """Return whether one value is a multiple of the other one, as far as [size, squared norm, wave] show."""
    factor = two[2] / (one[2] or math.nan)
    return math.isclose(two[1], factor * factor * one[1], rel_tol=EQUAL)


def other_modules(a, b, step):
    """Return how names begin that two modules have: each stage of a pipeline may have a module "0"."""
    weights = [[{row[1]: row[5:] for row in reversed(state["passed"])
                 if row[0] in ("weights", FROZEN)}  # of the first calls
                for state in run.at(step)[0]] for run in (a, b)]
    unlike = {name for found in sum(weights, []) for name in found if any(
        not equal(found[name], other.get(name, found[name])) for other in sum(weights, []))}
    unlike |= {name for ranks in weights for found in ranks for name in found if any(name not in one for one in ranks)}
    # if tensors are split by hand, other weights are other slices of the same module
    return tuple(f"{name.rpartition('.')[0] or name}." for name in unlike if a.cut == b.cut == 1)


def draws_that_differ(a, b, step):
    """Return where the program of B, or else that of A, drew random numbers that the other one did not draw.

    A site is a line of the program, with the library and the module. Sites are compared by the sums of their numbers,
    before and after the first forward pass, which may come between other draws of that line on each rank.
    """
    sites = [[state["sites"] for state in run.at(step)[0]] for run in (a, b)]
    later = {site for ranks in sites for found in ranks for site, *_ in found}
    left, right = (sums([{"sites": [[site.replace(EARLY, ")"), *numbers] for site, *numbers in found]}
                         for found in ranks], "sites", 1) for ranks in sites)
    for mine, others in ((right, left), (left, right)):
        found = [site for site in mine[0] if not any(
            equal(*pair) for other in others[0] for pair in comparable(mine, others, site, other))]
        if found:
            return [label if label in later else label[:-1] + EARLY for (label,) in found]
    return []


def comparable(left, right, key, other=None):
    """Return the pairs of a value's sums that have equal sizes: over all ranks, or on rank 0, in each run."""
    pairs = [(one.get(key), two.get(other or key)) for one in left for two in right]
    return [pair for pair in pairs if all(pair) and pair[0][0] == pair[1][0]]


def sums(states, field, length):
    """Return {the first `length` values of an item: the sums of its other values}, of rank 0, all ranks, unlike ranks.

    Those of rank 0 are nan, and so equal to none, if another rank has different ones of the same size, or has drawn
    more or fewer numbers: then rank 0 has only a part, or the ranks differ. Ranks of a tensor-parallel group may have
    equal ones, which then count once.
    """
    ranks, every, unlike = [{} for _ in states], {}, {}
    for state, own in zip(states, ranks):
        for item in state[field]:
            key, numbers = tuple(item[:length]), item[length:]
            for found in (own, every):
                found[key] = [x + y for x, y in zip(found.get(key, [0] * len(numbers)), numbers)]
    first = {}
    for key, numbers in ranks[0].items():
        others = [own[key] for own in ranks[1:] if key in own and (own[key][0] == numbers[0] or field == "sites")]
        alike = all(equal(numbers, other) for other in others)
        first[key] = numbers if alike else [numbers[0], *[math.nan] * (len(numbers) - 1)]
    for key in every:
        once = []
        for numbers in (own[key] for own in ranks if key in own):
            once += [numbers] * (not any(equal(numbers, other) for other in once))
        unlike[key] = [sum(values) for values in zip(*once)]
    return first, every, unlike
