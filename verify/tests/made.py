"""Runs of a few steps, made by hand for tests of the rules."""
from verify.records import Run, join_samples


def made(label, *ranks):
    """Return a run of one step; each rank is a list of (name, shape, start, gradient, value) or of (name, shape)."""
    step = {"event": "step", "batches": [[0, [], [1.0, 2.0], [], []]], "losses": [1.0], "clips": [], "flags": [],
            "resting": 0, "unoptimized": [], "passed": [], "sites": [], "labels": [], "size": 2, "lost": [],
            "stale": [], "counts": [], "weights": [], "graphs": 0, "replicas": False, "optimizer": 0}
    zero = [[0.0] * 3]
    return Run(label, [(rank, [{**step, "rows": [[name, shape, *(more or zero)[:1], [0.1], *(more[1:] or zero * 2)]
                                                 for name, shape, *more in rows]}])
                       for rank, rows in enumerate(ranks)])


def differing(a, *b):
    """Return two runs of one step with other gradients. `a` and `b` have what is special in the state of each rank."""
    runs = []
    for label, states, grad in (("A", [a], [1.0, 1.0, 1.0]), ("B", b, [1.0, 2.0, 3.0])):
        rows = [("v", [2], [1.0] * 3, grad, [1.0] * 3), ("w", [3], [1.0] * 3, [2.0] * 3, [1.0] * 3)]
        runs.append(made(label, *[rows] * len(states)))
        for state, change in zip(runs[-1].states(0), states):
            state |= change
            join_samples(state)
    return runs


def batch(*samples, loader=0, indices=()):
    return {"batches": [[loader, [], [*samples], [], [*indices]]]}


def preceded(runs, *samples):
    """Insert a step with equal gradients before the only step of two runs; `samples` has those of each rank."""
    for steps, found in zip([steps for either in runs for steps in either.ranks.values()], samples):
        rows = [[*row[:4], [1.0] * 3, row[5]] for row in steps[0]["rows"]]
        steps.insert(0, {**steps[0], **batch(*found, loader=steps[0]["batches"][0][0]), "rows": rows})
        join_samples(steps[0])
    for either in runs:
        either.length = 2
    return runs
