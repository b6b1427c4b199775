"""What the ranks of one command recorded, and how the parameters of two commands correspond."""
import json
import math
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One parameter in one step. A digest is [norm, projection, projection]."""

    name: str
    shape: list  # of integers
    start: list  # digest of the initial value
    rate: list  # one number: the learning rate
    grad: list  # digest
    value: list  # digest after the step
    part: list = None  # if the tensor is split over ranks: an ID of this part, and its share of the tensor


class Run:
    """The records of one command: for each rank, its steps and all its events, in order."""

    def __init__(self, label, events):
        """`events` has a pair for each process that wrote a file: its rank, and the list of its events."""
        self.label, self.ranks, self.events, self.doubled = label, {}, {}, False
        self.cut = 1  # the greatest number of parts of one tensor
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
        """Return each rank's record of a step, the distinct rows of all ranks, and a sorted list of all samples."""
        states = [steps[number] for steps in self.ranks.values()]
        rows, first = {}, [row[:3] for row in states[0]["rows"]]
        for state in states:  # on several ranks, equal rows are one parameter; on one rank, they are several
            seen, copy = [], [row[:3] for row in state["rows"]] == first
            for row in state["rows"]:
                key = str(row[1:3]), seen.count(str(row[1:3]))
                seen.append(key[0])
                while not copy and key in rows and gap(rows[key].grad, row.grad) > 1e-6:
                    key = *key, "of another stage"
                rows.setdefault(key, row)
        return states, list(rows.values()), sorted(sample for state in states for sample in state["samples"])

    def kinds(self, rank):
        return [event["event"] for event in self.events[rank]]

    def unoptimized(self):
        """Return rank 0's buffers and averages before each step and at the end: lists of [name, shape, digest]."""
        events = next(iter(self.events.values()))
        return [event["unoptimized"] for event in events if event["event"] in ("step", "end")]

    def join(self):
        """Replace each tensor's parts, which several ranks hold, with the whole tensor."""
        for states in zip(*self.ranks.values()):
            found = {}  # the replicas of each part of each tensor
            for rows in (state["rows"] for state in states):
                for place, row in enumerate(rows):
                    if row.part:
                        parts = found.setdefault((row.name, str(row.shape)), {})
                        parts.setdefault(row.part[0], []).append((rows, place))
            self.cut = max([self.cut, *map(len, found.values())])
            for block in (block for parts in found.values() for block in zip(*parts.values())):
                slices = [rows[place] for rows, place in block]
                if math.isclose(sum(row.part[1] for row in slices), 1):
                    for rows, place in block:
                        rows[place] = joined(slices)


def joined(slices):
    def join(digests):
        norms, *waves = zip(*digests)
        return [math.hypot(*norms), *map(sum, waves)]

    row = slices[0]
    return Row(row.name, row.shape, join([part.start for part in slices]), row.rate,
               join([part.grad for part in slices]), join([part.value for part in slices]))


def equal(left, right):
    return len(left) == len(right) and all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-6) for pair in zip(left, right))


def match(left, right):
    """Return pairs of rows of the same parameter, matched by name and shape, by initial values, or by order."""
    named = {str(row[:2]): row for row in right}
    if len(named) == len(left) == len(right) and {str(row[:2]) for row in left} == set(named):
        return [(row, named[str(row[:2])]) for row in left]
    pairs, rest = [], list(right)
    for row in left:
        alike = [other for other in rest if row[1] == other[1] and equal(row[2], other[2])]
        if alike:  # several constant tensors, such as norms, may match: take the nearest gradient
            pairs.append((row, min(alike, key=lambda other: gap(row.grad, other.grad))))
            rest = [other for other in rest if other is not pairs[-1][1]]
    if rest and [row[1] for row in left] == [row[1] for row in right]:
        return list(zip(left, right))
    return pairs


def worst(pairs, column, floor=1e-6):
    """Return the greatest relative difference in `column` between A and B over all pairs, and the parameter's name."""
    pairs = [(one.name, getattr(one, column), getattr(two, column)) for one, two in pairs]
    least = floor * math.hypot(*[one[0] for _, one, _ in pairs]) + 1e-300  # anything smaller is rounding error
    found = [(gap(one, two, least), name) for name, one, two in pairs]
    return max(found, default=(0.0, None))


def gap(one, two, least=1e-300):
    """Return the relative difference of two digests; infinity if only one of them is finite."""
    gaps = [0.0 if x == y or x != x and y != y else abs(x - y) for x, y in zip(one, two)]
    value = max(gaps) and max(gaps) / max(one[0], two[0], least)
    return math.inf if math.isnan(value) else value


def apart(left, right, limit, kinds):
    """Return (name, difference) for a tensor of `kinds` that differs between the two by more than `limit`, or None."""
    theirs = {}
    for name, shape, digest in right:
        theirs.setdefault((name, str(shape)), []).append(digest)  # two averages of the weights have equal names
    for name, shape, digest in left:
        gaps = [gap(digest, other, 1e-12) for other in theirs.get((name, str(shape)), [])]
        if gaps and min(gaps) > limit and name.startswith(kinds):
            return name, min(gaps)
    return None
