"""Kill a command, resume it, and name what the resumed run has lost, compared with a run that was not killed."""
import json
import math
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from .comparing import HALF, LIMITS, compare_runs, float64_fails, limits_of, refuse
from .difference import loss_of
from .explaining import options_that_differ
from .records import NOISE, Run, apart, equal, gap, match, without_padding, worst
from .running import record

LOST = json.loads(Path(__file__).with_name("lost.json").read_text())  # the remedy, the pitfall, the block to copy


def resume(command, other, folder, paths, sent=None, kill_after=0, steps=0, timeout=600.0, resting=()):
    """Run a command, run it again and kill it, resume it with the command `other`, and return the report.

    `paths` has the outputs of the commands, which are deleted. The signal `sent` takes the place of SIGKILL.
    """
    def run(command, steps=0, sent=None, extra=None):
        into = Path(tempfile.mkdtemp(dir=folder))
        failure = record(command, into, timeout, sent, steps=steps, native=native, resting=resting,
                         saves=[str(path.resolve()) for path in paths])
        return Run.read(into, "the run", extra), failure

    notes = []
    for native in (False, True):
        remove(paths)
        first, failure = run(command, steps)
        saved, names = saves(first), " ".join(map(str, paths))
        report = {"verdict": "same", "cause": None, "step": None, "parameter": None, "difference": 0.0, "message": "",
                  "precision": "own" if native else "float64", "steps": [first.length], "ranks": [len(first.ranks)],
                  "killed": None, "resumed": None, "saves": saved, "notes": notes}
        if not native and (failure or first.flags & {"torch.float32", *HALF}):
            notes = [float64_fails([failure], [first.length])] * bool(failure)
            continue
        if failure:
            return refuse({**report, "notes": []}, f"the command failed: {failure}")
        if not first.length or first.doubled:
            return refuse(report, "the command took no optimizer step, or its processes did not join one group")
        killed = kill_after or choose(first, sent)
        if not sent and not [step for step in saved if step < (killed or first.length)]:
            when = f"; the first change came after step {saved[0]}" if saved else ""
            return refuse(report, f"no file in {names} changed before step {killed or first.length}{when}: kill later, "
                          "or save more often")
        if killed >= first.length:
            return refuse(report, f"the command takes {first.length} steps: use a smaller --kill-after than {killed}")
        remove(paths)
        second, failure = run(command, killed, sent)
        report["killed"] = killed
        if not killed <= second.length < first.length:
            when = "to its end after the signal" if second.length >= killed else f"not to step {killed}: {failure}"
            return refuse(report, f"the second run trained {when}")
        same = compare_runs(first, second, native, again=True)
        if same["parameter"]:
            return refuse(report, f"two runs of the command differ at step {same['step']}: set its seeds", same["step"])
        third, failure = run(other, steps, extra=first.extra)
        if third.length or not failure:
            break  # else, it may have failed because of float64
        notes = [float64_fails([failure], [third.length])]
    report |= {"steps": [run.length for run in (first, second, third)], "ranks": [len(first.ranks), len(third.ranks)]}
    cause, fact, *where = lost(first, third, limits_of(native, first, third), report, failure, bool(steps)) or ("", "")
    if cause == "not-resumed" and sent and not saves(second):
        cause, fact = "not comparable", f"the signal after step {killed} left nothing in {names}: kill later"
    if cause == "not comparable":
        return refuse(report, fact)
    if cause:
        message = f"{fact}: {LOST[cause]['remedy']}" + f"\n{failure}" * (cause == "failed")
        report["notes"] = report["notes"] if cause != "failed" else []
        found = dict(zip(("step", "parameter", "difference"), where))
        if found.get("difference") == math.inf:
            found["difference"] = None  # the other run has no such tensor
        return {**report, "verdict": "different", "cause": cause, "message": message, **found}
    twice, count = second.length - report["resumed"], min(third.length, first.length - report["resumed"])
    exact = f"greatest relative difference {report['difference']:.1e}" if report["difference"] else "bit for bit"
    verdict = "alike" if report["difference"] > LIMITS["own"].low else "same"
    return {**report, "verdict": verdict,
            "message": f"{count} steps from step {report['resumed'] + 1} on, {exact}; {twice} done twice"}


def remove(paths):
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def saves(run):
    """Return the numbers of steps after which a file was new or changed, other than by growing."""
    return sorted({event["after"] for events in run.events.values() for event in events
                   if event["event"] == "saved" and event["after"]})


def choose(run, sent):
    """Return the step to kill after: between two saves, and near the middle of the run; 0 if there is none."""
    ends = [*saves(run), run.length]
    middles = [one + (two - one + 1) // 2 for one, two in zip(ends, ends[1:]) if one + 1 < run.length]
    best = min(middles[1:] or middles, key=lambda step: abs(2 * step - run.length), default=0)
    return best or run.length // 2 * bool(sent)


def keyed(rows, values=None):
    """Return {(name, shape, number): row or value}; the number tells rows with equal names and shapes apart."""
    found, seen = {}, Counter()
    for row, value in zip(rows, rows if values is None else values):
        place = row.name, str(row.shape)
        found[(*place, seen[place])] = value
        seen[place] += 1
    return found


class Resumed:
    """A resumed run, to be compared with the first one, which was not killed."""

    def __init__(self, first, run, limits):
        self.first, self.run, self.limits, self.difference = first, run, limits, 0.0
        self.same = len(first.ranks) == len(run.ranks)  # then compare each rank with itself
        self.starts = {(rank, key): row.start for rank, state in zip(run.ranks, run.at(0)[0])
                       for key, row in keyed(state["rows"]).items()}
        *_, self.step, self.unfit, self.tables = min(self.fits(), key=lambda fit: fit[:4], default=(
            0, dict.fromkeys(self.starts, math.inf), dict.fromkeys(first.ranks, {})))

    def fits(self):
        """Yield how well the weights with which the run starts fit those after each step of the first run.

        The last values are the step, {(rank, key): difference} of the tensors that do not fit, and the step's weights.
        """
        names = {key[0] for _, key in self.starts}
        for step, tables in enumerate(weights(self.first)):
            now = self.first.at(step)[0] if step < self.first.length else []
            if now and {row.name for state in now for row in state["rows"]} != names:
                continue  # a step of another optimizer
            gaps = {place: self.nearest(tables, *place, start) for place, start in self.starts.items()}
            unfit = {place: value for place, value in gaps.items() if value > self.limits.low}
            moved = not now or not equal(self.first.samples(step), self.run.samples(0))
            most = max(gaps.values())  # weights that a rate of 0 has not moved fit several steps: compare the samples
            yield len(unfit), most * (not unfit), moved, most, step, unfit, tables

    def nearest(self, tables, rank, key, digest):
        """Return a digest's relative difference from that of tensor `key` on its rank or, if ranks changed, on any."""
        return min((gap(table[key], digest, 1e-12) for place, table in tables.items()
                    if key in table and (place == rank or not self.same)), default=math.inf)

    def only(self, ranks):
        """Return text that names some ranks, unless these are all ranks of the run."""
        return f" (only on ranks {sorted({*ranks})})" * (len({*ranks}) < len(self.run.ranks))


def weights(run):
    """Yield {rank: {key: digest}} before each step and after the last one."""
    tables = {rank: {} for rank in run.ranks}
    for step in range(run.length):
        rows = dict(zip(run.ranks, (keyed(state["rows"]) for state in run.at(step)[0])))
        tables = {rank: {key: row.start for key, row in rows[rank].items()} | table for rank, table in tables.items()}
        yield tables
        tables = {rank: table | {key: row.value for key, row in rows[rank].items()} for rank, table in tables.items()}
    yield tables


def lost(first, third, limits, report, failure, some):
    """Return None, or the cause, the evidence, and where the first difference is: step, parameter, difference.

    `some` is true if the runs were to end early. The report gets the step from which the run was resumed.
    """
    if failure and not third.length or third.doubled:
        return "failed", "the command fails when it is to resume"
    if not third.length:
        return "step-counter", "the resumed command takes no step, as if it had finished", first.length
    without_padding(first, third)
    resumed = Resumed(first, third, limits)
    step = report["resumed"] = resumed.step
    if resumed.unfit:
        (_, key), most = max(resumed.unfit.items(), key=lambda pair: pair[1])
        return "weights", wrong_weights(resumed), step + 1, key[0], most
    if not step:
        return "not-resumed", "the command started from the beginning", 1
    left = first.length - step
    if later := step_of_state(resumed):
        return "weights", (f"all tensors are those after step {step}, but the optimizer's state is that after step "
                           f"{later}, as if the tensors came from another file, such as the best one"), step + 1
    for number in range(min(left, third.length)):
        answer = differ(resumed, number)
        report["difference"] = resumed.difference
        last = number + 1 == min(left, third.length)
        if answer and answer[0] == "buffers" and not last and not differ(resumed, number + 1):
            report["notes"].append(f"{answer[1]} before step {step + number + 1}, but agrees one step later")
            continue
        if answer:
            return *answer[:2], step + number + 1, *answer[2:]
    if failure:
        return "failed", f"the resumed command fails after step {step + third.length}"
    if left != third.length and not some:
        return ("step-counter", f"the resumed run takes {third.length} steps from step {step + 1} on, the first run "
                f"{left}", step + 1 + min(left, third.length))
    ends = [[event["unoptimized"] for event in next(iter(run.events.values())) if event["event"] == "end"]
            for run in (first, third)]
    if not some and all(ends) and (found := apart(*ends[0], *ends[1], limits.high, ("average of", "buffer"))):
        return "buffers", f"at the end, {found[0]} differs", first.length, *found
    return None


def wrong_weights(resumed):
    """Return text that says which tensors do not fit the step that most of them fit, and what they are instead."""
    first, unfit = resumed.first, resumed.unfit
    then = dict(zip(first.ranks, first.at(min(resumed.step, first.length - 1))[0]))
    rows = {rank: keyed(state["rows"]) for rank, state in then.items()}
    initial = [rows.get(rank, rows[0]).get(key) for rank, key in unfit]
    averages = {(rank, name): digest for rank, state in then.items() for name, _, digest in state["unoptimized"]}
    known = {"start again as in the first step": [row and row.start for row in initial],
             "are those of rank 0": [resumed.tables[0].get(key) for _, key in unfit],
             "are averages of the weights": [averages.get((rank, f"average of {key[0]}")) for rank, key in unfit]}
    starts = [resumed.starts[place] for place in unfit]
    what = next((what for what, digests in known.items() if all(
        digest and gap(digest, start) <= resumed.limits.low for digest, start in zip(digests, starts))),
        f"are not those of any step; the nearest is step {resumed.step}")
    count, total = (len({key for _, key in places}) for places in (unfit, resumed.starts))
    return f"{count} of {total} tensors {what}{resumed.only([rank for rank, _ in unfit])}"


def differ(resumed, number):
    """Return the cause, the evidence, the parameter and the difference if the run's step differs, or None."""
    first, limits, same = resumed.first, resumed.limits, resumed.same
    limit = min(max(limits.low, 1000 * resumed.difference), limits.high)
    left, right = first.at(resumed.step + number)[0], resumed.run.at(number)[0]
    ours, theirs = ({row.name for state in states for row in state["rows"]} for states in (left, right))
    if ours != theirs:
        return "step-counter", f"the resumed run updates {min(theirs)}, the first run {min(ours)}"
    if same:
        pairs = [pair for one, two in zip(left, right) for pair in zip(one["rows"], two["rows"])]
    else:
        rows = tensors(left, resumed.tables.values()), tensors(right, [{}] * len(right))
        pairs = match(*rows)
        if len(pairs) < max(map(len, rows)):
            return "not comparable", "other numbers of processes split tensors by hand in another way"
    rate, grad, value = (worst(pairs, column, floor)[::-1] for column, floor in (
        ("rate", NOISE), ("grad", limits.floor), ("value", NOISE)))
    if rate[1] > 1e-9:
        one, two = next(pair for pair in pairs if worst([pair], "rate")[0] > 1e-9)
        back = next((now + 1 for now in range(first.length) for state in first.at(now)[0] for row in state["rows"]
                     if (row.name, row.rate) == (two.name, two.rate)), None)
        old = f", that of step {back}" if back else ""
        return "learning-rate", f"the rate of {one.name} is {two.rate[0]:.6g}{old}, not {one.rate[0]:.6g}", *rate
    if found := other_state(resumed, left, right, limit):
        return "optimizer-state", *found
    if options := options_that_differ(pairs, "the first run", "the resumed run"):
        return "optimizer-state", options, None, None
    one, two = (states[0].get("scalers") for states in (left, right))
    if one != two:
        return "scaler", f"the first run has {one}, the resumed run {two}"
    if found := other_samples(resumed, number):
        return found
    kinds = ("buffer", "average", "other", "weight") if same else ("average of",)
    for rank, (one, two) in enumerate(zip(left, right if same else right[:1])):
        if found := apart(one["unoptimized"], two["unoptimized"], limit, kinds):
            return "buffers", f"{found[0]} differs on rank {rank}", *found
    resumed.difference = max(resumed.difference, grad[1], value[1])
    if grad[1] > limit:
        drawn = any("random" in state["flags"] for state in left + right)
        if drawn and not same:
            return "not comparable", "the model draws random numbers, and each process draws its own: see --eval-mode"
        if fact := other_draws(first.states(resumed.step + number - 1), left, right, drawn):
            return "random-state", fact, *grad
        one, two = (sum(map(loss_of, states)) / len(states) for states in (left, right))
        return "unknown", f"mean loss {one:.9g} in the first run, {two:.9g} in the resumed one", *grad
    if value[1] > limit:
        return "optimizer-state", "equal gradients, but different updates", *value
    return None


def tensors(states, tables):
    """Return the rows of all ranks, each tensor once, with the weights of `tables`, if they are there, as `start`."""
    found = {}
    for state, table in zip(states, tables):
        for key, row in keyed(state["rows"]).items():
            start = table.get(key, row.start)
            found[(key, *[f"{value:.9g}" for value in start])] = row._replace(start=start)
    return [*found.values()]


def other_state(resumed, left, right, limit):
    """Return the evidence, the parameter and the difference if the optimizer's state differs before a step, or None."""
    ours, theirs = ([keyed(state["rows"], state.get("states", [])) for state in states] for states in (left, right))
    wrong = {}
    for rank, key, state in [(rank, *pair) for rank, table in enumerate(theirs) for pair in table.items()]:
        known = {place: table[key] for place, table in enumerate(ours) if key in table}
        for name in {name for other in known.values() for name in other}:
            found = resumed.nearest(known, rank, name, state[name]) if name in state else math.inf
            if found > (limit if resumed.same else max(limit, 1e-6)):
                wrong[rank, key, name] = found
    if wrong:
        (_, key, _), most = max(wrong.items(), key=lambda pair: pair[1])
        what = "is missing" if min(wrong.values()) == math.inf else "differs"
        names, count = sorted({name for *_, name in wrong}), len({key for _, key, _ in wrong})
        fact = f"{', '.join(names)} of {count} tensors {what}{resumed.only([rank for rank, *_ in wrong])}"
        return fact, key[0], most
    return None


def step_of_state(resumed):
    """Return after which later step of the first run the optimizer's state is that with which the resumed one starts.

    Return None if it fits the weights, or no step.
    """
    start = resumed.run.at(0)[0]
    step = next((step for step in range(resumed.step, resumed.first.length)
                 if not other_state(resumed, resumed.first.at(step)[0], start, resumed.limits.low)), None)
    return step if step != resumed.step else None


def other_samples(resumed, number):
    """Return the cause and the evidence if the resumed run reads other samples in a step, or None."""
    first, run, same, step = resumed.first, resumed.run, resumed.same, resumed.step

    def read(run, now, rank):  # by one rank in its order or, if ranks changed, by all ranks
        return text(run.states(now)[rank]["samples"] if same else run.samples(now))

    def text(values):
        return [f"{value:.6g}" for value in values]

    ranks = [rank for rank in range(len(run.ranks) if same else 1) if not equal(*(
        sorted(map(float, found)) for found in (read(first, step + number, rank), read(run, number, rank))))]
    if not ranks:
        return None
    ours, mine, where = read(first, step + number, ranks[0]), read(run, number, ranks[0]), resumed.only(ranks) * same
    if len(mine) != len(ours):
        return "data", f"a step reads {len(mine)} samples, not {len(ours)}{where}"
    if ranks == [*range(1, len(run.ranks))] and mine == read(run, number, 0):
        return "data", "all ranks read the samples of rank 0"
    every = [read(first, now, ranks[0]) for now in range(first.length)]
    expected, every = sum(map(len, every[:step + number])), sum(every, [])
    places = [place - expected for place in range(len(every)) if every[place:place + len(mine)] == mine]
    if places:
        shift = min(places, key=abs)
        word = f"skips {shift} samples" if shift > 0 else f"reads {-shift} samples again"
        return "data", f"{'each rank' if same else 'the run'} {word}{where}"
    both = first.states(step + number), run.states(number)
    labels = [sorted(sum((state["labels"][-len(state["samples"]):] for state in states), [])) for states in both]
    if any(labels[0]) and equal(*labels):
        return "random-state", f"the samples have equal labels, but other values{where}, as after random augmentation"
    rest = range(number, min(first.length - step, run.length))
    counts = [Counter(text(sum((found.samples(since + now) for now in rest), [])))
              for found, since in ((first, step), (run, 0))]
    fact = ("the same samples in another order" if counts[0] == counts[1] else "other samples") + where
    drawn = other_draws(first.states(step + number - 1), *both)
    return "data", fact + (f", which may be drawn from a random state that differs: {drawn}" if drawn else "")


def other_draws(before, left, right, drawn=True):
    """Return how the state of a random generator differs, or an empty string.

    A generator that the first run does not use, by its states `before`, tells nothing. `drawn` is true if the model
    draws from torch's.
    """
    before, one, two = ([state.get("random", {}) for state in part] for part in (before, left, right))
    for name in one[0] if len(left) == len(right) else ():
        ranks = [rank for rank, state in enumerate(two) if state.get(name) != one[rank].get(name)]
        if not ranks or (not drawn if "torch" in name else before[ranks[0]].get(name) == one[ranks[0]].get(name)):
            continue
        if len(two) > 1 and len({state.get(name) for state in two}) == 1:
            return f"all ranks have {'rank 0' if 0 not in ranks else 'one'}'s state of {name}"
        return f"the state of {name} differs on ranks {ranks}"
    return ""
