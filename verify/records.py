"""What the ranks of one command recorded, and how the parameters of two commands correspond."""
import bisect
import json
import math
import statistics
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

EQUAL = 1e-6  # two digests are equal up to this relative difference
DIVERGED = 1e12  # a greater norm of a weight is that of a run that diverges
NOISE = 1e-6  # a smaller fraction of the norm of all tensors is rounding error
ZERO = 1e-12  # a gradient of a smaller fraction is the rounding error of one that is zero, in float64
REACHED = 2  # as in recording.py
INPUTS = -1  # in place of a loader's number: these samples are inputs of models
LEAVES = -2  # such inputs that need a gradient: points of a PINN, or what a stage of a pipeline has received
QUIET = "no_grad "  # precedes "input" or "output" of a call without gradients, as of a teacher or a policy
FROZEN = "frozen"  # in place of "weights": those that need no gradient
CONSTANT = "constant"  # in place of "input" or "output": what enters a loss besides the outputs of modules
PRODUCTS = "Addmm Baddbmm Bmm Dot Mm Mul Mv".split()  # nodes of a graph that are linear in each of two factors
UNNAMED = "parameter"  # the name of a parameter that no module has
WEIGHT = "weight "  # precedes the name of a module's parameter that no optimizer holds
ELSEWHERE = ", which does not hold these weights,"  # in a text on stale gradients: of the optimizer that has stepped
UNKNOWN, MIXED = [1.0, 0.0, 0.0], [math.nan]  # a gradient's digest and a rate that were not recorded
TWINS = 64  # so many tensors with equal initial values are candidates for one tensor
CACHED = 4  # so many steps are in memory with their rows; they are compared in order


class Row(NamedTuple):
    """One parameter in one step. A digest is [norm, projection, projection]."""

    name: str
    shape: list  # of integers
    start: list  # digest of the initial value
    rate: list  # one number: the learning rate
    grad: list  # digest
    value: list  # digest after the step
    part: list = None  # if the tensor is split over ranks: an ID of this part, and its share of the tensor
    reach: int = REACHED  # whether autograd has reached it in this step
    options: dict = {}  # {option of its optimizer, such as weight_decay: value as text}, and "group"
    computed: list = None  # digest of the gradient after the last backward pass, if recorded


class Run:
    """The records of one command: for each rank, its steps and all its events, in order.

    The rows of a step stay in the files until at() reads them, so memory does not grow with the size of the model.
    """

    def __init__(self, label, events, extra=None):
        """`events` has a pair for each process that wrote a file: its rank, and the list of its events.

        `extra` is that of the first run if this run resumes it: then it may skip batches before its first step.
        """
        self.label, self.ranks, self.events, self.doubled, self.cache = label, {}, {}, False, {}
        self.cut = 1  # the greatest number of parts of one tensor
        self.holds = False  # whether buffers or averages were recorded in a step that was read
        tables = {str([step.get("table") for step in found if step["event"] == "step"][:1]) for _, found in events}
        for rank, found in sorted(events, key=lambda pair: pair[0]):
            self.doubled |= rank in self.ranks
            self.events[rank] = found
            steps = steps_of(found)
            for step in steps:  # if ranks have other weights, they may be the stages of a pipeline
                step["batches"] = [[max(loader, INPUTS), *batch] for loader, *batch in step["batches"]
                                   if loader != LEAVES or len(tables) == 1]
            self.extra = reads(steps)[1]  # how many more batches are read in the first step
            self.ranks[rank] = in_step(steps, extra)
        self.length = min(map(len, self.ranks.values()), default=0)
        if self.flat and not all(self.weights(self.length)):
            self.length -= 1
        self.flags = {flag for steps in self.ranks.values() for step in steps for flag in step["flags"]}

    @classmethod
    def read(cls, folder, label, extra=None):
        paths = Path(folder).glob("*.jsonl")
        return cls(label, [(int(path.name.split("-")[0]), read_events(path)) for path in paths], extra)

    def states(self, number):
        """Return each rank's record of a step, without rows."""
        return [steps[number] for steps in self.ranks.values()]

    def samples(self, number):
        """Return a sorted list of the samples of all ranks in a step."""
        return sorted(sample for state in self.states(number) for sample in state["samples"])

    def at(self, number):
        """Return each rank's record of a step, the distinct rows of all ranks, and a sorted list of all samples."""
        if number not in self.cache:
            states = [load(state) for state in self.states(number)]
            if self.flat:
                for state, first, later in zip(states, self.weights(0), self.weights(number + 1)):
                    rates, values = {row.rate[0] for row in state["rows"]}, {name: value for name, _, value in later}
                    rate = [*rates] if len(rates) == 1 else MIXED
                    state["rows"] = [Row(name.removeprefix(WEIGHT), shape, start, rate, UNKNOWN, values[name])
                                     for name, shape, start in first if name in values]
            else:
                self.join(states)
            self.holds |= any(state.get("unoptimized") for state in states)
            self.cache = {key: self.cache[key] for key in [*self.cache][1 - CACHED:]}
            self.cache[number] = states, distinct(states), self.samples(number)
        return self.cache[number]

    @cached_property
    def flat(self):
        """Whether the optimizers hold only tensors that no module has, and that change the modules' weights.

        Such are the flat shards of ZeRO by hand. Then at() returns the weights, whose gradients are unknown.
        --resume compares the shards and their states instead.
        """
        tables = {id(rows): rows for steps in self.ranks.values() for step in steps
                  for each in (step, *step.get("joined", ())) for rows in [each.get("table", each.get("rows"))]}
        if self.length < 2 or any(name != UNNAMED for rows in tables.values() for name, *_ in rows):
            return False
        states, weights = [load(state) for state in self.states(0)], self.weights(0)
        shapes = [[sorted(str(shape) for _, shape, *_ in rows) for rows in part]
                  for part in ([state["rows"] for state in states], weights)]
        return (all(weights) and any(row.grad[0] for state in states for row in state["rows"])
                and shapes[0] != shapes[1] and weights != self.weights(1) and not any(
                    state["states"] for state in states))

    def weights(self, number):
        """Return for each rank the (name, shape, digest) of the modules' weights before a step, or after the last."""
        found = []
        for rank, steps in self.ranks.items():
            last = [event for event in self.events[rank] if event["event"] in ("end", "last")]
            after = load(steps[number]) if number < len(steps) else last[-1] if last else {}
            found.append([row for row in after.get("unoptimized", ()) if row[0].startswith(WEIGHT)])
        return found

    def kinds(self, rank):
        return [event["event"] for event in self.events[rank]]

    def unoptimized(self, rank):
        """Yield a rank's buffers and averages before each step and at the end, once at() has read all steps."""
        for event in self.events[rank]:
            if event["event"] in ("step", "end", "last"):
                skipped = event["event"] == "step" and not self.holds
                yield [] if skipped else load(event)["unoptimized"]

    def trains_apart(self):
        """Return for how many steps the ranks train apart, and the steps before which their weights are equal again.

        This is so in local SGD. The number is 0 if they are never apart, and infinite if they never meet again, or if
        they only take over the weights of rank 0.
        """
        longest, met, since, left = 0, [], {}, {}  # by optimizer: since how many steps, and rank 0's weights before
        for number in range(self.length):
            states = self.states(number)
            key = states[0].get("optimizer")
            if since.get(key) and together(states, "before"):
                copied = same_probes(states[0]["before"], left[key])
                longest = max(longest, math.inf if copied else since[key])
                met.append(number)
                since[key] = 0
            if not alike(states, "after"):
                since[key] = since.get(key, 0) + 1
            elif since.get(key) and together(states, "after"):  # within its step, as by an optimizer that averages
                longest, since[key] = max(longest, since[key]), 0
            left[key] = states[0].get("after")
        return longest or (math.inf if any(since.values()) else 0), met

    def join(self, states):
        """Replace each tensor's parts, which several ranks hold, with the whole tensor."""
        found = {}  # the replicas of each part of each tensor
        for state in states:
            state["parts"] = [row for row in state["rows"] if row.part]
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


def read_events(path):
    """Return the events of a file; a step knows where its rows and the table of its parameters are."""
    events, tables, at = [], {}, 0  # tables: one for each optimizer
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"}\n"):  # else, the program was killed while it wrote this line
                if line.startswith(b'{"event": "rows"'):
                    place = at
                else:
                    event = json.loads(line)
                    if event["event"] == "parameters":
                        tables[event["optimizer"]] = event["rows"]
                    elif event["event"] in ("step", "joined"):
                        event |= {"file": path, "place": place, "table": tables[event["optimizer"]]}
                    events.append(event)
            at += len(line)
    return events


def load(state):
    """Return the record of a step with its rows, which are lists of Row."""
    if "place" in state:
        with open(state["file"], "rb") as file:
            file.seek(state["place"])
            state = {**json.loads(file.readline()), **state}
        state["rows"] = [[*fixed[:3], *moving[:3], fixed[3], moving[3], state["options"][moving[4]], *moving[5:]]
                         for fixed, moving in zip(state["table"], state["rows"], strict=True)]
    parts = [load(part) for part in state.get("joined", ())]
    rows = [Row(*row) for row in state.get("rows", ())] + [row for part in parts for row in part["rows"]]
    states = state.get("states", []) + [each for part in parts for each in part["states"]]
    return {**state, "rows": rows, "states": states}


def steps_of(events):
    """Return the steps of a rank. What optimizers do after one backward pass, such as Muon and AdamW, is one step."""
    steps = []
    for event in events:
        if event["event"] == "step":
            steps.append(event)
        elif event["event"] == "joined":
            steps[-1] |= {"joined": [*steps[-1].get("joined", ()), event]} | {
                name: steps[-1][name] + event[name] for name in ("before", "after", "clips", "flags", "stale")}
    return steps


def reads(steps):
    """Return how many batches most steps of a rank read, and how many more its first step reads."""
    counts = [len(step["batches"]) for step in steps]
    usual = statistics.mode(counts[1:] or counts or [0])
    return usual, sum(counts[:1]) - usual


def in_step(steps, extra=None):
    """Return the steps of a rank. If its loader reads a batch ahead, move each batch to the step that trains on it."""
    usual, more = reads(steps)
    if extra is not None and 0 <= extra < more:
        steps[0]["batches"], more = steps[0]["batches"][-usual - extra:], extra
    shifted, ahead = usual and more == 1, []
    for step in steps:
        batches = [*ahead, *step["batches"]]
        ahead = batches[usual:] if shifted else []
        step["batches"] = batches[:usual] if shifted else batches
        join_samples(step)
    return steps


def join_samples(step, padding=None):
    """Note the loader, the samples and the indices of each batch of a step (`read`), and all samples and indices.

    `padding` is that of without_padding().
    """
    step["read"] = []
    for loader, _, samples, ends, indices in step["batches"]:
        added = sum(padding[loader, part] * ones for part, (_, _, ones) in enumerate(ends)) if padding else 0
        step["read"].append((loader, [sample - added for sample in samples], indices))
    step["samples"] = [sample for _, samples, _ in step["read"] for sample in samples]
    step["indices"] = [index for *_, indices in step["read"] for index in indices]


def without_padding(*runs):
    """Subtract from the digest of each sample what padding adds to it.

    In each part of a loader's batches, padding is the number that ends most rows of all runs twice.
    """
    steps = [step for run in runs for steps in run.ranks.values() for step in steps]
    rows = {}  # {(loader, part): {number: how many rows it ends}}
    for loader, part, (number, count, _) in ((loader, part, end) for step in steps
                                             for loader, _, _, ends, _ in step["batches"]
                                             for part, end in enumerate(ends)):
        rows.setdefault((loader, part), Counter())[number] += count
    padding = {key: max(sorted(counts), key=counts.get) for key, counts in rows.items()}
    for step in steps:
        join_samples(step, padding)


def only_loaders(run, loaders):
    """Leave out the samples of all other loaders, in all steps of a run."""
    for state in (state for steps in run.ranks.values() for state in steps):
        kept = [loader in loaders for loader, samples, _ in state["read"] for _ in samples]
        for field in ("samples", "labels"):  # the labels are those of other steps if a loader reads ahead
            state[field] = [value for value, keep in zip(state[field], kept) if keep] * (len(state[field]) == len(kept))
        state["indices"] = [index for loader, _, indices in state["read"] for index in indices if loader in loaders]
    run.cache = {}


def distinct(states):
    """Return the rows of all ranks. On several ranks, equal rows are one parameter; on one rank, they are several."""
    rows = {}
    for state in states:
        seen, copy = Counter(), are_copies(states[0]["rows"], state["rows"])
        for row in () if rows and copy else state["rows"]:
            look = str(row[1:3])
            key = look, seen[look]
            seen[look] += 1
            while not copy and key in rows and gap(rows[key].grad, row.grad) > EQUAL:
                key = *key, "of another stage"
            rows.setdefault(key, row)
    return list(rows.values())


def are_copies(rows, others):
    """Return whether two ranks have the same parameters, up to rounding, as after a step to a neighbour and back."""
    return len(rows) == len(others) and all(
        one[:2] == two[:2] and gap(one.start, two.start) < EQUAL for one, two in zip(rows, others))


def alike(states, when):
    """Return whether some parameters, the same ones on each rank, are equal on all ranks before or after a step."""
    return all(same_probes(states[0].get(when), state.get(when)) for state in states)


def together(states, when):
    """Return whether ranks that were apart have met: what has diverged, to NaN or a huge number, has not."""
    return alike(states, when) and all(norm < DIVERGED for _, _, (norm, *_) in states[0].get(when) or ())


def same_probes(ours, theirs):
    return ours == theirs or bool(ours and theirs) and all(
        one[:2] == two[:2] and gap(one[2], two[2]) < EQUAL for one, two in zip(ours, theirs))


def joined(slices):
    def join(digests):
        norms, *waves = zip(*digests)
        return [math.hypot(*norms), *map(sum, waves)]

    return slices[0]._replace(part=None, **{column: join([getattr(part, column) for part in slices])
                                           for column in ("start", "grad", "value")})


def equal(left, right):
    pairs = zip(left, right)
    return len(left) == len(right) and all(math.isclose(x, y, rel_tol=EQUAL, abs_tol=EQUAL) for x, y in pairs)


class Starts:
    """Rows by their shape and initial value, so that the time to find one does not grow with the number of rows."""

    def __init__(self, rows):
        self.rows, self.places = rows, {}
        for place, row in enumerate(rows):
            self.places.setdefault(self.key(row, row.start[0]), []).append(place)

    def key(self, row, size):
        return str(row.shape), f"{size:.4g}"

    def alike(self, row, number=0):
        """Return the places of rows with the shape and the initial value of `row`: at most TWINS, near `number`."""
        size, margin = row.start[0], 2 * EQUAL * max(1, row.start[0])
        found = []
        for key in {self.key(row, near) for near in (size - margin, size, size + margin)}:
            places = self.places.get(key, [])
            middle = bisect.bisect(places, number)
            found += [place for place in places[max(0, middle - TWINS):middle + TWINS]
                      if equal(row.start, self.rows[place].start)]
        return sorted(found, key=lambda place: abs(place - number))[:TWINS]

    def take(self, place):
        """Leave a row out from now on."""
        self.places[self.key(self.rows[place], self.rows[place].start[0])].remove(place)


def match(left, right):
    """Return pairs of rows of the same parameter, matched by name and shape, by initial values, or by order."""
    named = {str(row[:2]): row for row in right}
    if len(named) == len(left) == len(right) and {str(row[:2]) for row in left} == set(named):
        return [(row, named[str(row[:2])]) for row in left]
    pairs, starts = [], Starts(right)
    for number, row in sorted(enumerate(left), key=lambda pair: -pair[1].grad[0]):  # gradients that are noise come last
        alike = starts.alike(row, number)
        if alike:  # several constant tensors, such as norms, may match: take the nearest gradient
            nearest = min(alike, key=lambda place: apartness(row.grad, right[place].grad))
            starts.take(nearest)
            pairs.append((number, row, right[nearest]))
    pairs = [(one, two) for _, one, two in sorted(pairs, key=lambda found: found[0])]
    if len(pairs) < len(right) and [row[1] for row in left] == [row[1] for row in right]:
        return list(zip(left, right))
    return pairs


def apartness(one, two):
    """Return how far apart the directions of two gradients are, and whether the gradients differ.

    Scalars only have two directions.
    """
    directions = gap(unit(one), unit(two))
    return directions if directions > EQUAL else 0.0, not equal(one, two)


def unit(digest):
    """Return the digest of a tensor divided by its norm, unless this is 0."""
    return [value / (digest[0] or 1) for value in digest]


def worst(pairs, column, floor=NOISE):
    """Return the greatest relative difference in `column` between A and B over all pairs, and the parameter's name."""
    pairs = [(one.name, getattr(one, column), getattr(two, column)) for one, two in pairs]
    least = floor * math.hypot(*[one[0] for _, one, _ in pairs]) + 1e-300  # anything smaller is rounding error
    found = [(gap(one, two, least), name) for name, one, two in pairs]
    return max(found, default=(0.0, None))


def trained(pairs):
    """Leave out the tensors whose gradient is zero but for rounding errors, as that of the bias of attention's keys.

    Adam makes a whole update of the error, which has no effect on the outputs.
    """
    total = math.hypot(*[one.grad[0] for one, _ in pairs])
    return [pair for pair in pairs if not 0 < max(row.grad[0] for row in pair) < ZERO * total]


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
