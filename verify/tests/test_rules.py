"""Each rule names its cause in runs that are made by hand, and is silent where its evidence is missing."""
from types import SimpleNamespace

import pytest
from made import batch, differing, made, preceded

from verify.comparing import compare_runs
from verify.difference import Difference
from verify.explaining import (
    explain,
    learning_rate,
    mixed,
    optimizer,
    options_that_differ,
    stale,
    unchanged,
    unmatched,
)
from verify.ranks import parts_of, ranks_differ
from verify.records import ELSEWHERE, INPUTS, UNKNOWN, Row, Run, join_samples, match


@pytest.mark.parametrize(("losses", "said"), [([1.0], True), ([], False)])
@pytest.mark.parametrize(("factor", "cause"), [(0.7123, "clip"), (0.5, "scale")])
def test_equal_losses_are_evidence_only_if_there_are_losses(losses, said, factor, cause):
    runs = [made(label, *[[("w", [2], [0.0] * 3, [size] * 3, [1.0] * 3)]] * ranks)
            for label, size, ranks in (("A", 1.0, 1), ("B", factor, 2))]
    for state in runs[0].states(0) + runs[1].states(0):
        state["losses"] = losses
    report = compare_runs(*runs)
    assert report["cause"] == cause and ("equal losses" in report["message"]) == said, report


@pytest.mark.parametrize(("grad", "copy", "cause", "said"), [
    ([1, 0.6, 1.0], [1, 0.2, 0.2], "partial", "; if they should be one"),
    ([1, 0.6, 1.1], [1, 0.2, 0.2], "not-averaged", "; if they should be one"),
    ([1, 0.6, 1.1], [0.5, 0.05, 0.15], "clip", ", proportional to each other")])
def test_two_copies_of_a_weight_have_parts_of_its_gradient_up_to_clipping(grad, copy, cause, said):
    rows = [Row(name, [4], [3, 1, 2], [0.1], found, [1, 1, 1]) for name, found in (
        ("w", grad), ("w", [1, 0.1, 0.3]), ("copy", copy))]
    found = unmatched(rows[:1], rows[1:], [(rows[0], rows[1])])
    assert found[0] == cause and f"two copies of copy in B have different gradients{said}" in found[1]


@pytest.mark.parametrize(("shares", "cause"), [([[1.0], [2.0]], "not-averaged"), ([[1.0, 2.0]] * 2, "partial")])
def test_parts_of_a_gradient_are_not_averaged_if_the_ranks_have_other_samples(shares, cause):
    v, w = (lambda *grad, name=name: (name, [2], [1.0] * 3, [*grad], [1.0] * 3) for name in "vw")
    b = made("B", *[[v(*grad), w(2.0, 2.0, 2.0)] for grad in ((1.2, 1.0, 1.0), (1.5, 2.0, 3.0))])
    for state, share in zip(b.states(0), shares):
        state["batches"] = [[0, [], share, [], []]]
        join_samples(state)
    report = compare_runs(made("A", [v(2.0, 3.0, 4.0), w(2.0, 2.0, 2.0)]), b)
    assert report["cause"] == cause and "of 1 of 2 tensors, such as v" in report["message"], report
    assert ("whose sum over the ranks is that of A: add these up" in report["message"]) == (cause == "not-averaged")


@pytest.mark.parametrize(("ours", "theirs", "named"), [
    ([[1], [0]], [[1], [0, 1]], True), ([[], [0]], [[0], [0]], False), ([[0]], [[0, 1], [0]], False)])
def test_a_backward_pass_that_reaches_parameters_of_another_optimizer_is_named(ours, theirs, named):
    """FSDP2 reduces gradients in the last pass only, so that the others reach none."""
    report = compare_runs(*differing({"reached": ours}, {"reached": theirs}))
    assert (report["cause"] == "stale") == ("backward pass 2 " in report["message"]) == named, report


@pytest.mark.parametrize(("labels", "cause"), [(([16, 15, 9, 1], [16, 14, 9, 1]), "loss"),
                                               (([16, 15, 9, 1], [32, 28, 9, 1]), "uneven-mean"),
                                               (([16, 15, 9, 1], [16, 15, 9, 2]), "uneven-mean")])
def test_labels_that_one_run_ignores_are_counted(labels, cause):
    parts = [[labels[1][0] // 2, labels[1][1] // 2 + one, 4, 1] for one in (1, -1 + labels[1][1] % 2)]
    a, b = differing({"losses": [3.0], "counts": [labels[0]]}, *[
        {"losses": [loss], "counts": [part], "batches": [[0, [], [sample], [], []]]}
        for loss, part, sample in zip((2.0, 5.0), parts, (1.0, 2.0))])
    report = compare_runs(a, b)
    assert report["cause"] == cause and ("are not ignored in A" in report["message"]) == (cause == "loss"), report


def test_a_schedule_that_runs_twice_as_fast_is_named():
    runs = [Run(label, [(0, [{"event": "step", "flags": [], "batches": [], "size": 0, "losses": [1.0], "clips": [],
                              "rows": [["w", [2], [1.0] * 3, [rate], [1.0] * 3, [1.0] * 3]]} for rate in rates])])
            for label, rates in (("A", [6e-5, 5e-5, 4e-5, 3e-5, 2e-5, 1e-5]), ("B", [6e-5, 4e-5, 2e-5, 0, 0, 0]))]
    pairs = list(zip(*[run.at(1)[1] for run in runs]))
    said = learning_rate(Difference(*runs, 1, "rate", pairs))
    assert said.startswith("the rate of all parameters is 5e-05 in A")
    assert "the schedule of B runs 2 times as fast" in said


def test_the_rank_whose_rates_differ_is_named():
    """Each rank is a stage of a pipeline."""
    a, b = made("A", [("w", [2]), ("v", [3])]), made("B", [("w", [2])], [("v", [3])])
    b.states(0)[1]["rows"][0][3] = [0.2]
    said = compare_runs(a, b)["message"]
    assert said.startswith("the rate of 1 of 2 parameters, such as v, all on rank(s) 1 of B, is 0.1 in A and 0.2 in B")


@pytest.mark.parametrize(("before", "cause"), [(0.1, "rank-lr"), (0.4, "learning-rate")])
def test_a_stage_whose_rate_does_not_change_is_named(before, cause):
    """The norms of both stages start equal. `before` is the rate of the second stage in the first step."""
    stages = [[("w", [2], [size] * 3, [1.0] * 3, [size] * 3), ("norm", [3], [1.0] * 3, [1.0, size, 1.0], [1.0] * 3)]
              for size in (1.0, 2.0)]
    runs = made("A", stages[0] + stages[1]), made("B", *stages)
    for each, later in zip(runs, ([0.05, before / 2], [0.1, before / 2])):
        for number, (rank, (state,)) in enumerate([*each.ranks.items()]):
            steps = []
            for left, right in ((0.1, before), later):
                rows = [[*row[:3], [right if number or place > 1 else left], *row[4:]]
                        for place, row in enumerate(state["rows"])]
                steps.append({**state, "rows": rows})
            each.ranks[rank] = steps
        each.length = 2
    report = compare_runs(*runs)
    assert (report["cause"], report["step"]) == (cause, 2), report
    assert "all on rank(s) 0 of B, is 0.05 in A and 0.1 in B" in report["message"]
    assert ("; the ranks of B had equal rates before: " in report["message"]) == (cause == "rank-lr")


def test_a_schedule_that_has_not_changed_yet_has_no_pace():
    runs = [Run(label, [(0, [{"event": "step", "flags": [], "batches": [], "size": 0, "losses": [1.0], "clips": [],
                              "rows": [["w", [2], [1.0] * 3, [rate], [1.0] * 3, [1.0] * 3]]} for rate in rates])])
            for label, rates in (("A", [0.3] * 4 + [0.2, 0.1]), ("B", [0.3] * 6))]
    said = learning_rate(Difference(*runs, 4, "rate", [*zip(*[run.at(4)[1] for run in runs])]))
    assert "in A and 0.3 in B" in said and "fast" not in said


@pytest.mark.parametrize(("clip", "said"), [
    (1.0, "the others are equal: "), (0.5, "the others are equal, up to a common factor 0.5, as of a clip")])
def test_a_group_of_gradients_with_another_factor_is_named(clip, said):
    """The gradient that is noise counts for nothing."""
    sizes = [("w", 1.0, 1.0), ("v", 2.0, 2.0), ("bias", 1.0, 3.0), ("noise", 1e-12, 9e-12)]
    runs = [made(label, *[[(name, [2], [0.0] * 3, [row[which] * (clip if which else 1)] * 3, [1.0] * 3)
                           for name, *row in sizes]] * (1 + which)) for which, label in enumerate("AB")]
    report = compare_runs(*runs)
    assert report["cause"] == "group-scale" and said in report["message"], report
    assert report["message"].startswith("1 of 4 gradients of B are 3 times those of A, such as that of bias")


@pytest.mark.parametrize(("reach", "value", "cause", "said"), [
    ((0, 2), 1.0, "no-gradient", "grad is None in A and zero in B for 1 of 2 parameters, such as head: the optimizer"),
    ((2, 0), 1.0, "no-gradient", "grad is None in B and zero in A for 1 of 2 parameters, such as head: the optimizer"),
    ((0, 0), 1.0, "optimizer", "equal gradients, but"), ((2, 2), 1.0, "optimizer", "equal gradients, but"),
    ((0, 2), 2.0, "optimizer", "equal gradients, but")])
def test_a_gradient_of_zero_in_place_of_none_is_named(reach, value, cause, said):
    """AdamW decays the weight in one run only, by little."""
    rows = [[("trunk", [2], [1.0] * 3, [1.0] * 3, [1.0 if which else value] * 3),
             ("head", [2], [1.0] * 3, [0.0] * 3, [1.0 - 1e-8 * which] * 3)] for which in range(2)]
    runs = [made(label, *[found] * (1 + which)) for which, (label, found) in enumerate(zip("AB", rows))]
    for found, reached in zip(runs, reach):
        for state in found.states(0):
            state["rows"] = [[*row, None, reached if row[0] == "head" else 2, {}] for row in state["rows"]]
    report = compare_runs(*runs)
    assert report["cause"] == cause and report["message"].startswith(said), report


@pytest.mark.parametrize(("norms", "cause", "said"), [
    ((1.28, 0.64), "scale", "the gradients of B are 0.5 times those of A, after equal losses: a sum is divided twice"),
    ((1.28, 0.9), "clip", "the gradients of B are 0.64 times those of A, after equal losses"),
    ((1.28, 1.28), "clip", "the gradients of B are 0.64 times those of A, after equal losses")])
def test_a_factor_is_that_of_the_norms_before_clipping(norms, cause, said):
    """A clips 1.28 to 1, so the clipped gradients have another factor than the unclipped ones."""
    runs = [made(label, *[[("v", [2], [1.0] * 3, [factor] * 3, [1.0] * 3), (
        "w", [3], [1.0] * 3, [2.0 * factor] * 3, [1.0] * 3)]] * ranks) for label, ranks, factor in (
        ("A", 1, 1.0), ("B", 2, 0.64))]
    for found, norm in zip(runs, norms):
        for state in found.states(0):
            state["clips"] = [[norm, 1.0]]
    for sample, state in enumerate(runs[1].states(0)):
        state |= batch(1.0 + sample)
        join_samples(state)
    report = compare_runs(*runs)
    assert report["cause"] == cause and report["message"].startswith(said), report


def test_an_answer_says_which_gradients_agree():
    said = compare_runs(*differing({}, batch(1.0), batch(2.0)))["message"]
    assert "but different gradients; 1 of 2 differ, such as that of v, but not that of w; or a term of the loss" in said


@pytest.mark.parametrize(("targets", "loader", "cause"), [
    ((4, 1, 3), INPUTS, "uneven-mean"), ((4, 4, 4), INPUTS, "batch-size"), ((0, 0, 0), INPUTS, "batch-size"),
    ((4, 1, 3), 0, "batch-size")])
def test_rows_of_a_models_inputs_are_no_samples_if_the_losses_have_as_many_targets(targets, loader, cause):
    """As the nodes of a sampled graph, of which the batches of two ranks share some. The classes have weights."""
    states = [batch(*map(float, range(rows)), loader=loader) | {"losses": [loss], "counts": [
                  [size] * 4 + [1.5 * size + loss] * 4] * (size > 0)}
              for rows, size, loss in zip((5, 4, 4), targets, (1.5, 1.0, 2.2))]
    report = compare_runs(*differing(*states))
    assert report["cause"] == cause, report


def test_an_option_of_another_group_is_named_with_its_parameter():
    """Both optimizers print the same groups."""
    pairs = [tuple(Row(name, [2], [1.0] * 3, [rate], [1.0] * 3, [1.0] * 3, options={
        "optimizer": "SGD", "group": group, "momentum": "0.9", "weight_decay": decay}) for rate, group, decay in found)
             for name, *found in (("w", (0.1, "decay", "0.1"), (0.2, "rest", "0.0")),
                                  ("b", (0.1, "rest", "0.0"), (0.1, "rest", "0.0")))]
    it = SimpleNamespace(a=SimpleNamespace(label="A"), b=SimpleNamespace(label="B"), column="value", pairs=pairs,
                         flat=False)
    assert optimizer(it) == ("equal gradients, but different updates: weight_decay is 0.1 in A and 0.0 in B for 1 of 2 "
                             "parameters, such as w in group decay")
    pairs = [(one, two._replace(options={"optimizer": "Adam"})) for one, two in pairs]
    assert options_that_differ(pairs, "A", "B") == "optimizer is SGD in A and Adam in B for all parameters"


@pytest.mark.parametrize(("shape", "size", "known"), [([2, 2], 1.0, True), ([2], 1.0, False), ([2, 2], 0.0, False)])
def test_only_some_weights_that_differ_at_the_start_have_not_another_seed(shape, size, known):
    """Vectors, and what starts at zero, are equal for any seed."""
    a, b = (made(label, [("v", [2], [one] * 3), ("w", shape, [size] * 3)]) for label, one in (("A", 1.0), ("B", 2.0)))
    report = compare_runs(a, b)
    assert report["cause"] == "start" and report["parameter"] == "v"
    assert ("only in 1 of 2 parameters, such as v" in report["message"]) == known, report


@pytest.mark.parametrize(("name", "grads", "cause", "said"), [
    ("LBFGS", [2.0, 2.0], "optimizer", True), ("OwnLbfgs", [2.0, 2.0], "optimizer", True),
    ("SGD", [2.0, 2.0], "optimizer", False), ("LBFGS", [2.0, 3.0], "not-averaged", False)])
def test_weights_of_ranks_may_differ_by_the_loss_of_a_closure(name, grads, cause, said):
    b = made("B", *[[("w", [2], [1.0] * 3, [by] * 3, [1.0 + rank] * 3) for by in (2.0, grad)]
                    for rank, grad in enumerate(grads)])
    for state in b.states(0):
        state["rows"] = [Row(*row, options={"optimizer": name}) for row in state["rows"]]
    found = ranks_differ(b, 0, ("grad", "value"), 1e-9)
    assert found[0] == cause and ("the loss that its closure returns" in found[1]) == said


@pytest.mark.parametrize(("counts", "clips", "cause", "said"), [
    ([[[4.0] * 4], [[2.0] * 4]], [[], []], "uneven-mean", ": each is divided by its own count, 4 and 2: divide"),
    ([[[4.0] * 4], [[3.0] * 4]], [[[1.0, 0.5]], [[2.0, 0.5]]], "clip", ": clip once per step"),
    ([[[4.0] * 4], [[3.0] * 4]], [[[1.0, 9.0]]] * 2, "clip", ", after equal clip calls: something else"),
    ([[], []], [[], []], "clip", ", after equal clip calls: something else"),
    ([[[0.0] * 4]] * 2, [[], []], "clip", ", after equal clip calls: something else")])
def test_ranks_that_divide_their_gradients_apart_are_told_from_those_that_clip_them(counts, clips, cause, said):
    a, b = differing({}, {}, {})
    for state, factor, count, clip in zip(b.states(0), (1.0, 2.0), counts, clips):
        state["rows"] = [[*row[:4], [factor * value for value in row[4]], row[5]] for row in state["rows"]]
        state["counts"], state["clips"] = count, clip
    report = compare_runs(a, b)
    sure = "not sure: " * ("equal" in said)
    fact = f"{sure}ranks 0 and 1 of B have different gradients, proportional to each other{said}"
    assert report["cause"] == cause and report["message"].startswith(fact), report


def test_gradients_that_are_added_twice_are_scaled():
    runs = [made(label, [("w", [2], [1.0] * 3, [size] * 3, [1.0] * 3)]) for label, size in (("A", 1.0), ("B", 2.0))]
    runs[1].states(0)[0]["losses"] *= 2
    assert compare_runs(*runs)["cause"] == "scale"


CLASSES = [{"weights": [["weight of cross_entropy", [size] * 3]]} for size in (1.0, 2.0)]


BUFFER = [{"unoptimized": [["buffer mean", [1], [size] * 3]]} for size in (1.0, 2.0)]


@pytest.mark.parametrize(("cause", "sure", "a", "b"), [
    ("buffers", False, batch(1.0, 2.0, loader=INPUTS) | BUFFER[0], [batch(3.0, 4.0, loader=INPUTS) | BUFFER[1]]),
    ("samples", True, batch(1.0, 2.0) | BUFFER[0], [batch(3.0, 4.0) | BUFFER[1]]),
    ("buffers", True, {"losses": [1.5]} | BUFFER[0], [BUFFER[1]] * 2),
    ("no-backward", False, {}, [batch(1.0), batch(2.0)]),
    ("uneven-mean", False, {"losses": [1.5]}, [batch(1.0) | {"counts": [[3, 3, 3, 0]]},
                                               batch(2.0) | {"counts": [[5, 5, 5, 0]], "losses": [2.2]}]),
    ("evaluation", False, {"losses": [1.5], "flags": ["evaluated"]}, [{"losses": [1.7]}]),
    ("forward", True, {"losses": [1.5]}, [{"losses": [1.7]}, {"losses": [1.7]}]),
    ("loss", False, {"losses": [1.5]}, [{"losses": [1.7]}]),
    ("loss", True, {"losses": [1.5]} | CLASSES[0], [CLASSES[0], CLASSES[1]]),
    ("clip", True, {"clips": [[0.6, 1.0]]}, [{"clips": [[600.0, 1.0]]}]),
    ("unknown", True, {"clips": [[2.0, 1.0]]}, [{"clips": [[0.0, 1.0]]}]),  # no gradient at all, which is not scaled
    ("unknown", True, {"clips": [[0.6, 1e9]]}, [{"clips": [[600.0, 1e9]]}]),  # nothing was clipped
    ("clip", True, {"clips": [[0.6, 1.0]]}, [{"clips": [[0.6, 1.0], [0.5, 1.0]]}]),
    ("clip", True, {"clips": [[0.0, 1.0]]}, [{}]),  # by value
    ("stale", True, {"losses": [1.5]}, [{"losses": [7.0, 1.0]}, {"losses": [9.0, 2.0]}]),
    ("stale", True, {"losses": [1.5]}, [{"losses": [9.0, 0.5, 8.0, 1.0]}]),
    ("stale", True, {"losses": [1.5]}, [{"losses": [9.0, 8.0, 0.5, 1.0]}]),
    ("loss", True, {"losses": [9.0, 1.5]}, [{"losses": [1.5]}]),
    ("loss", False, {"losses": [1.5]}, [{"losses": [9.0, 1.5], "flags": ["reset"]}]),  # sets them to zero
    ("unknown", True, {"losses": [1.5]}, [{"losses": [1.5, 9.0]}]),  # as with GradCache
    ("loss", False, {"losses": [1.5]}, [{"losses": [9.0, 1.0]}, {"losses": [2.0]}]),
    ("loss", False, {"losses": [1.5]}, [{"losses": [9.0, 1.5, 8.0]}]),
    ("loss", False, {"losses": [1.0, 2.0]}, [{"losses": []}, {"losses": [1.0, 2.5]}]),  # the last stage of a pipeline
    ("unknown", True, {"losses": [0.0]}, [{"losses": [0.0, 0.0]}]),
    ("unknown", True, {"clips": [[0.6, 1.0]]}, [{}])])  # clipped by hand: else, the gradients are proportional
def test_a_rule_says_whether_it_is_sure(cause, sure, a, b):
    report = compare_runs(*differing(a, *b))
    said = report["message"]
    assert (report["cause"], report["column"], not said.startswith("not sure: ")) == (cause, "grad", sure), report


@pytest.mark.parametrize(("b", "flags", "said"), [
    ([0, 1], [], "; ranks differ, too"), ([1, 1], [], "; the ranks of each run agree"),
    ([1, 1], ["sharded"], "on rank 0 of A: ")])  # each rank has the digest of the whole tensor
def test_the_answer_says_whether_buffers_differ_between_ranks(b, flags, said):
    """Another remedy for each: if the ranks agree, to broadcast the buffers changes nothing."""
    losses = {"losses": [1.5]}
    report = compare_runs(*differing(losses | BUFFER[0], *[BUFFER[number] | {"flags": flags} for number in b]))
    assert report["cause"] == "buffers" and said in report["message"]


@pytest.mark.parametrize(("name", "said"), [
    ("norm.mean", "; ranks differ, too"), ("norms.mean", "; the ranks of each run agree")])
def test_ranks_differ_if_any_buffer_of_the_module_does(name, said):
    """Such as its mean, though each rank has counted as many samples."""
    states = [[["buffer norm.count", [], [count] * 3], [f"buffer {name}", [2], [mean] * 3]]
              for count, mean in ((4.0, 1.0), (2.0, 1.0), (2.0, 3.0))]
    one, *others = [{"unoptimized": found, "losses": [1.0 + found[0][2][0]]} for found in states]
    report = compare_runs(*differing(one, *others))
    assert report["cause"] == "buffers" and "buffer norm.count on rank 0 of B" in report["message"], report
    assert said in report["message"], report


@pytest.mark.parametrize(("flags", "said"), [({}, "; the ranks of each run agree: "), ({"sharded"}, "are the same: ")])
def test_an_answer_after_the_last_step_says_the_same(flags, said):
    rows = [("w", [2], [0.0] * 3, [1.0] * 3, [1.0] * 3)]
    runs = made("A", rows), made("B", rows, rows)
    for one, buffer in zip(runs, BUFFER):
        one.flags |= {*flags}
        for state in one.states(0):
            state |= buffer
    report = compare_runs(*runs)
    assert report["cause"] == "buffers" and said in report["message"], report


@pytest.mark.parametrize(("divisors", "said"), [([[7, 7, 7], [6, 6, 6]], "7, 6"), ([[3, 5, 5]] * 2, "3, 5, 5")])
def test_losses_that_are_divided_by_the_count_of_a_rank_or_a_micro_batch_are_named(divisors, said):
    counts, sums = [[1, 2, 4], [2, 3, 1]], [[3, 9, 2], [10, 5, 6]]
    b = [batch(size) | {"losses": [x / n for x, n in zip(mine, by)], "counts": [[n] * 4 for n in found]}
         for size, mine, by, found in zip((1.0, 2.0), sums, divisors, counts)]
    report = compare_runs(*differing({"losses": [35 / 13]}, *b))
    assert report["cause"] == "uneven-mean" and f"weighted by the counts {said}, give" in report["message"], report


@pytest.mark.parametrize(("whole", "cause"), [(16.0, "uneven-mean"), (17.0, "loss")])
def test_losses_that_are_divided_by_their_counts_may_add_up_to_a_loss_that_is_not(whole, cause):
    """Such as that of a program that divides the gradients later. One batch has a part whose rows are not samples."""
    b = [batch(float(count)) | {"losses": [loss], "counts": [[count] * 4]} for count, loss in ((2, 3.0), (4, 2.5))]
    b[1]["batches"][0][1] = [[9] * 4]
    report = compare_runs(*differing(batch(2.0, 4.0) | {"losses": [whole]}, *b))
    assert report["cause"] == cause and ("weighted by the counts 2, 4, give" in report["message"]) == (
        cause == "uneven-mean"), report


@pytest.mark.parametrize(("whole", "losses", "earlier", "said"), [
    (3.0, (1.0, 0.0), 1.0, "loss: not sure: equal samples; mean loss 3 in A, 0.5 in B; a loss on rank 1 of B is"),
    (3.0, (1.0, 0.0), 0.0, "loss: not sure: equal samples; mean loss 3 in A, 0.5 in B: "),
    (0.0, (-1.0, 0.0), 1.0, "loss: not sure: equal samples; mean loss 0 in A, -0.5 in B: "),
    (0.5, (-1.0, 0.25, 0.0, 0.0), 1.0, "loss: not sure: equal samples; mean loss 0.5 in A, -0.375 in B; a loss on"),
    (2.0, (1.0, 5.0), 1.0, "uneven-mean: not sure: equal samples; mean loss 2 in A, 3 in B; counts, such as those of")])
def test_a_loss_of_0_is_named(whole, losses, earlier, said):
    """Such as that of a rank without boxes, which leaves out the background, too. A rank may have no loss at all."""
    each = len(losses) // 2
    b = [batch(size) | {"losses": losses[rank * each:][:each], "counts": [[count] * 4] * each}
         for rank, size, count in ((0, 1.0, 2), (1, 2.0, 4))]
    runs = differing(batch(1.0, 2.0) | {"losses": [whole]}, *b)
    runs[1].ranks[1].append({**runs[1].ranks[1][0], "losses": [earlier]})
    report = compare_runs(*runs)
    assert f"{report['cause']}: {report['message']}".startswith(said), report


@pytest.mark.parametrize(("last", "before", "clips", "cause"), [
    ([9.0, 3.0, -1.0], "w", [], "stale"), ([9.0, 3.0, -2.0], "w", [], "unknown"),
    ([9.0, 3.0, -1.0], "v", [], "unknown"), ([9.0, 1.5, -0.5], "w", [[4.0, 2.0 + 5e-7]], "stale")])
def test_gradients_that_an_accumulator_keeps_are_stale(last, before, clips, cause):
    """Before, another optimizer may have changed another tensor."""
    runs = []
    for label, grad in (("A", [2.0, 2.0, -2.0]), ("B", last)):
        runs.append(made(label, [("w", [2], [1.0] * 3, grad, [1.0] * 3)]))
        steps = runs[-1].ranks[0]
        steps.insert(0, {**steps[0], "rows": [[before, [2], [1.0] * 3, [0.1], [1.0] * 3, [1.0] * 3]]})
        runs[-1].length = 2
    runs[1].states(1)[0]["clips"] = clips
    runs[0].states(1)[0]["clips"] = [[1.0, 2.0]] * len(clips)
    assert compare_runs(*runs)["cause"] == cause


@pytest.mark.parametrize(("early", "cause"), [((), "reset"), (("reset",), "no-backward")])
def test_a_program_that_has_always_reset_gradients_adds_them_up_by_hand(early, cause):
    a, b = preceded(differing(batch(1.0, 2.0), batch(1.0), batch(2.0) | {"flags": ["reset"]}), [1.0, 2.0], [1.0], [2.0])
    b.flags = {"reset"}
    for state in b.states(0):
        state["flags"] = [*early]
    assert compare_runs(a, b)["cause"] == cause


@pytest.mark.parametrize(("resets", "losses", "cause", "sure"), [
    ("b", [0.5, 1.0], "reset", True), ("b", [0.5, 1.2], "reset", False), ("a", [0.5, 1.2], "stale", True),
    ("a", [1.2], "loss", False), ("ab", [0.5, 1.2], "loss", False)])
def test_gradients_that_one_run_sets_to_zero_may_be_those_of_another_loss(resets, losses, cause, sure):
    """If A, which is right, sets them to zero, B should: it has as many backward passes."""
    runs = differing({"losses": [0.5, 1.0]}, {"losses": losses})
    for each, name in zip(runs, "ab"):
        each.flags = {"reset"} if name in resets else set()
    report = compare_runs(*runs)
    assert (report["cause"], not report["message"].startswith("not sure: ")) == (cause, sure), report


@pytest.mark.parametrize(("losses", "reach", "cause"), [
    ([1.0], 2, "no-gradient"), ([1.5], 2, "loss"), ([1.5], 0, "no-gradient")])
def test_a_gradient_that_autograd_computes_as_zero_follows_from_another_loss(losses, reach, cause):
    runs = [made(label, [("v", [2], [1.0] * 3, grad, [1.0] * 3), ("w", [3], [1.0] * 3, grad, [1.0] * 3, None, reach),
                         ("x", [4], [1.0] * 3, [2.0] * 3, [1.0] * 3)])
            for label, grad in (("A", [1.0] * 3), ("B", [0.0] * 3))]
    runs[1].states(0)[0]["losses"] = losses
    assert compare_runs(*runs)["cause"] == cause


@pytest.mark.parametrize(("read", "factor", "cause"), [
    ("aabb", 0, "no-backward"), ("abab", 0, "samples"), ("abcd", 0, "not-averaged"), ("abca", 0, "not-averaged"),
    ("aabb", 2, "clip")])
def test_ranks_with_parts_of_one_tensor_read_the_same_samples(read, factor, cause):
    """Ranks 0 and 1, and ranks 2 and 3, have the parts of one tensor. Ranks that clip have proportional gradients."""
    def parts(number, grad):
        grad = [0.1 * factor ** number, 0.2 * factor ** number] if factor else grad
        return [("split", [4], [3.0 + number, 1.0, 1.0], [1.0, 0.3, 0.4], [1.0] * 3, [number, 0.5]),
                *[(name, [size], [1.0] * 3, [float(factor or 1) ** number, *grad], [1.0] * 3)
                  for name, size in (("norm", 2), ("head", 3))]]

    a = made("A", [("split", [4], [5.0, 2.0, 2.0], [1.4, 0.6, 0.8], [1.0] * 3),
                   ("norm", [2], [1.0] * 3, [1.0, 5.0, 7.0], [1.0] * 3),
                   ("head", [3], [1.0] * 3, [1.0, 2.0, 9.0], [1.0] * 3)])
    b = made("B", *[parts(rank % 2, [0.1 + rank % 2, 0.2 - rank % 2]) for rank in range(4)])
    for state, name in zip(b.states(0), read):
        state["batches"] = [[0, [], [float(ord(name))], [], []]]
        join_samples(state)
    report = compare_runs(a, b)
    assert report["cause"] == cause, report
    assert ("ranks 0 and 2, which have the same parts, read the same" in report["message"]) == (cause == "samples")


@pytest.mark.parametrize(("size", "named"), [(1.0, True), (2.0, False)])
def test_gradients_of_equal_size_for_different_parts_of_a_tensor_are_named(size, named):
    a = made("A", [("experts", [4], [5.0, 3.0, 3.0], [1.7, 0.9, 0.1], [1.0] * 3)])
    b = made("B", [("experts", [4], [3.0, 1.0, 1.0], [1.0, 0.3, 0.4], [1.0] * 3, [1, 0.5])],
             [("experts", [4], [4.0, 2.0, 2.0], [size, 0.1, 0.2], [1.0] * 3, [2, 0.5])])
    message = compare_runs(a, b)["message"]
    assert ("gradients of equal size for different parts of experts" in message) == named, message


def test_a_mean_loss_is_that_of_the_ranks_that_have_one():
    """Of two stages with two replicas each, the last ones have a loss; if it agrees, the samples do."""
    states = [{"losses": losses, "batches": []} for losses in ([1.5], [], [1.0], [], [2.0])]
    assert compare_runs(*differing(*states))["cause"] == "no-backward"
    states[-1]["losses"] = [2.5]
    assert compare_runs(*differing(*states))["cause"] == "loss"


@pytest.mark.parametrize(("second", "cause"), [(2.0, "start"), (1.0, "not-averaged")])
def test_parts_that_start_equal_on_all_ranks_in_place_of_different_ones_are_named(second, cause):
    def rows(*experts):
        return [(name, [2], [start] * 3, [grad] * 3, [1.0] * 3) for name, start, grad in experts]

    a = made("A", rows(("experts.0", 1.0, 1.0), ("experts.1", second, 3.0)))
    report = compare_runs(a, made("B", rows(("experts.0", 1.0, 1.0)), rows(("experts.0", 1.0, 2.0))))
    assert report["cause"] == cause, report
    assert ("such as experts.1, start with values that no rank of B has" in report["message"]) == (cause == "start")


def test_a_rank_without_a_loss_is_no_hindrance():
    """As a pipeline's first stage."""
    b = [batch(1.0) | {"losses": [2.5], "counts": [[3] * 4]}, batch(2.0) | {"losses": [], "counts": []}]
    assert compare_runs(*differing({"losses": [1.5]}, *b))["cause"] == "loss"


@pytest.mark.parametrize(("befores", "optimizer", "movers"), [
    ([2.0, 1.0], 0, [1]), ([1.0, 1.0], 0, []), ([2.0, 2.0], 0, []), ([2.0, 1.0], 1, [])])
def test_ranks_whose_weights_jump_between_two_steps_are_named(befores, optimizer, movers):
    """Not if all jump, or if the step before was that of another optimizer."""
    step = made("B", [("w", [2])]).states(0)[0]
    first = {"rows": [["v", [2], [0.0] * 3, [0.1], [1.0] * 3, [0.0] * 3]], "after": [["v", [2], [2.0] * 3]]}
    run = Run("B", [(rank, [step | first, step | {
        "rows": [[*first["rows"][0][:5], [before] * 3]], "optimizer": optimizer, "before": [["v", [2], [before] * 3]]}])
        for rank, before in enumerate(befores)])
    found = ranks_differ(run, 1, ["value"], 1e-9)
    said = "different weights: since the step before, only on rank(s) [1], something other than the optimizer has"
    assert (said in found[1] if found else False) == bool(movers) and (found is None) == (befores[0] == befores[1])
    assert not ranks_differ(run, 0, ["value"], 1e-9)


@pytest.mark.parametrize(("before", "second", "cause"), [
    ([1.0, 2.0], batch(4.0), "samples"), ([5.0, 6.0], batch(4.0), "no-backward"),
    ([5.0, 6.0], batch(4.0, indices=(1, 2)), "samples"), ([5.0, 6.0], batch(4.0, 5.0), "batch-size")])
def test_samples_are_no_evidence_if_they_differ_before_too(before, second, cause):
    """They are padded to other lengths, unless the sampler draws other indices."""
    report = compare_runs(*preceded(differing(batch(1.0, 2.0), batch(3.0), second), [1.0, 2.0], before[:1], before[1:]))
    assert (report["step"], report["cause"]) == (2, cause), report


def test_the_answer_says_for_how_many_steps_samples_were_equal():
    runs = differing(batch(1.0, 2.0, indices=(1, 2)), batch(3.0, indices=(1,)), batch(4.0, indices=(2,)))
    report = compare_runs(*preceded(runs, [7.0, 8.0], [7.0], [8.0]))
    assert "are in both runs, after 1 step(s) with equal ones; the indices agree" in report["message"], report


def test_zeros_are_not_the_same_samples_again():
    """They are the first state of a recurrent model, which B loses in each step."""
    runs = differing(batch(3.0, 4.0, loader=INPUTS), batch(0.0, 0.0, loader=INPUTS))
    report = compare_runs(*preceded(runs, [0.0, 0.0], [0.0, 0.0]))
    assert report["step"] == 2 and "inputs of models are in both runs" in report["message"], report


def test_one_gradient_of_several_that_is_not_averaged_is_said_to_be_one():
    a, b = differing({}, {}, {})
    b.states(0)[1]["rows"][0][4] = [2.0, 4.0, 6.0]  # one gradient alone is no proof that all are proportional
    for state in b.states(0):
        state["batches"] = [[0, [], [1.0], [], []]]
        join_samples(state)
    report = compare_runs(a, b)
    said = "ranks 0 and 1 of B have different gradients of 1 of 2 tensors, such as v, so average these, too"
    assert report["cause"] == "not-averaged" and report["message"].startswith(said), report


@pytest.mark.parametrize(("flat", "of", "said"), [
    (True, "of weights of SGD", False), (True, f"that SGD{ELSEWHERE} left", True), (False, "of weights of SGD", True)])
def test_gradients_of_flat_shards_are_set_by_hand_and_not_stale(flat, of, said):
    sides = [SimpleNamespace(states=[{"stale": found}]) for found in ([], [of])]
    assert bool(stale(SimpleNamespace(flat=flat, sides=sides))) == said


@pytest.mark.parametrize(("norm", "loss", "starts", "grads", "cause"), [
    (7.0, 1.0, (1.0, 2.0), (0.8, 0.8), "clip"), (7.0, 1.0, (1.0, 2.0), (0.599999, 0.8), "optimizer"),
    (7.0, 1.0, (1.0, 1.0), (1.0, 1.0), "optimizer"),  # a replica of the shard
    (0.5, 1.0, (1.0, 2.0), (0.8, 0.8), "optimizer"), (7.0, 5.0, (1.0, 2.0), (0.8, 0.8), "forward")])
def test_flat_shards_are_clipped_by_their_common_norm(norm, loss, starts, grads, cause):
    a = made("A", [("w", [2], [1.0] * 3, [1.0] * 3, [2.0] * 3)])
    steps = a.states(0)[0] | {"clips": [[norm, 1.0]], "losses": [loss]}
    weights = [{"unoptimized": [["weight w", [2], [value] * 3]], "states": []} for value in (1.0, 3.0, 4.0)]
    b = [(rank, [{**step, **changed} for step, changed in zip(made("", [
        ("parameter", [1], [starts[rank]] * 3, [grads[rank]] * 3, [2.0] * 3)]).states(0) * 2, weights)]
          + [{"event": "end", **weights[2]}]) for rank in range(2)]
    report = compare_runs(Run("A", [(0, [steps, steps])]), Run("B", b))
    assert report["cause"] == cause, report


@pytest.mark.parametrize(("name", "said"), [("parameter", True), ("w", False)])
def test_an_optimizer_of_tensors_that_no_module_has_is_named(name, said):
    a, b = (made(label, [(name, [2], [1.0] * 3, [grad] * 3, [1.0] * 3)]) for label, grad in (("A", 1.0), ("B", 0.0)))
    report = compare_runs(a, b)
    assert report["cause"] == "no-gradient" and ("no module has them" in report["message"]) == said, report


@pytest.mark.parametrize(("ranks", "losses", "inputs", "cause", "sure"), [
    ([16, 16], 1, 2, "no-backward", False), ([8, 8], 1, 1, "no-backward", False), ([8, 8], 1, 2, "no-gradient", False),
    ([8, 8], 2, 2, "no-backward", False), ([8, 7], 1, 1, "no-gradient", True), ([0, 0], 1, 1, "no-gradient", True)])
def test_gradients_in_the_loss_may_be_split_over_the_ranks(ranks, losses, inputs, cause, sure):
    """Such as those of a population of models, whose inputs are split, too. A backward pass has 16 for 2 inputs."""
    a, b = differing({"graphs": 16, "batches": batch(1.0)["batches"] * 2}, *[
        {"graphs": number, "losses": [1 / losses] * losses, "batches": batch(1.0)["batches"] * inputs}
        for number in ranks])
    report = compare_runs(a, b)
    assert (report["cause"], not report["message"].startswith("not sure")) == (cause, sure), report


@pytest.mark.parametrize(("kind", "step", "optimizer", "cause"), [
    ("average of", 0, 0, "start"), ("average of", 1, 0, "buffers"), ("average of", 1, 1, "start"),
    ("buffer", 1, 1, "buffers")])
def test_a_copy_that_differs_before_the_first_step_is_a_weight_that_starts_apart(kind, step, optimizer, cause):
    """Such as a target network that is copied before DDP sends the weights of rank 0, even if another model trains."""
    average = [{"unoptimized": [[f"{kind} w", [1], [size] * 3]]} for size in (1.0, 2.0)]
    a, b = differing({"losses": [1.5]} | average[0], *average)
    difference = Difference(a, b, 0, "grad", match(a.at(0)[1], b.at(0)[1]))
    difference.step = step
    for state, now in zip(difference.b.states, b.states(0)):
        state["optimizer"], now["optimizer"] = 0, optimizer  # in the steps before
    assert explain(difference)[0] == cause


def test_a_copy_that_starts_apart_comes_before_a_buffer_that_follows_from_its_outputs():
    """Such as the center of DINO's loss, which differs on rank 0, too, because the teacher of rank 1 does."""
    copies = [{"unoptimized": [["other buffer center", [1], [center] * 3], ["average of w", [1], [weight] * 3]]}
              for center, weight in ((1.0, 1.0), (2.0, 1.0), (2.0, 5.0))]
    report = compare_runs(*differing({"losses": [1.5]} | copies[0], *copies[1:]))
    assert report["cause"] == "start" and "average of w on rank 1 of B" in report["message"], report


def test_an_average_that_differs_comes_before_a_rate_that_follows_from_it():
    """As if only rank 0 updated it, and the scheduler took its loss."""
    step = made("A", [("w", [2])]).states(0)[0]

    def run(label, averages, rate):
        steps = [{**step, "rows": [["w", [2], [0.0] * 3, [0.1 if number == 0 else rate], [1.0] * 3, [1.0] * 3]],
                  "unoptimized": [["average of w", [2], [average] * 3]]} for number, average in enumerate(averages)]
        return Run(label, [(0, steps)])

    for averages, cause in (([1.0, 1.0, 1.0], "learning-rate"), ([1.0, 1.0, 2.0], "learning-rate"),
                            ([1.0, 2.0, 2.0], "buffers")):
        report = compare_runs(run("A", [1.0, 1.0, 1.0], 0.1), run("B", averages, 0.2))
        assert (report["verdict"], report["cause"]) == ("different", cause), report


def test_the_earliest_difference_of_an_average_is_reported():
    """As of ranks, before one of rank 0 and the other run that follows from it."""
    step = made("A", [("w", [2], [0.0] * 3, [1.0] * 3, [1.0] * 3)]).states(0)[0]

    def run(label, *ranks):
        return Run(label, [(rank, [{**step, "unoptimized": [["average of w", [2], [size] * 3]]} for size in sizes])
                           for rank, sizes in enumerate(ranks)])

    report = compare_runs(run("A", [1.0, 1.0, 1.0]), run("B", [1.0, 1.0, 2.0], [1.0, 4.0, 4.0]))
    assert (report["cause"], report["step"]) == ("buffers", 1), report
    assert "differs between ranks 0 and 1 of B" in report["message"]
    report = compare_runs(run("A", [1.0]), run("B", [1.0], [4.0]))  # it differs when it is first recorded
    assert report["cause"] == "start" and "of B; copy the model after its weights are equal: " in report["message"]


@pytest.mark.parametrize(("other", "said"), [(3.0, "so the datasets differ, or only some samples"), (1.0, "")])
def test_indices_of_two_subsets_are_not_taken_for_equal_samples(other, said):
    report = compare_runs(*differing(batch(1.0, 2.0, indices=[0, 1]), batch(1.0, other, indices=[0, 1])))
    assert report["cause"] == "samples" and said in report["message"]


def test_a_gradient_that_is_added_up_over_other_tensors_is_named():
    """As if ranks averaged the gradients of different experts."""
    one, two = (lambda grad, name=name, start=start: (name, [2], [start] * 3, grad, [1.0] * 3)
                for name, start in (("one", 1.0), ("two", 2.0)))
    b = made("B", [one([3.0, 2.0, 1.5])], [two([3.0, 2.0, 1.5])])
    report = compare_runs(made("A", [one([4.0, 1.0, 2.0]), two([4.0, 3.0, 1.0])]), b)
    assert report["cause"] == "unknown" and "equal gradients for different tensors, one and two" in report["message"]


@pytest.mark.parametrize("flat", [True, False])
def test_gradients_that_are_not_known_are_of_no_other_tensor(flat):
    states = [{"rows": [Row(name, [2], [start] * 3, [0.1], UNKNOWN, [1.0] * 3)]}
              for name, start in (("v", 1), ("w", 2))]
    side = SimpleNamespace(states=states, run=SimpleNamespace(ranks={0: 0, 1: 0}), label="B")
    assert bool(mixed(SimpleNamespace(flat=flat, sides=[side]))) != flat


@pytest.mark.parametrize(("values", "said"), [((1.0, 2.0), "; A has never changed 1 of 2, such as w"), ((1.0, 1.0), ""),
                                              ((2.0, 1.0), "; B has never changed 1 of 2, such as w")])
def test_a_parameter_that_only_one_run_has_never_changed_is_named(values, said):
    pairs = [[Row(name, [2], [1.0] * 3, [0.1], [1.0] * 3, [value] * 3) for value in found]
             for name, found in (("v", (2.0, 2.0)), ("w", values))]
    assert unchanged(SimpleNamespace(pairs=pairs)) == said


def test_noise_is_no_part_of_a_gradient():
    """Before BatchNorm, the gradient of a bias is noise; those of two ranks add up to that of one, to within zero."""
    def rows(weight, bias):
        return [(name, [2], [1.0] * 3, [size] * 3, [1.0] * 3) for name, size in (("weight", weight), ("bias", bias))]

    whole, parts = made("A", rows(1.0, 1e-17)), made("B", rows(1.0, 3e-17), rows(2.0, 8e-17))
    assert not parts_of(parts.at(0)[0], whole.at(0)[1])
    halves = made("B", rows(0.4, 3e-17), rows(0.6, 8e-17))
    assert parts_of(halves.at(0)[0], whole.at(0)[1])


def test_samples_that_every_rank_reads_count_once():
    """In tensor and pipeline parallelism, the batches have the same size, and something else differs."""
    a, b = (made(label, *[[("weight", [2], [0.0] * 3, [1.0, projection, 0.5], [0.0] * 3)]] * ranks)
            for label, ranks, projection in (("A", 1, 0.7), ("B", 2, 0.2)))
    difference = Difference(a, b, 0, "grad", match(a.at(0)[1], b.at(0)[1]))
    assert difference.a.samples == difference.b.samples == [1.0, 2.0]


@pytest.mark.parametrize(("cut", "samples", "losses", "cause"), [
    (2, [1.0, 1.0], [0.8, 1.2], "loss"), (1, [1.0, 1.0], [0.8, 1.2], "no-backward"),
    (2, [1.0, 2.0], [0.8, 1.2], "no-backward"), (2, [1.0, 1.0], [1.0, 1.0], "no-backward"),
    (2, [], [0.8, 1.2], "no-backward")])  # the samples were not seen
def test_ranks_with_parts_of_tensors_have_equal_losses_for_equal_samples(cut, samples, losses, cause):
    a, b = differing(batch(*{*samples}), *[batch(*samples[rank:rank + 1]) | {"losses": [loss]}
                                           for rank, loss in enumerate(losses)])
    b.cut = cut
    report = compare_runs(a, b)
    assert report["cause"] == cause and report["message"].startswith("not sure: "), report


def test_only_the_loaders_that_differ_are_compared():
    a, b = differing({"batches": batch(1.0, 2.0)["batches"] + batch(3.0, loader=1)["batches"]},
                     {"batches": batch(1.0, 2.0)["batches"] + batch(4.0, loader=1)["batches"]})
    a.at(0)
    assert "0 of the step's 1 samples of loader 2 of 2" in compare_runs(a, b)["message"]
    assert a.at(0)[2] == [3.0] and b.at(0)[2] == [4.0]
    a, b = differing({"batches": batch(1.0, 2.0)["batches"] + batch(3.0, loader=1)["batches"]}, batch(1.0, 2.0))
    report = compare_runs(a, b)
    assert report["cause"] == "batch-size" and "3 samples in A, 2 in B" in report["message"]
