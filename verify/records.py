"""What the ranks of one command recorded, and how the parameters of two commands correspond."""
import cmath
import json
import math
from pathlib import Path
from typing import NamedTuple

from .recording import FREQUENCIES


class Row(NamedTuple):
    """One parameter in one step. A digest is [norm, projection, projection]."""

    name: str
    shape: list  # of numbers
    start: list  # digest of the initial value
    rate: list  # one number: the learning rate
    grad: list  # digest of the gradient
    value: list  # digest of the value after the step


class Run:
    """The records of one command: for each rank, its steps and all its events, in order."""

    def __init__(self, label, events):
        """Take `events`, a list of (rank, its events), one for each file that a process wrote."""
        self.label, self.ranks, self.events, self.doubled = label, {}, {}, False
        for rank, found in sorted(events, key=lambda pair: pair[0]):
            self.doubled |= rank in self.ranks
            self.events[rank] = found
            self.ranks[rank] = [{**event, "rows": [Row(*row) for row in event["rows"]]}
                                for event in found if event["event"] == "step"]
        self.length = min(map(len, self.ranks.values()), default=0)
        self.flags = {flag for steps in self.ranks.values() for step in steps for flag in step["flags"]}

    @classmethod
    def read(cls, folder, label):
        return cls(label, [(int(path.name.split("-")[0]), [json.loads(line) for line in path.read_text().splitlines()
                                                           if line.endswith("}")])  # complete lines
                           for path in Path(folder).glob("*.jsonl")])

    def at(self, number):
        """Return each rank's record of a step, the distinct rows of all ranks, and all samples, sorted."""
        states = [steps[number] for steps in self.ranks.values()]
        rows = {}
        for state in states[::-1]:  # equal rows on several ranks are one parameter, but on one rank they are several
            seen = []
            for row in state["rows"]:
                rows[str(row[:3]), seen.count(str(row[:3]))] = row
                seen.append(str(row[:3]))
        return states, list(rows.values()), sorted(sample for state in states for sample in state["samples"])

    def kinds(self, rank):
        return [event["event"] for event in self.events[rank]]

    def held(self):
        """Return rank 0's buffers and averages before each step and at the end, each [[name, shape, digest], ...]."""
        events = next(iter(self.events.values()))
        return [event["held"] for event in events if event["event"] in ("step", "end")]

    def join(self, other):
        """Replace equal slices of a tensor on consecutive ranks by the full tensor, if `other` starts with it."""
        for states, whole in zip(zip(*self.ranks.values()), next(iter(other.ranks.values()))):
            for place, (*slices, target) in enumerate(zip(*[state["rows"] for state in states], whole["rows"])):
                alike = all(row.shape == slices[0].shape for row in slices)  # stages of a pipeline differ
                for axis, (part, total) in enumerate(zip(slices[0].shape, target.shape) if alike else ()):
                    count = max(1, total // max(1, part))
                    blocks = [joined(slices[n:n + count], axis) for n in range(0, len(slices), count)]
                    if count > 1 and all(row.shape == target.shape and equal(row.start, target.start)
                                         for row in blocks):
                        for n, state in enumerate(states):
                            state["rows"][place] = blocks[n // count]


def joined(slices, axis):
    """Return the row of a tensor, given the rows of its equal slices along an axis."""
    row, size = slices[0], slices[0].shape[axis]

    def join(digests):
        wave = sum(complex(*digest[1:]) * cmath.rect(1, n * size * FREQUENCIES[axis])
                   for n, digest in enumerate(digests))
        return [math.hypot(*[digest[0] for digest in digests]), wave.real, wave.imag]

    return Row(row.name, [*row.shape[:axis], size * len(slices), *row.shape[axis + 1:]],
               join([part.start for part in slices]), row.rate, join([part.grad for part in slices]),
               join([part.value for part in slices]))


def equal(left, right):
    return len(left) == len(right) and all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-6) for pair in zip(left, right))


def match(left, right):
    """Return pairs of rows that belong to the same parameter: by name and shape, by order, or by initial values."""
    named = {str(row[:2]): row for row in right}
    if len(named) == len(left) == len(right) and {str(row[:2]) for row in left} == set(named):
        return [(row, named[str(row[:2])]) for row in left]
    if [row[1] for row in left] == [row[1] for row in right]:
        return list(zip(left, right))
    return [(row, other) for row in left for other in right if row[1] == other[1] and equal(row[2], other[2])]


def worst(pairs, column, floor=1e-6):
    """Return the greatest relative difference of a column's digests, and the name of its parameter."""
    pairs = [(one.name, getattr(one, column), getattr(two, column)) for one, two in pairs]
    least = floor * math.hypot(*[one[0] for _, one, _ in pairs]) + 1e-300  # anything smaller is rounding error
    found = [(gap(one, two, least), name) for name, one, two in pairs]
    return max(found, default=(0.0, None))


def gap(one, two, least=1e-300):
    """Return the relative difference of two digests; infinity if only one of them is finite."""
    gaps = [0.0 if x == y or x != x and y != y else abs(x - y) for x, y in zip(one, two)]
    value = max(gaps) and max(gaps) / max(one[0], two[0], least)
    return math.inf if math.isnan(value) else value
