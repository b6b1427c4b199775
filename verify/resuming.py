"""Kill a command, resume it, and name what the resumed run has lost, compared with a run that was not killed."""
import json
import math
import tempfile
from collections import Counter
from pathlib import Path

from .comparing import HALF, LIMITS, compare_runs, float64_fails, limits_of, refuse
from .explaining import loss_of, options_that_differ
from .records import Run, apart, equal, gap, match, without_padding, worst
from .running import record

LOST = json.loads(Path(__file__).with_name("lost.json").read_text())  # what is found, and the remedy


def resume(command, other, folder, paths, clear, sent=None, kill_after=0, steps=0, timeout=600.0, resting=()):
    """Run a command, run it again and kill it, resume it with the command `other`, and return the report.

    `paths` has the outputs of the commands, which `clear()` deletes. The signal `sent` takes the place of SIGKILL.
    """
    def run(command, steps=0, sent=None, extra=None):
        into = Path(tempfile.mkdtemp(dir=folder))
        failure = record(command, into, timeout, sent, steps=steps, native=native, resting=resting,
                         saves=[str(path.resolve()) for path in paths])
        return Run.read(into, "the run", extra), failure

    notes = []
    for native in (False, True):
        clear()
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
            when = "in time" if not killed or not saved else (
                f"before step {killed}; the first change came after step {saved[0]}")
            return refuse(report, f"no file in {names} changed {when}: kill later, or save more often")
        if killed >= first.length:
            return refuse(report, f"the command takes {first.length} steps: use a smaller --kill-after than {killed}")
        clear()
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
        return {**report, "verdict": "different", "cause": cause, "message": message, **found}
    twice, count = second.length - report["resumed"], min(third.length, first.length - report["resumed"])
    exact = f"greatest relative difference {report['difference']:.1e}" if report["difference"] else "bit for bit"
    verdict = "alike" if report["difference"] > LIMITS["own"].low else "same"
    return {**report, "verdict": verdict,
            "message": f"{count} steps from step {report['resumed'] + 1} on, {exact}; {twice} done twice"}


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
        found[row.name, str(row.shape), seen[row.name, str(row.shape)]] = value
        seen[row.name, str(row.shape)] += 1
    return found


def weights(run):
    """Yield {rank: {key: digest}} before each step and after the last one."""
    tables = {rank: {} for rank in run.ranks}
    for step in range(run.length):
        rows = dict(zip(run.ranks, (keyed(state["rows"]) for state in run.at(step)[0])))
        tables = {rank: {key: row.start for key, row in rows[rank].items()} | table for rank, table in tables.items()}
        yield tables
        tables = {rank: table | {key: row.value for key, row in rows[rank].items()} for rank, table in tables.items()}
    yield tables


def nearest(tables, rank, key, digest, same):
    """Return the relative difference of a digest from that of the tensor `key`: on one rank if `same`, or on any."""
    return min((gap(table[key], digest, 1e-12) for place, table in tables.items()
                if key in table and (place == rank or not same)), default=math.inf)


def fit(first, third, limit):
    """Return the step after which the weights were saved with which the resumed run starts, and the weights then.

    If only some of them fit, return the step that most of them fit. Also return the others: {(rank, key): difference}.
    """
    starts = {(rank, key): row for rank, state in zip(third.ranks, third.at(0)[0])
              for key, row in keyed(state["rows"]).items()}
    same, best, names = len(first.ranks) == len(third.ranks), (math.inf,), {row.name for row in starts.values()}
    for step, tables in enumerate(weights(first)):
        now = first.at(step)[0] if step < first.length else []
        if now and {row.name for state in now for row in state["rows"]} != names:
            continue  # a step of another optimizer
        gaps = {place: nearest(tables, *place, row.start, same) for place, row in starts.items()}
        unfit = {place: value for place, value in gaps.items() if value > limit}
        moved = not now or not equal(first.samples(step), third.samples(0))
        most = max(gaps.values())  # weights that a rate of 0 has not moved fit several steps: compare the samples
        if (found := (len(unfit), most * (not unfit), moved, most)) < best[:4]:
            best = (*found, step, unfit, tables)
    return best[4:] if len(best) > 1 else (0, dict.fromkeys(starts, math.inf), {rank: {} for rank in first.ranks})


def lost(first, third, limits, report, failure, some):
    """Return None, or the cause, the evidence, and where the first difference is: step, parameter, difference.

    `some` is true if the runs were to end early. The report gets the step from which the run was resumed.
    """
    if not third.length or third.doubled:
        if failure or third.doubled:
            return "failed", "the command fails when it is to resume"
        return "step-counter", "the resumed command takes no step, as if it had finished", first.length
    without_padding(first, third)
    step, unfit, tables = fit(first, third, limits.low)
    report["resumed"] = step
    if not step and not unfit:
        return "not-resumed", "the command started from the beginning", 1
    if unfit:
        (_, key), most = max(unfit.items(), key=lambda pair: pair[1])
        return "weights", wrong_weights(tables, first, third, step, unfit, limits.low), step + 1, key[0], finite(most)
    left = first.length - step
    for number in range(min(left, third.length)):
        limit = min(max(limits.low, 1000 * report["difference"]), limits.high)
        if answer := differ(first, third, step, number, tables, limits, limit, report):
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


def finite(difference):
    """Return a difference, or None where the other run has no such tensor."""
    return difference if difference < math.inf else None


def wrong_weights(tables, first, third, step, unfit, limit):
    now, then = (dict(zip(run.ranks, run.at(number)[0]))
                 for run, number in ((third, 0), (first, min(step, first.length - 1))))
    mine, theirs = ({rank: keyed(state["rows"]) for rank, state in part.items()} for part in (now, then))
    starts = [mine[rank][key].start for rank, key in unfit]
    averages = {(rank, name[11:]): digest for rank, state in then.items()
                for name, _, digest in state["unoptimized"] if name.startswith("average of ")}
    initial = [theirs.get(rank, theirs[0]).get(key) for rank, key in unfit]
    known = {"start again as in the first step": [row and row.start for row in initial],
             "are those of rank 0": [tables[0].get(key) for _, key in unfit],
             "are averages of the weights": [averages.get((rank, key[0])) for rank, key in unfit]}
    what = next((what for what, digests in known.items() if all(
        digest and gap(digest, start) <= limit for digest, start in zip(digests, starts))),
        f"are not those of any step; the nearest is step {step}")
    return f"{len({key for _, key in unfit})} of {len(mine[0])} tensors {what}" + only(
        [rank for rank, _ in unfit], third)


def only(ranks, run):
    """Return text that names some ranks, unless these are all ranks of the run."""
    return f" (only on ranks {sorted({*ranks})})" * (len({*ranks}) < len(run.ranks))


def differ(first, third, step, number, tables, limits, limit, report):
    """Return the cause, the evidence, the parameter and the difference if two runs differ in a step, or None."""
    left, right = first.at(step + number)[0], third.at(number)[0]
    same = len(left) == len(right)
    names = [{row.name for state in part for row in state["rows"]} for part in (left, right)]
    if names[0] != names[1]:
        return "step-counter", f"the resumed run updates {sorted(names[1])[0]}, the first run {sorted(names[0])[0]}"
    if same:
        pairs = [pair for one, two in zip(left, right) for pair in zip(one["rows"], two["rows"])]
    else:
        starts = tables, {rank: {} for rank in third.ranks}
        rows = [{(key, *[f"{value:.9g}" for value in table.get(key, row.start)]): row._replace(
            start=table.get(key, row.start)) for state, table in zip(part, found.values())
            for key, row in keyed(state["rows"]).items()} for part, found in zip((left, right), starts)]
        pairs = match(*[list(part.values()) for part in rows])
        if len(pairs) < max(map(len, rows)):
            return "not comparable", "other numbers of processes split tensors by hand in another way"
    moved = {column: worst(pairs, column, limits.floor if column == "grad" else 1e-6)[::-1]
             for column in ("rate", "grad", "value")}
    if moved["rate"][1] > 1e-9:
        one, two = next(pair for pair in pairs if worst([pair], "rate")[0] > 1e-9)
        back = [now for now in range(first.length) if any(
            (row.name, row.rate) == (two.name, two.rate) for state in first.at(now)[0] for row in state["rows"])]
        old = f", that of step {back[0] + 1}" if back else ""
        fact = f"the rate of {one.name} is {two.rate[0]:.6g}{old}, not {one.rate[0]:.6g}"
        return "learning-rate", fact, *moved["rate"]
    if found := other_state(left, right, limit, third):
        return "optimizer-state", *found
    if options := options_that_differ(pairs, "the first run", "the resumed run"):
        return "optimizer-state", options, None, None
    one, two = (part[0].get("scalers") for part in (left, right))
    if one != two:
        return "scaler", f"the first run has {one}, the resumed run {two}"
    if found := other_samples(first, third, step, number):
        return found
    for rank, (one, two) in enumerate(zip(left, right) if same else [(left[0], right[0])]):
        kinds = ("buffer", "average", "other", "weight") if same else ("average of",)
        if found := apart(one["unoptimized"], two["unoptimized"], limit, kinds):
            return "buffers", f"{found[0]} differs on rank {rank}", *found
    report["difference"] = max(report["difference"], moved["grad"][1], moved["value"][1])
    if moved["grad"][1] > limit:
        drawn = "random" in {flag for state in left + right for flag in state["flags"]}
        if drawn and not same:
            return "not comparable", "the model draws random numbers, and each process draws its own: see --eval-mode"
        if fact := other_draws(first.states(step + number - 1), left, right, drawn):
            return "random-state", fact, *moved["grad"]
        one, two = (sum(map(loss_of, part)) / len(part) for part in (left, right))
        return "unknown", f"mean loss {one:.9g} in the first run, {two:.9g} in the resumed one", *moved["grad"]
    if moved["value"][1] > limit:
        return "optimizer-state", "equal gradients, but different updates", *moved["value"]
    return None


def other_state(left, right, limit, third):
    """Return the evidence, the parameter and the difference if the optimizer's state differs before a step, or None."""
    tables = [[keyed(state["rows"], state.get("states", [])) for state in part] for part in (left, right)]
    wrong, same = {}, len(left) == len(right)
    for rank, key, mine in [(rank, *pair) for rank, table in enumerate(tables[1]) for pair in table.items()]:
        theirs = {place: table[key] for place, table in enumerate(tables[0]) if key in table}
        for name in {name for state in theirs.values() for name in state}:
            found = nearest(theirs, rank, name, mine[name], same) if name in mine else math.inf
            if found > max(limit, 1e-6 * (not same)):
                wrong[rank, key, name] = found
    if wrong:
        (_, key, _), most = max(wrong.items(), key=lambda pair: pair[1])
        what = "is missing" if min(wrong.values()) == math.inf else "differs"
        names, count = sorted({name for *_, name in wrong}), len({key for _, key, _ in wrong})
        fact = f"{', '.join(names)} of {count} tensors {what}{only([rank for rank, *_ in wrong], third)}"
        return fact, key[0], finite(most)
    return None


def other_samples(first, third, step, number):
    """Return the cause and the evidence if the resumed run reads other samples in a step, or None."""
    def read(run, now, rank):  # by one rank in its order, or by all ranks
        every = [state["samples"] for state in run.states(now)]
        return [f"{value:.6g}" for value in (sorted(sum(every, [])) if rank is None else every[rank])]

    same, both = len(first.ranks) == len(third.ranks), (first.states(step + number), third.states(number))
    ranks = [rank for rank in (range(len(both[1])) if same else [None]) if not equal(*(sorted(map(float, read(
        run, now, rank))) for run, now in ((first, step + number), (third, number))))]
    if not ranks:
        return None
    ours, mine = read(first, step + number, ranks[0]), read(third, number, ranks[0])
    where = only(ranks, third) * same
    if len(mine) != len(ours):
        return "data", f"a step reads {len(mine)} samples, not {len(ours)}{where}"
    if same and 0 < len(ranks) == len(both[1]) - 1 and all(mine == read(third, number, other) for other in range(2)):
        return "data", "all ranks read the samples of rank 0"
    every = [value for now in range(first.length) for value in read(first, now, ranks[0])]
    expected = sum(len(read(first, now, ranks[0])) for now in range(step + number))
    places = [place - expected for place in range(len(every)) if every[place:place + len(mine)] == mine]
    if places:
        shift = min(places, key=abs)
        word = f"skips {shift} samples" if shift > 0 else f"reads {-shift} samples again"
        return "data", f"{'each rank' if same else 'the run'} {word}{where}"
    labels = [sorted(sum((state["labels"][-len(state["samples"]):] for state in part), [])) for part in both]
    if any(labels[0]) and equal(*labels):
        return "random-state", f"the samples have equal labels, but other values{where}, as after random augmentation"
    counts = [Counter(value for now in range(number, min(first.length - step, third.length))
                      for value in read(run, since + now, None)) for run, since in ((first, step), (third, 0))]
    drawn = other_draws(first.states(step + number - 1), *both)
    return "data", ("the same samples in another order" if counts[0] == counts[1] else "other samples") + where + (
        f", which may be drawn from a random state that differs: {drawn}" if drawn else "")


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
