"""The values and draws of one step that both runs have recorded: which are the first that differ."""
import collections
import math

from .records import CONSTANT, EQUAL, FROZEN, QUIET, equal

INSIDE, FIRST, LATER, SIZES = range(4)  # where a value differs: first_value()
EARLY = ", before the first forward pass)"  # ends the place of draws in draws.py


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
