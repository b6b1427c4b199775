"""The first value that differs, and draws of random numbers, tell the cause in runs that are made by hand."""
import pytest
import torch
from made import batch, differing, made, preceded

from verify.comparing import compare_runs
from verify.modules import Modules
from verify.records import FROZEN, INPUTS, Row
from verify.tracing import trace
from verify.values import draws_that_differ, first_value


@pytest.mark.parametrize(("own", "number", "said"), [
    (1, 4, "equal gradients, but not of 1 of 4 parameters, such as v0, so average these, too"),
    (2, 5, "equal gradients, but not of 2 of 5 parameters, such as v0, so average these, too"),
    (2, 4, "evidence"), (0, 3, "evidence")])
def test_averaged_gradients_that_each_rank_clips_by_its_own_norm_are_known(own, number, said):
    """A tensor that is not averaged enters the norm, so that those of all tensors differ. Two may do so by chance."""
    ranks = [[(f"v{n}", [2], [1.0 + n] * 3,
               [by * (n + 2 + rank * (n < own // 2)), by * (1 + rank * (n < own)), by], [1.0] * 3)
              for n in range(number)] for rank, by in enumerate((1.0, 0.7))]
    a, b = made("A", ranks[0]), made("B", *ranks)
    report = {"step": 1, "cause": "not-averaged", "message": "evidence"}
    assert said in trace(report, a, b)["message"]
    for rank, state in enumerate(b.states(0)):
        for row in state["rows"][:own]:
            row[2] = [1.0 + rank] * 3  # other slices of a tensor need no average
    slices = [[[*row[:3], *row[4:]] for row in state["rows"]] for state in b.states(0)]
    assert trace(report, a, made("B", *slices)) == report


@pytest.mark.parametrize(("losses", "part"), [
    ([], "loss, or what the program makes of its gradients,"), ([1.0], "backward pass")])
def test_without_a_loss_the_gradients_may_differ_for_any_reason(losses, part):
    state = {"losses": losses, "passed": [["output", "Net", True, 4, 8, 1.0, 1.0]]}
    runs = differing(state, state)
    found = trace({**compare_runs(*runs), "cause": "unknown"}, *runs)
    assert f"the outputs of all modules agree, so the {part} differs" in found["message"], found


@pytest.mark.parametrize(("before", "factor", "first", "cause", "said"), [
    ("unknown", 1.0, [1, 1, 1], "clip", "not sure: the gradients agree after the last backward pass"),
    ("unknown", 0.5, [1, 1, 1], "clip", "not sure: the gradients agree after the last backward pass"),
    ("unknown", 0.7, [1, 1, 1], "scale", "after the last backward pass, the gradients of B are 0.7 times"),
    ("unknown", 1.0, [2, 2, 2], "group-scale", "after the last backward pass, 1 of 2 gradients of B are "),
    ("unknown", 0.7123, [1, 1, 1], "clip", "not sure: after the last backward pass, the gradients of B are 0.71"),
    ("unknown", 1.0, [0, 0, 0], "no-gradient", "after the last backward pass, 1 parameter(s) get no gradient in A"),
    ("unknown", 1.0, [2, 1, 3], "unknown", "evidence"),
    ("clip", 1.0, [2, 1, 3], "no-backward", "not sure: after the last backward pass, equal mean losses")])
def test_gradients_that_are_averaged_by_hand_are_compared_as_means_or_sums(before, factor, first, cause, said):
    """The ranks' gradients after the backward pass have the mean 1 or, as parts of a sum, the mean 0.5."""
    a, b = differing({}, {}, {})
    digests = [1.0, 1.0, 2.0], [9.0, 0.5 * factor, 3.0 * factor], [7.0, 1.5 * factor, factor]
    for state, computed in zip(a.states(0) + b.states(0), digests):
        state["rows"] = [[*row, None, 2, {}, computed] for row in state["rows"]]
    a.states(0)[0]["rows"][0][-1] = [x * y for x, y in zip(first, digests[0])]
    report = trace({"step": 1, "cause": before, "message": "evidence"}, a, b)
    assert report["cause"] == cause and report["message"].startswith(said), report


@pytest.mark.parametrize(("losses", "cause"), [
    ([3.0, 3.0], "no-backward"), ([4.0, 4.0], "loss"), ([2.5, 3.5], "no-backward")])
def test_passes_that_only_pass_cached_gradients_back_have_no_losses(losses, cause):
    """As in GradCache: each rank's first backward pass has the whole loss, or that of its rows."""
    a, b = differing({"losses": [3.0]}, *[
        {"losses": [loss, 9.0], "batches": [[0, [], [sample], [], []]]} for loss, sample in zip(losses, (1.0, 2.0))])
    for state in a.states(0) + b.states(0):
        state["passed"] = [["output", "Net", True, 4, 8, 1.0, 1.0]]
    report = trace(compare_runs(a, b), a, b)
    assert report["cause"] == cause and report["message"].startswith("not sure: "), report


@pytest.mark.parametrize("more", [[], [["() 1", [2.0], "b.py:4"]]])
@pytest.mark.parametrize(("divisors", "cause"), [
    ((3.0, 4.0), "uneven-mean"), ((3.5, 3.5), "loss"), ((3.0, 5.0), "loss")])
def test_a_divisor_of_each_rank_is_named_with_its_line(divisors, more, cause):
    """Even if the program also divides by the number of its micro-batches."""
    a, b = differing({"losses": [3.0], "divisors": [["() 1", [7.0], "a.py:2"]]}, *[
        {"losses": [5.0], "divisors": [*more, [f"() {len(more) + 1}", [divisor], "b.py:3"]]} for divisor in divisors])
    for state in a.states(0) + b.states(0):
        state["passed"] = [["output", "Net", True, 4, 8, 1.0, 1.0]]
    report = trace({"step": 1, "cause": "loss", "message": "not sure: evidence"}, a, b)
    assert report["cause"] == cause, report
    assert ("divide by 3, 4 (b.py:3), and A by 7" in report["message"]) == (cause == "uneven-mean"), report


@pytest.mark.parametrize(("ours", "theirs", "special", "cause"), [
    ([7.0], [7.0], {}, "loss"), ([7.0], [1.0, 7.0], {}, "loss"), ([7.0], [8.0], {}, "uneven-mean"),
    ([1.0], [1.0], {}, "uneven-mean"), ([7.0], [], {}, "uneven-mean"), ([7.0, 1.0], [7.0, 1.0], {}, "uneven-mean"),
    ([7.0], [7.0], {"batches": []}, "uneven-mean"), ([7.0], [7.0], {"passed": []}, "uneven-mean")])
def test_losses_that_are_divided_by_one_count_differ_in_another_way(ours, theirs, special, cause):
    """A number below that of the samples, which are two here, may be that of the micro-batches, or a temperature."""
    shape = "(3,)" if len(ours) > 1 else "()"
    a, b = differing(*[{"divisors": [[f"{shape} {place}", [by], "a.py:2"] for place, by in enumerate(found)],
                        "passed": [["output", "Net", True, 4, 8, 1.0, 1.0]]} | special
                       for found in (ours, theirs, theirs)])
    report = trace({"step": 1, "cause": "uneven-mean", "message": "not sure: evidence"}, a, b)
    assert report["cause"] == cause and ("divide their losses by 7" in report["message"]) == (cause == "loss"), report
    assert trace({"step": 1, "cause": "buffers", "message": "evidence"}, a, b)["cause"] == "buffers"


@pytest.mark.parametrize(("divisor", "cause"), [(7.0, "loss"), (8.0, "uneven-mean")])
def test_losses_of_padded_outputs_may_be_divided_by_one_count(divisor, cause):
    a, b = differing(*[{"divisors": [["() 1", [by], "a.py:2"]], "passed": [["output", "Net", True, 4, size, 1.0, 1.0]]}
                       for by, size in ((7.0, 8), (divisor, 12), (divisor, 8))])
    report = trace({"step": 1, "cause": "uneven-mean", "message": "not sure: evidence"}, a, b)
    assert report["cause"] == cause and "has another size" in report["message"], report
    assert ("reads padding; both programs divide their losses by 7" in report["message"]) == (cause == "loss"), report


@pytest.mark.parametrize(("shape", "divisors", "cause"), [
    ("(2, 3)", [7.0, 7.0], "uneven-mean"), ("(2, 3)", [6.9, 7.0], "loss"), ("(2, 3)", [6.0, 6.0], "loss"),
    ("(2, 3)", [7.1, 7.1], "uneven-mean"),
    ("(4, 3)", [7.0, 7.0], "loss"), ("(2, 2)", [7.0, 7.0], "loss"), ("(3,)", [7.0, 7.0], "loss")])
def test_sums_that_are_gathered_but_not_added_up_are_named(shape, divisors, cause):
    """As in a Dice loss: each rank divides by the sums of each rank, one after the other."""
    states = [{"divisors": [[f"{shape} 1", [divisor, 2.0], "b.py:3"]]} for divisor in divisors]
    for number in range(2):
        a, b = differing({"divisors": [["() 1", [5.0], "a.py:1"], ["(3,) 1", [7.0, 1.0], "a.py:2"]]}, *states)
        for state in a.states(0) + b.states(0):
            state["passed"] = [["output", "Net", True, 4, 8, 1.0, 1.0]]
        report = trace({"step": 1, "cause": "loss", "message": "not sure: evidence"}, *((b, a) if number else (a, b)))
        said = "B divides by 2 rows of gathered numbers (b.py:3), and A by their sum, 7" in report["message"]
        assert (report["cause"], said) == (cause, cause == "uneven-mean"), report


ONE, TWO, MEAN = [[1.0] * 3], [[3.0] * 3], [[2.0] * 3]


@pytest.mark.parametrize(("whole", "parts", "change", "cause"), [
    ([MEAN], [[ONE], [TWO]], {}, "uneven-mean"),
    ([MEAN], [[ONE], [ONE]], {}, "loss"),  # equal on the ranks, as a statistic of all samples
    ([ONE], [[ONE], [TWO]], {}, "loss"), ([MEAN, ONE], [[ONE], [TWO]], {}, "loss"),  # of a part of A, such as a task
    ([MEAN], [[ONE], [TWO]], {"shape": "[(2,)]"}, "loss"),  # of another size, as the samples have
    ([MEAN + ONE], [[ONE + ONE], [TWO + ONE]], {"name": "Mul"}, "loss"),  # linear in what each rank has
    ([MEAN + MEAN], [[ONE + ONE], [TWO + TWO]], {"name": "Mul"}, "uneven-mean"),
    ([MEAN], [[ONE], [TWO]], {"cause": "buffers"}, "buffers"), ([MEAN], [[ONE], [TWO]], {"cut": 2}, "loss"),
    ([MEAN], [[ONE], [TWO]], {"cut": 2, "batches": [batch(1.0), batch(2.0)]}, "uneven-mean"),  # as experts are cut
    ([MEAN], [[ONE], [TWO]], {"more": "constant"}, "uneven-mean"), ([MEAN], [[ONE], [TWO]], {"passed": []}, "loss"),
    ([MEAN], [[ONE], [TWO]], {"more": "input"}, "uneven-mean"),
    ([MEAN], [[ONE], [TWO]], {"more": "input", "passed": []}, "samples"),
    ([MEAN], [[ONE], [TWO]], {"cause": "uneven-mean", "divisors": [["() 1", [7.0], "c.py:4"]]}, "uneven-mean")])
def test_a_term_of_the_loss_from_each_ranks_own_samples_is_named_with_its_line(whole, parts, change, cause):
    """Such as a product of means, or the square of a covariance."""
    name, passed = change.get("name", "Pow"), [["output", "Net", True, 4, 8, 1.0, 1.0]]
    a, b = differing(*[{"passed": change.get("passed", passed), "operands": [
        [f"{name} {number}", shape, digests, place] for number, digests in enumerate(found)],
        "divisors": change.get("divisors", [])} for found, shape, place in [(whole, "[(3,)]", "a.py:2"), *[
            (part, change.get("shape", "[(3,)]"), "b.py:3") for part in parts]]])
    for state in a.states(0) + b.states(0) if "more" in change else ():  # a mask, or what the next module takes
        state["passed"] = [*state["passed"], [change["more"], "Where 1", True, 1, 4, float(state in b.states(0)), 2.0]]
    for state, found in zip(b.states(0), change.get("batches", ())):
        state |= {"samples": found["batches"][0][2]}
    b.cut = change.get("cut", 1)
    report = trace({"step": 1, "cause": change.get("cause", "loss"), "message": "not sure: evidence"}, a, b)
    assert report["cause"] == cause, report
    assert (f"an operand of {name} 0, b.py:3, differs between the ranks of B" in report["message"]) == (
        cause == "uneven-mean"), report
    if cause == "uneven-mean":
        found = trace({"step": 1, "cause": cause, "message": "not sure: evidence"}, b, a)
        assert "the ranks of B, and has" in found["message"] and "not sure" not in found["message"], found


@pytest.mark.parametrize(("message", "second", "cause"), [
    ("not sure: evidence", 1.0, "loss"), ("evidence", 1.0, "evaluation"), ("not sure: evidence", 2.0, "evaluation")])
def test_layers_in_evaluation_mode_change_outputs(message, second, cause):
    """An evaluation before the step suggests them. If all outputs agree, the loss differs in another way."""
    a, b = differing({}, {}, {})
    for state in a.states(0) + b.states(0):
        state["passed"] = [["output", "Net", True, 4, 8, second if state in b.states(0) else 1.0, 1.0]]
    assert trace({"step": 1, "cause": "evaluation", "message": message}, a, b)["cause"] == cause


@pytest.mark.parametrize(("cause", "message", "unlike", "named", "said"), [
    ("random", "evidence", {"draw"}, "random", "evidence\nthe program draws other random numbers"),
    ("buffers", "evidence", {"draw"}, "buffers", "evidence\nthe outputs of all modules agree"),
    ("not-averaged", "evidence", {"draw"}, "not-averaged", "evidence"),
    ("samples", "evidence", set(), "samples", "evidence"),
    ("loss", "not sure: evidence", {"draw in a module"}, "loss", "evidence\nthe outputs of all modules agree"),
    ("loss", "not sure: evidence", {"draw", "own"}, "random", "the program draws other random numbers"),
    ("loss", "not sure: evidence", {"teacher", "own"}, "forward", "the output of Teacher, which computes without grad"),
    ("buffers", "evidence", {"teacher"}, "buffers", "evidence\nthe output of Teacher, which computes without grad"),
    ("buffers", "evidence", {"weights"}, "buffers", "evidence\nthe output of Net differs")])
def test_values_say_more_but_change_only_a_cause_that_is_unclear(cause, message, unlike, named, said):
    a, b = differing({}, {}, {})
    for number, state in enumerate(a.states(0) + b.states(0)):
        draw = "a.py:1 (torch, module Drop)" if "draw in a module" in unlike else "a.py:1 (torch)"
        value = {what: 1.0 + number * (what in unlike) for what in ("teacher", "own", "weights")}
        state |= {"sites": [[draw, 4, 1.0 + number * bool(unlike & {"draw", "draw in a module"}), 1.0]],
                  "operands": [["Pow 1", "[(3,)]", [[value["own"]] * 3], "a.py:2"]],
                  "passed": [["weights", "Net", False, 0, 4, 1.0, 1.0],
                             ["weights", "Net", False, 0, 4, value["weights"], 1.0],
                             ["no_grad output", "Teacher", True, 4, 8, value["teacher"], 1.0],
                             ["output", "Net", True, 4, 8, value["weights"], 1.0]]}
    report = trace({"step": 1, "cause": cause, "message": message}, a, b)
    assert report["cause"] == named and report["message"].startswith(said), report
    assert (report["message"] == "evidence") == (said == "evidence"), report


@pytest.mark.parametrize(("number", "divisors", "size", "cause"), [
    (4, [[3.0] * 2, [4.0] * 3], 8, "uneven-mean"), (4, [[3.0] * 2, [4.0] * 3], 12, "uneven-mean"),
    (4, [[3.0] * 2, [4.5] * 3], 8, "loss"), (4, [[2.0, 1.0], [4.0] * 3], 8, "uneven-mean"),
    (2, [[3.0] * 2, [4.0] * 2], 8, "uneven-mean"),
    (1, [[2.0] * 2, [1.0, 2.0]], 8, "uneven-mean"),  # two micro-batches of equal counts
    (4, [[6.0] * 2, [8.0] * 3], 8, "uneven-mean"), (4, [[9.0] * 2, [12.0] * 3], 8, "loss")])  # twice as much: two ranks
def test_a_divisor_of_all_micro_batches_of_a_rank_counts_once(number, divisors, size, cause):
    """The padded outputs may have another size, as a rank's micro-batches are not those of one process."""
    a, b = differing({"losses": [1.0] * number, "divisors": [["() 1", [7.0], "a.py:2"]] * number}, *[
        {"losses": [2.0] * len(found), "divisors": [["() 1", [by], "b.py:3"] for by in found]} for found in divisors])
    for side, each in ((a, 8), (b, size)):
        for state in side.states(0):
            state["passed"] = [["output", "Net", True, 4, each, 1.0, 1.0]]
    report = trace({"step": 1, "cause": "loss", "message": "not sure: evidence"}, a, b)
    assert (report["cause"], "(b.py:3), and A by 7" in report["message"]) == (cause, cause == "uneven-mean"), report
    assert ("outputs of all modules agree" in report["message"]) == (size == 8), report
    assert ("divide by 3, 4 (" in report["message"]) == (cause == "uneven-mean" and divisors[0] == [3.0] * 2), report


def test_divisors_that_the_ranks_of_both_runs_have_differ_rightly():
    states = [{"losses": [loss], "divisors": [["() 1", [divisor], "a.py:2"]]}
              for loss, divisor in ((3.0, 3.0), (5.0, 4.0))]
    runs = [made(label, *[[("w", [3], [1.0] * 3, [size] * 3, [1.0] * 3)]] * 2)
            for label, size in (("A", 1.0), ("B", 2.0))]
    for state, change in zip(runs[0].states(0) + runs[1].states(0), states * 2):
        state |= change | {"passed": [["output", "Net", True, 4, 8, 1.0, 1.0]]}
    report = {"step": 1, "cause": "loss", "message": "not sure: evidence"}
    assert trace(report, *runs)["cause"] == "loss"


@pytest.mark.parametrize(("second", "cause"), [([4.0, -2.0], "uneven-mean"), ([4.0, -3.0], "loss")])
def test_a_vector_that_divides_such_as_the_sizes_in_a_dice_loss_is_compared_as_a_sum(second, cause):
    a, b = differing({"losses": [3.0], "divisors": [["(3,) 1", [7.0, 1.0], "a.py:2"]]}, *[
        {"losses": [5.0], "divisors": [["(3,) 1", sums, "b.py:3"]]} for sums in ([3.0, 3.0], second)])
    for state in a.states(0) + b.states(0):
        state["passed"] = [["output", "Net", True, 4, 8, 1.0, 1.0]]
    report = trace({"step": 1, "cause": "loss", "message": "not sure: evidence"}, a, b)
    said = "divide by vectors whose sums are 3, 4 (b.py:3), and A by vectors whose sums are 7" in report["message"]
    assert (report["cause"], said) == (cause, cause == "uneven-mean"), report


@pytest.mark.parametrize(("other", "passed", "cause", "named"), [
    (1.0, 1.0, "loss", []), (1.0, 5.0, "samples", ["integers"]), (2.0, 1.0, "samples", ["loader", "integers"])])
def test_draws_that_change_nothing_are_innocent(other, passed, cause, named):
    """Such as a shuffle of each rank's own share; not time steps, which are an input of the model, nor noise."""
    runs = [made(label, [("w", [2], [1.0] * 3, [size] * 3, [1.0] * 3)]) for label, size in (("A", 1.0), ("B", 7.0))]
    for one, draw, sample, size in zip(runs, (3.0, 4.0), (1.0, other), (1.0, passed)):
        state, = one.states(0)
        kinds = ["torch, loader", "torch, integers"] + ["torch"] * (size > 1)
        state |= {"samples": [sample, 2.0], "sites": [[f"{kind} ({kind})", 8, draw, draw] for kind in kinds],
                  "passed": [["input", "Net", True, 4, 8, size, size]]}
    report = {"step": 1, "cause": "loss", "message": "evidence"}
    found = trace(report, *runs)
    assert (found["cause"], [word for word in ("loader", "integers") if word in found["message"]]) == (cause, named)


@pytest.mark.parametrize(("last", "named"), [(2.0, []), (5.0, ["a.py:1 (torch)"])])
def test_draws_before_and_after_the_first_forward_pass_are_of_one_line(last, named):
    """As of a population of models, of which each rank evaluates a share: each rank draws before its first model."""
    sites = [[["a.py:1 (torch, before the first forward pass)", 1, 1.0, 1.0],
              *[["a.py:1 (torch)", 1, value, value] for value in (3.0, 4.0, 2.0)]],
             *[[["a.py:1 (torch, before the first forward pass)", 1, early, early],
                ["a.py:1 (torch)", 1, late, late]] for early, late in ((1.0, 3.0), (4.0, last))]]
    a, b = differing(*({"sites": each} for each in sites))
    assert draws_that_differ(a, b, 0) == named


def test_a_line_that_only_draws_before_the_first_forward_pass_is_said_to_do_so():
    place = "a.py:1 (torch, before the first forward pass)"
    assert draws_that_differ(*differing(*({"sites": [[place, 1, x, x]]} for x in (1.0, 2.0))), 0) == [place]


@pytest.mark.parametrize(("kind", "sample", "cause"), [
    ("output", 1.0, "random"), ("input", 1.0, "samples"), ("output", 2.0, "samples")])
def test_draws_that_no_input_shows_are_noise(kind, sample, cause):
    """Such as noise on the weights, which a model has from torch.func.functional_call."""
    states = [batch(value) | {"passed": [[kind, "Net", True, 4, 8, size, size]],
                              "sites": [["a.py:1 (torch)", 4, size, size]]}
              for value, size in ((1.0, 1.0), (sample, 5.0))]
    found = trace({"step": 1, "cause": "unknown", "message": "evidence"}, *differing(*states))
    assert found["cause"] == cause and "a.py:1 (torch)" in found["message"], found


@pytest.mark.parametrize(("cause", "named"), [("samples", False), ("start", True)])
def test_draws_of_initial_weights_are_named_only_if_these_differ(cause, named):
    runs = [made(label, [("w", [2], [1.0] * 3, [size] * 3, [1.0] * 3)]) for label, size in (("A", 1.0), ("B", 7.0))]
    for one, value in zip(runs, (1.0, 2.0)):
        one.states(0)[0] |= {"samples": [value, 3.0],
                             "sites": [["a.py:1 (torch.normal_, before the first forward pass)", 8, value, value]]}
    message = trace({"step": 1, "cause": cause, "message": "evidence"}, *runs)["message"]
    assert ("before the first forward pass" in message) == named


PASSED = [["input", "Net", True], ["input (integers)", "Net", True], ["input (integers)", "layer", False],
          ["output", "layer", False], ["output", "Net", True], ["input", "Loss", True]]


@pytest.mark.parametrize(("place", "cause", "said"), [
    (0, "samples", "the input of Net differs: look before the model"),
    (1, "loss", "the outputs of all modules agree"),  # an index into the batch depends on how it is divided
    (2, "loss", "the outputs of all modules agree"),  # as do integers from which equal outputs follow
    (3, "forward", "the output of layer differs"),
    (4, "forward", "the output of Net differs"), (5, "loss", "the input of Loss differs, though the outputs before")])
def test_the_first_value_that_differs_tells_the_cause(place, cause, said):
    values = [{"passed": [[*row, 4, 8, size if number == place else 1.0, 1.0] for number, row in enumerate(PASSED)]}
              for size in (1.0, 5.0)]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause and said in found["message"], found


@pytest.mark.parametrize("constants", [0, 1])
@pytest.mark.parametrize(("size", "cause"), [(8, "forward"), (16, "loss")])
def test_a_teacher_whose_outputs_have_another_size_is_not_named(size, cause, constants):
    """As in a validation that pads the shares of the ranks. Autograd may not have saved what the loss takes of it."""
    values = [{"passed": [["output", "Net", True, 4, 8, 1.0, 1.0],
                          ["no_grad output", "Teacher", True, 4, rows, mass, 1.0],
                          *[["constant", "MulBackward0 1", True, 1, 8, mass, 1.0 + mass]] * constants]}
              for rows, mass in ((8, 1.0), (size, 5.0))]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause and ("Teacher" in found["message"]) == (cause == "forward"), found


def test_what_enters_the_loss_is_no_evidence_if_outputs_are_not_compared():
    """As in a CTC loss of outputs that each rank pads to its own longest sample."""
    values = [{"passed": [["output", "Net", True, 4, rows, 1.0, 1.0], ["constant", "Mul 1", True, 1, 8, mass, 1.0]]}
              for rows, mass in ((8, 1.0), (12, 5.0))]
    report = {"step": 1, "cause": "uneven-mean", "message": "not sure: evidence"}
    found = trace(report, *differing(*values))
    assert found["cause"] == "uneven-mean" and "the output of Net has another size" in found["message"], found


def test_indices_that_a_model_passes_on_are_its_input():
    """Else, the input of the layer would differ inside the model."""
    values = [{"passed": [["input (integers)", name, name == "Net", 1, 8, size, size] for name in ("Net", "layer")]}
              for size in (1.0, 5.0)]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == "samples" and "look before the model" in found["message"], found


@pytest.mark.parametrize(("kind", "computed", "cause"), [
    ("input", [["Linear"], [], []], "forward"), ("input", [[], [], []], "samples"),
    ("output", [[], [], []], "forward")])
def test_an_input_that_is_computed_from_weights_is_no_sample(kind, computed, cause):
    values = [{"passed": [[kind, "Linear", True, 4, 8, size, size]], "computed": dict.fromkeys(names, "from weights")}
              for size, names in zip((1.0, 5.0, 5.0), computed)]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause and ("from weights" in found["message"]) == any(computed), found


@pytest.mark.parametrize(("kind", "name", "size", "cause"), [
    ("output", "bn", 5.0, "batchnorm"), ("output", "conv", 5.0, "forward"), ("output", "bn", 1.0, "loss"),
    ("input", "Net", 5.0, "samples")])
def test_batchnorm_is_the_cause_if_its_outputs_are_the_first_that_differ(kind, name, size, cause):
    values = [{"passed": [[kind, name, name == "Net", 4, 8, mass, mass]], "norms": ["bn"]} for mass in (1.0, size)]
    found = trace({"step": 1, "cause": "batchnorm", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause, found


@pytest.mark.parametrize(("special", "cause"), [({}, "loss"), ({"batches": []}, "samples")])
def test_other_targets_are_other_samples_if_the_samples_were_not_seen(special, cause):
    values = [{"passed": [["targets (integers)", "cross_entropy", True, 1, 8, size, size]]} | special
              for size in (1.0, 5.0)]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause and "the targets of cross_entropy differ" in found["message"], found


def test_targets_are_compared_if_only_the_last_stage_of_a_pipeline_has_them():
    targets = [{"passed": [["targets (integers)", "cross_entropy", True, 1, 8, size, size]]} for size in (1.0, 5.0)]
    assert first_value(*differing(targets[0], {"passed": []}, targets[1]), 0)[:2] == (
        "targets (integers)", "cross_entropy")


@pytest.mark.parametrize("sure", [True, False])
def test_an_unsure_reset_is_looked_at_again(sure):
    """The pass before may be that of an attack, whose gradients B sets to zero, as it should."""
    values = [{"passed": [["targets (integers)", "cross_entropy", True, 1, 8, size, size]]} for size in (1.0, 5.0)]
    message = "evidence" if sure else "not sure: evidence"
    found = trace({"step": 1, "cause": "reset", "message": message}, *differing(*values))
    assert found["cause"] == ("reset" if sure else "loss"), found


@pytest.mark.parametrize(("size", "cause", "said"), [
    (1.0, "loss", "the outputs of all modules agree"), (2.0, "forward", "the input (integers) of layer differs")])
def test_integers_matter_only_if_what_follows_from_them_differs(size, cause, said):
    """Such as the edges of a collated graph, which depend on the split."""
    values = [{"passed": [["input (integers)", "layer", False, 1, 8, edges, edges],
                          ["output", "layer", False, 4, 8, mass, mass]]} for edges, mass in ((1.0, 1.0), (5.0, size))]
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *differing(*values))
    assert found["cause"] == cause and said in found["message"], found


@pytest.mark.parametrize(("cause", "size", "said"), [
    ("no-backward", 5.0, "the outputs of all modules agree"), ("no-backward", 6.0, "the output of Net differs"),
    ("loss", 5.0, "the output of Net differs")])
def test_after_equal_losses_values_in_another_order_are_equal(cause, size, said):
    """Such as the logits for gathered rows, which stand in the order of the ranks."""
    values = [{"passed": [["output", "Net", True, 4, 8, *sums]]} for sums in ((5.0, 1.0), (size, 3.0))]
    found = trace({"step": 1, "cause": cause, "message": "evidence"}, *differing(*values))
    assert said in found["message"], found


@pytest.mark.parametrize(("message", "kind", "cause"), [
    ("not sure: equal losses", "constant", "loss"), ("a collective in b.py:2", "constant", "no-backward"),
    ("not sure: equal losses", "output", "no-backward")])
def test_losses_may_be_equal_by_chance_though_other_operands_enter_them(message, kind, cause):
    """Such as advantages that each rank normalizes: their mean, and so the loss of a first step, is zero."""
    values = [{"passed": [["output", "Net", True, 4, 8, 5.0, 1.0], [kind, "Mul 1", True, 1, 8, size, 1.0]]}
              for size in (5.0, 6.0)]
    assert trace({"step": 1, "cause": "no-backward", "message": message}, *differing(*values))["cause"] == cause


@pytest.mark.parametrize(("third", "place"), [(3.0, ()), (4.0, ("input", "Linear", 1))])
def test_equal_values_of_a_tensor_parallel_group_count_once(third, place):
    """Of four ranks, two by two compute with the same half of the batch."""
    sizes = [(16, 5.0), (8, 2.0), (8, 2.0), (8, third), (8, third)]
    values = [{"passed": [["input", "Linear", True, 4, number, size, size]]} for number, size in sizes]
    assert first_value(*differing(*values), 0) == place


@pytest.mark.parametrize(("weigh", "centered", "cause"), [
    (lambda mask: mask.float(), False, "uneven-mean"), (lambda mask: 2.0 * mask, False, "uneven-mean"),
    (lambda mask: torch.ones(mask.shape), False, "loss"), (lambda mask: torch.ones(mask.shape).bool(), False, "loss"),
    (lambda mask: mask.float(), True, "uneven-mean")])
def test_what_enters_the_loss_besides_outputs_is_compared(weigh, centered, cause):
    """One program masks all rows, and two ranks mask their own; both may divide by the sum of what they use.

    Weights of classes are equal on all ranks, and `centered` outputs need a gradient: neither says anything.
    """
    torch.manual_seed(0)
    layer, mask = torch.nn.Linear(2, 3), torch.tensor([1, 0, 1, 1]).bool()
    rows, classes, states = torch.randn(4, 2), torch.tensor([1.0, 2.0, 3.0]), []
    for part, form in ((slice(4), lambda mask: mask.float()), (slice(2), weigh), (slice(2, 4), weigh)):
        modules, weights = Modules(), form(mask[part])
        modules.names = {id(layer): "layer"}
        out = layer(rows[part])
        modules.passes("output", layer, out, True)
        values = (out - out.mean() if centered else out).square() * classes
        modules.constants((values.sum(1) * weights).sum() / weights.sum())
        states.append({"passed": modules.passed})
    found = trace({"step": 1, "cause": "uneven-mean", "message": "not sure: evidence"}, *differing(*states))
    assert found["cause"] == cause and "the outputs of all modules agree" in found["message"], found
    assert ("enters the loss" in found["message"]) == (cause == "loss")


def test_samples_that_were_not_seen_agree_if_all_inputs_do():
    values = [{"passed": [["input", "Net", True, 4, 8, 1.0, 1.0]]}] * 2
    message = "not sure: the samples were not seen, so they may differ; mean loss 1 in A, 2 in B"
    found = trace({"step": 1, "cause": "loss", "message": message}, *differing(*values))
    assert found["message"].startswith("mean loss 1 in A, 2 in B\nthe outputs of all modules agree"), found


@pytest.mark.parametrize(("before", "loader", "kind", "cause"), [
    ("loss", 0, "numpy, integers", "samples"),  # such as negatives, which come from no loader
    ("loss", INPUTS, "numpy, integers", "forward"),  # the samples are equal, so each rank has drawn its own
    ("loss", 0, "torch, before the first forward pass", "forward"),  # such as initial weights
    ("buffers", 0, "torch", "samples")])
def test_a_line_that_draws_other_numbers_comes_before_a_fallback(before, loader, kind, cause):
    states = [batch(1.0, 2.0, loader=loader) | {
        "passed": [["input (integers)", "layer", False, 4, 8, size, 1.0]],
        "sites": [[f"p.py:1 ({kind})", 4, size, 1.0]]}
        for size in (1.0, 5.0)]
    found = trace({"step": 1, "cause": before, "message": "not sure: evidence"}, *differing(*states))
    assert found["cause"] == cause and ("p.py:1" in found["message"]) == (cause == "samples"), found


def test_a_line_that_draws_other_numbers_comes_before_a_size():
    states = [batch(1.0, 2.0) | {"passed": [["output", "Net", True, 4, size, 1.0, 1.0]],
                                 "sites": [["p.py:1 (torch)", 4, float(size), 1.0]]} for size in (8, 12)]
    found = trace({"step": 1, "cause": "loss", "message": "not sure: evidence"}, *differing(*states))
    assert found["message"].startswith("the program draws other random numbers for this step"), found


@pytest.mark.parametrize(("second", "cause"), [(5.0, "random"), (1.0, "not-averaged")])
def test_a_rank_that_draws_other_numbers_than_rank_0_is_seen(second, cause):
    """Each rank of a tensor-parallel group draws as many numbers as the one process."""
    states = [{"sites": [["p.py:1 (torch)", 4, size, 1.0]]} for size in (1.0, second)]
    report = {"step": 1, "cause": "not-averaged", "message": "not sure: ranks differ"}
    found = trace(report, *differing(states[0], *states))
    assert found["cause"] == cause and ("p.py:1" in found["message"]) == (cause == "random"), found


@pytest.mark.parametrize(("site", "before", "size", "cause"), [
    ("(random, integers)", [1.0, 1.0], 1.0, "random"), ("(random, integers)", [0.0, 0.0], 1.0, "not-averaged"),
    ("(random, integers)", [1.0, 3.0], 1.0, "not-averaged"), ("(random, integers)", [1.0, 1.0], 2.0, "not-averaged"),
    ("(random, loader)", [1.0, 1.0], 1.0, "not-averaged"), (", module Net (random)", [1.0, 1.0], 1.0, "not-averaged")])
def test_gradients_that_ranks_have_averaged_before_may_differ_by_what_one_rank_draws(site, before, size, cause):
    """Such as an order of the tasks. random.shuffle draws again after a number that is too large."""
    output = ["output", "Net", True, 4, 8]
    states = [{"sites": [[f"p.py:1 {site}", *drawn]], "passed": [[*output, value, 1.0]]}
              for drawn, value in (([4, 5.0, 11.0], 1.0), ([7, 9.0, 31.0], size))]
    a, b = preceded(differing(states[0] | {"passed": [[*output, 1.0, 1.0]]}, *[
        state | {"passed": [[*output, size, 1.0]]} for state in states]), [1.0, 2.0], [1.0], [2.0])
    for rank, state in enumerate(b.states(0)):
        for row, grad in zip(state["rows"], (before[rank], 5.0 + rank)):
            row[4] = [grad] * 3
    for rank, state in enumerate(b.states(1)):  # something changes the gradients of each rank after the backward pass
        state["rows"] = [Row(*row[:4], [3.0, 1.0 + rank, 2.0], row[5], computed=[2.0, rank, 1.0])
                         for row in state["rows"]]
    report = {"step": 2, "cause": "not-averaged", "message": "evidence", "parameter": "v"}
    assert trace(report, a, b)["cause"] == cause
    assert trace({**report, "step": 1}, a, b)["cause"] == "not-averaged"


@pytest.mark.parametrize(("widths", "size", "place"), [
    ([9, 14], 20, ()), ([14, 14], 20, ("input", "Net", 1)), ([9, 14], 24, ("input", "Net", 1))])
def test_the_width_of_some_micro_batches_is_a_length(widths, size, place):
    """Of other samples, if a value of all micro-batches has another size."""
    values = [{"passed": [["input", "Net", True, width, 2 * width, each, each] for width in widths]
                         + [["input", "Net", True, 4, rows, 1.0, 1.0]] * 2} for rows, each in ((24, 1.0), (size, 5.0))]
    assert first_value(*differing(*values), 0) == place


def test_ranks_that_each_read_the_whole_batch_need_not_average():
    a, b = differing({}, {}, {})
    b.states(0)[1]["rows"][0][4] = [9.0] * 3
    report = compare_runs(a, b)
    assert report["cause"] == "not-averaged" and report["message"].startswith("not sure: ranks 0 and 1 of B")
    found = trace(report, a, b)
    assert found["message"].startswith("not sure: ") and found["cause"] == "not-averaged"  # nothing was recorded
    for state in (*a.states(0), *b.states(0)):
        state["passed"] = [["output", "Net", True, 4, 8, 1.0, 1.0]]
    assert trace(report, *differing(*a.states(0), *b.states(0)))["message"].startswith("ranks 0 and 1 of B")


@pytest.mark.parametrize(("ours", "theirs", "size", "said"), [
    (3.0, 3.0, 5.0, ""), (3.0, 4.0, 5.0, "only in B"), (4.0, 3.0, 5.0, "only in A"), (4.0, 5.0, 5.0, ""),
    (3.0, 4.0, 1.0, "")])  # another module of that name
def test_weights_that_change_between_two_steps_are_named(ours, theirs, size, said):
    """After the step before, the weights of layer, two parameters, have digests of 1 and 2."""
    states = [{"passed": [["output", "layer", False, 4, 8, 1.0, 1.0],
                          *[["weights", "layer", False, 0, 1, found, found] for found in (first, 9.0)]]}
              for first in (ours, theirs)]
    a, b = preceded(differing(*states), [1.0, 2.0], [1.0, 2.0])
    for state in (run.states(step)[0] for run in (a, b) for step in range(2)):
        state["rows"] = [[f"{name}.{part}", *row[1:5], [value] * 3] for name, part, row, value in zip(
            ("layer", "layer" if size > 1 else "other"), ("weight", "bias"), state["rows"], (1.0, 2.0))]
    report = {"step": 2, "cause": "loss", "message": "evidence"}
    found = trace(report, a, b)
    assert (found["cause"] == "optimizer") == bool(said) == ("weights of layer" in found["message"]), found
    assert said in found["message"]
    assert trace({**report, "step": 1}, a, b)["cause"] == "loss"
    assert trace({**report, "cause": "not-averaged"}, a, b)["cause"] == "not-averaged"  # weights are averaged, perhaps


@pytest.mark.parametrize(("a", "b", "cut", "cause", "said"), [
    ([1.0, 2.0], [[1.0, 2.0], [1.0, 3.0]], 1, "not-averaged", "equal on the ranks of B in the first call"),
    ([1.0, 2.0], [[1.0, 3.0], [1.0, 3.0]], 1, "optimizer", "equal on A and B in the first call"),
    ([1.0, 1.0], [[1.0, 1.0], [1.0, 1.0]], 1, "forward", "the output of layer differs"),
    ([1.0, 1.0], [[1.0, 1.0], [3.0, 3.0]], 2, "forward", "the output of layer differs"),  # slices of one module
    ([1.0, 1.0], [[1.0, 1.0], [3.0, 3.0]], 1, "loss", "evidence")])  # another module of that name, as in a pipeline
def test_weights_that_change_within_a_step_are_named(a, b, cut, cause, said):
    states = [{"passed": [["output", "layer", False, 4, 8, output, 1.0],
                          *[["weights", "layer", False, 0, 1, size, 1.0] for size in calls]]}
              for output, calls in ((1.0, a), *((5.0, calls) for calls in b))]
    runs = differing(*states)
    runs[1].cut = cut
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *runs)
    assert found["cause"] == cause and said in found["message"], found
    assert "layer" in found["message"] or cause == "loss"


@pytest.mark.parametrize(("a", "b", "cause"), [
    ([3.0, 1.0], [[2.0, 1.0], [4.0, 1.0]], "optimizer"), ([3.0, 1.0], [[1.0, 1.0], [2.0, 1.0]], "optimizer"),
    ([3.0, 1.0], [[3.0, 1.0], [4.0, 1.0]], "loss"), ([3.0, 1.0], [[3.0], [4.0]], "optimizer"),
    ([], [[], []], "optimizer")])
def test_a_loss_that_differs_before_the_weights_change_comes_first(a, b, cause):
    """As in the first of SAM's two passes. Means or sums over the ranks must agree."""
    states = [{"losses": losses, "passed": [["output", "layer", False, 4, 8, output, 1.0],
                                            *[["weights", "layer", False, 0, 1, size, 1.0] for size in weights]]}
              for losses, output, *weights in ((a, 1.0, 1.0, 2.0), *((part, 5.0, 1.0, 3.0) for part in b))]
    runs = differing(*states)
    found = trace({"step": 1, "cause": "loss", "message": "evidence"}, *runs)
    assert found["cause"] == cause and ("not sure: the losses" in found["message"]) == (cause == "loss"), found
    runs[1].states(0)[1]["passed"][-1][-2] = 4.0  # the ranks of B change them differently: this is no guess
    assert trace({"step": 1, "cause": "loss", "message": "evidence"}, *runs)["cause"] == "not-averaged"


@pytest.mark.parametrize(("loader", "said"), [(0, "evidence"), (INPUTS, "evidence\nthe output of Net differs")])
def test_values_explain_samples_only_if_these_are_inputs_of_models(loader, said):
    values = [batch(size, loader=loader) | {"passed": [["output", "Net", True, 4, 8, size, 1]]} for size in (1.0, 5.0)]
    assert trace({"step": 1, "cause": "samples", "message": "evidence"}, *differing(*values))["message"] == said


@pytest.mark.parametrize(("before", "step", "ours", "cause", "said"), [
    ("loss", 0, [2.0, 3.0], "start", "differ between rank 0 of A and rank 0 of B"),
    ("loss", 0, [1.0, 3.0], "start", "rank 1 of B"), ("loss", 1, [2.0, 2.0], "buffers", "rank 0 of B"),
    ("loss", 0, [1.0, 1.0], "loss", "evidence"), ("not-averaged", 0, [2.0, 3.0], "not-averaged", "evidence"),
    ("loss", 0, [7.0, 7.0], "loss", "evidence")])  # A has these weights: the name is of another stage
def test_frozen_weights_that_differ_are_named(before, step, ours, cause, said):
    values = [{"passed": [[FROZEN, "net", False, 0, 8, size, size]]} for size in (1.0, *ours)]
    values[0]["passed"].append([FROZEN, "other", False, 0, 8, 7.0, 7.0])
    values[1]["passed"] += [[FROZEN, "net", False, 0, 8, 5.0, 5.0],  # a later call, after an update of an average
                            [FROZEN, "of B alone", False, 0, 8, 6.0, 6.0]]
    runs = differing(*values)
    runs = preceded(runs, [1.0, 2.0], [1.0], [2.0]) if step else runs
    found = trace({"step": step + 1, "cause": before, "message": "evidence"}, *runs)
    assert found["cause"] == cause and said in found["message"], found


@pytest.mark.parametrize("cut", [1, 2])
def test_frozen_modules_with_one_name_on_two_stages_are_not_compared(cut):
    values = [{"passed": [[FROZEN, "0", False, 0, 8, size, size], ["output", "0", False, 4, 8, size, size]][:3 - cut]}
              for size in (1.0, 1.0, 7.0)]
    a, b = differing(*values)
    b.cut = cut  # weights of split tensors may differ
    assert first_value(a, b, 0) is None
