"""What first differs in one step for which both runs have recorded values, draws and gradients, too.

As in explaining.py, rules say what a difference shows. They are functions of a Traced that return the cause and the
evidence, or a false value.
"""
import itertools
import math
import statistics
from ast import literal_eval
from functools import cached_property

from .difference import Difference, are_inputs, common_factor, read_once
from .explaining import UNSEEN, UNSURE, explain, remedy, some
from .records import CONSTANT, EQUAL, FROZEN, PRODUCTS, QUIET, equal, match, worst
from .values import EARLY, FIRST, LATER, SIZES, draws_that_differ, first_value


class Traced:
    """Describes the step at which two runs differ, by the values and draws that both have recorded in it."""

    def __init__(self, report, a, b):
        self.a, self.b, self.step, self.report, self.cause = a, b, report["step"] - 1, report, report["cause"]
        self.unsure = report["message"].startswith(UNSURE)
        self.value = first_value(a, b, self.step, ordered=self.cause != "no-backward")
        self.kind, self.module, self.place = self.value or ("", "", None)
        self.all_draws = draws_that_differ(a, b, self.step)
        self.agree, self.is_input = self.value == (), "input" in self.kind  # whether all outputs of modules agree
        self.in_loss = self.agree or self.kind == CONSTANT
        if self.refuted():
            self.cause = "loss"
        # the rule that named the cause knows only losses, so what the values show is better
        self.unclear = self.cause in ("uneven-mean", "loss", "unknown") or self.cause == "reset" and self.unsure

    def refuted(self):
        """Return whether the values exclude the cause, such as equal outputs of layers in evaluation mode."""
        if self.cause == "batchnorm":  # they agree as if BatchNorm had statistics of all ranks
            norms = {name for state in self.states() for name in state.get("norms", ())}
            before = self.is_input and self.place == FIRST
            return self.in_loss or before or self.value and "output" in self.kind and self.module not in norms
        if self.cause == "no-backward":  # equal losses suggest a collective, but other operands say more
            return self.unsure and self.kind == CONSTANT
        return self.cause == "evaluation" and self.unsure and self.in_loss

    def states(self, *runs):
        return [state for run in runs or (self.a, self.b) for state in run.at(self.step)[0]]

    @cached_property
    def draws(self):
        """Where the programs draw different random numbers that have an effect."""
        return without_innocent(self.all_draws, self.a, self.b, self.step, self.value, self.cause)

    @cached_property
    def quiet(self):
        """What differs in calls without gradients, if no output of the others does, else None."""
        found = first_value(self.a, self.b, self.step, True) if self.in_loss else None
        return found if found and found[2] != SIZES else None

    @cached_property
    def origin(self):
        """Where the input of the first module is computed, if it is no sample."""
        return next((state["computed"][self.module] for state in self.states()
                     if self.place == FIRST and self.module in state.get("computed", ())), "")

    @cached_property
    def fact(self):
        """Text that says what first differs, or an empty string."""
        if self.quiet:  # a teacher, a target network or a policy computes what enters the loss
            kind, module, _ = self.quiet
            return f"the {kind.removeprefix(QUIET)} of {module}, which computes without gradients, differs"
        if self.place == SIZES:
            return (f"the {self.kind} of {self.module} has another size, so it was not compared; if it is padded to "
                    "another length, look for a layer that reads padding")
        if self.kind == CONSTANT:
            places = {state["places"][self.module]: 0 for state in self.states(self.b, self.a)
                      if state.get("places", {}).get(self.module)}
            where = " ".join(self.module.split()[:2]) + f", {' or '.join(places)}" * bool(places)
            return ("the outputs of all modules agree, but what enters the loss besides them differs, such as a mask, "
                    f"weights, what they are divided by, or a selection (an operand of {where})")
        if "targets" in self.kind:
            return f"the targets of {self.module} differ"
        before = {FIRST: f", {self.origin}" if self.origin else ": look before the model",
                  LATER: ", though the outputs before it agree"}.get(self.place, "")
        return f"the {self.kind} of {self.module} differs{before * self.is_input}" if self.value else ""


def trace(report, a, b):
    """Return the report, once both runs have recorded the values and draws of its step: what first differs there."""
    found = Traced(report, a, b)
    if answer := next(filter(None, (rule(found) for rule in BEFORE_VALUES)), None):
        cause, fact = answer
        return {**report, "cause": cause, "message": f"{fact}: {remedy(cause)}"}
    if found.cause == "not-averaged" and not found.unsure:
        return report
    cause, fact = next(filter(None, (rule(found) for rule in RULES)), (found.cause, ""))
    said = f"\nrandom numbers that differ: {', '.join(found.draws[:3])}" * bool(found.draws)
    if fact and (cause != report["cause"] or found.unsure):
        return {**report, "cause": cause, "message": f"{fact}: {remedy(cause)}{said}"}
    message, fact = (report["message"], fact) if fact else noted(found)
    return {**report, "message": message + f"\n{fact}" * bool(fact) + said}


def noted(found):
    """Return the report's message and what to add to it if no rule holds, so the cause stays as it is."""
    message = found.report["message"]
    if not found.agree or found.quiet or found.cause == "samples":
        is_sample = found.cause == "samples" and not (found.value and are_inputs(found.a.states(found.step)
                                                                                 + found.b.states(found.step)))
        return message, found.fact * (not is_sample)
    passes = {len(state["losses"]) for run in (found.a, found.b) for state in run.states(found.step)}
    part = "loss" if found.cause in ("uneven-mean", "loss") else "backward pass"
    part = part if passes - {0} else "loss, or what the program makes of its gradients,"
    if found.cause == "loss" and len(passes) == 1 or found.cause == "not-averaged":  # else, other passes differ
        message = message.removeprefix(UNSURE)
    return message.replace(f"{UNSEEN}; ", ""), f"the outputs of all modules agree, so the {part} differs"


def frozen(found):
    """A module that no optimizer trains, such as an average of another model, has other weights."""
    if found.cause != "not-averaged" and (fact := frozen_weights(found.a, found.b, found.step)):
        return "buffers" if found.step else "start", fact


def moved_by_others(found):
    if found.cause != "not-averaged" and (fact := moved_between(found.a, found.b, found.step)):
        return "optimizer", fact


def noise_after_average(found):
    drawn = [site for site in found.all_draws if ", module " not in site and ", loader)" not in site]
    if found.cause == "not-averaged" and found.agree and drawn and averaged_before(found.report, found.a, found.b):
        return "random", (f"{UNSURE}the ranks had equal gradients in the step before, all outputs of modules agree, "
                          f"and the program draws other random numbers in this step, {', '.join(drawn[:3])}")


def changes(found):
    """What changes the gradients after the last backward pass differs, or hides what does."""
    change = changed_on_ranks if found.cause == "not-averaged" else before_changes
    return change(found.a, found.b, found.step, found.cause, found.all_draws)


def divisors(found):
    if in_terms(found) or found.unclear and found.place == SIZES:
        runs = found.a, found.b, found.step
        divided = unequal_divisors(*runs) or gathered_divisor(*runs)
        return divided and ("uneven-mean", f"{outputs_before(found)}; " * (found.place != SIZES) + divided)


def in_terms(found):
    """Return whether the terms of the loss differ, or what enters a module after these, such as weights of terms."""
    return found.unclear and (found.in_loss or found.is_input and found.place == LATER)


def outputs_before(found):
    return f"the outputs {f'before {found.module}' if found.is_input else 'of all modules'} agree"


def one_divisor(found):
    padded = found.place == SIZES
    if found.cause == "uneven-mean" and (found.agree or padded) and not own_statistic(found.a, found.b, found.step):
        divisor, fact = common_divisor(found.a, found.b, found.step), found.fact or outputs_before(found)
        return divisor and ("loss", f"{UNSURE}{fact}; both programs divide their losses by {divisor:.9g}, so the "
                                    "losses differ in another way")


def other_draws(found):
    in_model = any(", module " in site or "(torch." in site for site in found.draws)
    fallback = found.cause in ("buffers", "not-averaged") and found.unsure
    if found.draws and not in_model and (found.unclear or found.cause == "random" or fallback):
        one, two = samples_of_both(found.a, found.b, found.step)
        noise = equal(one, two) and (not found.value or "output" in found.kind)  # on weights: no input differs
        fact = found.fact * (found.place != SIZES) or "the program draws other random numbers for this step"
        return "random" if noise else "samples", fact


def weights_within_step(found):
    if found.unclear and found.value and not found.is_input:
        return changed_weights(found.a, found.b, found.step, found.module)


def teacher(found):
    return found.unclear and found.quiet and ("forward", found.fact)


def own_terms(found):
    own = in_terms(found) and own_statistic(found.a, found.b, found.step)
    return own and ("uneven-mean", f"{outputs_before(found)}, but {own}")


def value(found):
    """The first value that differs is a target, what enters the loss, or an input or output of a module."""
    if not found.unclear or not found.value or found.place == SIZES:
        return None
    if "targets" in found.kind:
        cause = "loss" if all(read_once(run, found.step, 0) for run in (found.a, found.b)) else "samples"
    elif found.kind == CONSTANT:
        cause = "loss"
    else:
        cause = {FIRST: "samples", LATER: "loss"}.get(found.place, "forward")
        cause = cause if found.is_input and not found.origin else "forward"
    return cause, found.fact


def refutation(found):
    return found.cause != found.report["cause"] and found.agree and ("loss", noted(found)[1])


BEFORE_VALUES = [frozen, moved_by_others, noise_after_average, changes]
RULES = [divisors, one_divisor, other_draws, weights_within_step, teacher, own_terms, value, refutation]


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


def gathered_divisor(a, b, step):
    """Return text that says so if one run divides by a row of numbers for each rank, whose sum the other divides by.

    A small number, which keeps a ratio finite, may have been added to each row.
    """
    one, two = (divisors_of(run, step, True) for run in (a, b))
    for run, mine, other, others in ((b, two, a, one), (a, one, b, two)):
        for (which, found), (wanted, divisors) in itertools.product(mine.items(), others.items()):
            shape, (first, *more) = literal_eval(which.rpartition(" ")[0]), [sums[0] for sums, _ in found]
            rows = wanted.rpartition(" ")[0] == str(shape[1:]) and shape[:1] == (len(run.ranks),)
            if rows and equal([first] * len(more), more) and math.isclose(first, divisors[0][0][0], rel_tol=0.1):
                return (f"{run.label} divides by {shape[0]} rows of gathered numbers ({found[0][1]}), and "
                        f"{other.label} by their sum, {divisors[0][0][0]:.9g}")


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
        shares = [sorted(state["samples"]) for state in run.states(step)]
        divided = run.cut == 1 or any(not equal(share, shares[0]) for share in shares)  # else, tensors are, not samples
        for key, parts in mine.items() if divided else ():
            kind = key[0].partition(" ")[0]
            known = [digests for (name, shapes), found in theirs.items() for digests, _ in found
                     if (name.partition(" ")[0], shapes) == (kind, key[1])]
            unlike = [any(not equal(digests[number], parts[0][0][number]) for digests, _ in parts)
                      for number in range(len(parts[0][0]))]
            enough = all(unlike) if kind in PRODUCTS else any(unlike)
            if enough and len(parts) > len(theirs.get(key, parts)) and not any(
                    equal(sum(digests, []), sum(one, [])) for digests, _ in parts for one in known):
                return (f"an operand of {key[0]}, {parts[0][1]}, differs between the ranks of {run.label}, and has as "
                        f"many values as in {other.label}: each rank computes a term of the loss, such as a ratio or a "
                        "product of means, from its own samples")
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
