"""The first step at which two runs differ: the facts that the rules of explaining.py read."""
import math
from functools import cached_property

from .records import EQUAL, INPUTS, equal, only_loaders, worst


class Side:
    """One of two runs at the first step at which they differ."""

    def __init__(self, run, step, other):
        self.run, self.label, self.states = run, run.label, run.at(step)[0]
        self.samples = read_once(run, step, len(other.samples(step)))
        self.layout = len(self.states), len(self.states[0]["batches"])  # the numbers of ranks and of micro-batches
        self.loss = sum(map(loss_of, self.states))
        self.mean = self.loss / (sum(bool(state["losses"]) for state in self.states) or 1)  # other stages have no loss
        self.norm = self.states[0]["clips"][0][0] if self.states[0]["clips"] else 0  # before the first clipping


class Difference:
    """Describes the first step at which two runs differ. `column` is the field of `Row` that differs."""

    def __init__(self, a, b, step, column, pairs):
        self.step, self.column, self.pairs, self.steps = step, column, pairs, range(min(a.length, b.length))
        self.loaders, self.flat = self.differing_loaders(a, b), a.flat or b.flat
        self.a, self.b = self.sides = Side(a, step, b), Side(b, step, a)
        self.orders = (self.b, self.a), (self.a, self.b)  # a rule that may hold for either run tries B first
        sizes = [{state["size"] for state in side.states} for side in self.sides]
        if len(self.a.samples) != len(self.b.samples) and sizes[0] != sizes[1]:
            self.b.samples = self.a.samples  # context parallelism: each input of the model is only a part of a sample
        targets = [targets_of(side.states) for side in self.sides]
        inputs = all(are_inputs(side.states) for side in self.sides)
        if len(self.a.samples) != len(self.b.samples) and inputs and targets[0] == targets[1] > 0:
            self.a.samples = self.b.samples = []  # rows such as the nodes of a sampled graph, which batches may share
        self.seen = bool(self.a.samples and self.b.samples)
        self.other_samples = self.seen and not equal(self.a.samples, self.b.samples)
        if self.other_samples and picked(a, step) == picked(b, step) and differed(a, b, step):
            self.seen = self.other_samples = False
        self.states = self.a.states + self.b.states
        self.split = self.a.layout != self.b.layout
        self.parallel = self.b if self.b.layout > self.a.layout else self.a  # the run with more parts
        means, sums = (self.a.mean, self.b.mean), ((self.a.loss, self.b.mean), (self.a.mean, self.b.loss))
        self.losses = next((pair for pair in sums if math.isclose(*pair)), means)  # ranks may have parts of a sum
        passes = {len(state["losses"]) for state in self.states}
        firsts = [[state["losses"][0] for state in side.states if state["losses"]] for side in self.sides]
        if len(passes) > 1 and [*map(len, firsts)] == [len(side.states) for side in self.sides]:
            one, two = (sum(losses) / len(losses) for losses in firsts)
            self.losses = (one, two) if math.isclose(one, two) else self.losses  # as with GradCache
        self.same_loss = math.isclose(*self.losses)  # also if none is known, as without backward()
        self.known = bool(passes - {0})
        self.flags = {flag for state in self.states for flag in state["flags"]}

    def differing_loaders(self, a, b):
        """Keep only the samples of those loaders from which the runs read other samples in this step; name them."""
        read = []
        for run in (a, b):
            read.append({})
            for loader, samples, _ in (batch for state in run.states(self.step) for batch in state["read"]):
                read[-1].setdefault(loader, []).extend(samples)
        unlike = {loader for loader in read[0] if not equal(*(sorted(found.get(loader, [])) for found in read))}
        if len(unlike) == len(read[0]) or not unlike or {*read[0]} != {*read[1]}:
            return ""
        for run in (a, b):
            only_loaders(run, unlike)
        numbers = ", ".join(str(loader + 1) for loader in sorted(unlike))
        return f" of loader {numbers} of {len(read[0])}, in the order of their first use,"

    @cached_property
    def factor(self):
        """All gradients of B divided by those of A, or None if the quotients differ."""
        factor, deviation = common_factor(self.pairs)
        if self.column == "grad" and factor > 0 and deviation < min(EQUAL, 1e-3 * abs(factor - 1)):
            return factor
        return None


def differed(a, b, step):
    """Return whether samples differ in earlier steps, whose gradients are equal: then they are padded differently."""
    return any(not equal(read_once(a, number, len(b.samples(number))), read_once(b, number, len(a.samples(number))))
               for number in range(step))


def targets_of(states):
    """Return how many targets the losses of a step have, on all ranks."""
    sizes = (size for state in states for found in state.get("counts", ()) for size in found[::4])
    return sum(size for size in sizes if isinstance(size, int))  # others are sums of class weights


def loss_of(state):
    return sum(state["losses"])


def read_once(run, step, count):
    """Return a step's samples, sorted. Count ranks with equal samples once if this leaves exactly `count` samples.

    In tensor and pipeline parallelism, each rank of a group reads all samples of the group.
    """
    states, samples = run.states(step), run.samples(step)
    once = sorted(sum({str(state["samples"]): state["samples"] for state in states}.values(), []))
    return once if len(once) == count else samples


def common_factor(pairs):
    """Return the second gradient of the largest pair divided by the first, and how far other pairs deviate from it."""
    one, two = max(pairs, key=lambda pair: pair[0].grad[0])
    factor = two.grad[0] / (one.grad[0] or math.nan)
    scaled = [(one._replace(grad=[factor * value for value in one.grad]), two) for one, two in pairs]
    return factor, worst(scaled, "grad")[0]


def are_inputs(states):
    """Return whether all samples are inputs of models, because no loader has delivered them."""
    return all(batch[0] == INPUTS for state in states for batch in state["batches"])


def picked(run, step):
    """Return the sorted indices that the samplers of all ranks have drawn for a step, if they are known."""
    return sorted(index for state in run.states(step) for index in state["indices"])
