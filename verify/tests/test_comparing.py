"""How tensors of two runs are matched, and which differences count."""
import copy
import math

import pytest
from made import made

from verify.comparing import Failure, compare_runs, filled, float64_fails, printed_differ, unequal_steps
from verify.explaining import unmatched
from verify.records import MIXED, UNKNOWN, UNNAMED, Row, Run, Starts, equal, in_step, load, match, steps_of
from verify.running import own_error


@pytest.mark.parametrize(("noise", "verdict"), [(1e-17, "same"), (1e-9, "different")])
def test_the_error_of_a_gradient_that_is_zero_moves_nothing(noise, verdict):
    """Adam makes a whole update of it, as of the bias of attention's keys; nor does its average count."""
    runs = []
    for label, size in (("A", 1.0), ("B", 3.0)):
        runs.append(made(label, [("w", [2], [1.0] * 3, [1.0] * 3, [2.0] * 3),
                                 ("bias", [2], [0.0] * 3, [noise] * 3, [size * 1e-7] * 3)]))
        runs[-1].states(0)[0]["unoptimized"] = [["average of bias", [2], [size * 1e-7] * 3]]
    assert compare_runs(*runs)["verdict"] == verdict


@pytest.mark.parametrize(("kinds", "said", "found"), [
    (("end", "failed"), "Connection closed by peer", "after 1 steps, rank(s) [0] of B end, and rank(s) [1] fail"),
    (("end", "failed"), "ValueError: a picture is broken", None),
    (("failed", "failed"), "Connection reset by peer", None)])
def test_a_rank_that_waits_for_one_that_has_ended_is_named(kinds, said, found):
    run = made("B", [("w", [2])], [("w", [2])])
    for events, kind in zip(run.events.values(), kinds):
        events.append({"event": kind})
    fact = unequal_steps(run, Failure("exit code 1", said))
    assert fact.startswith(f"not sure: {found}") and fact.endswith(said) if found else fact is None


@pytest.mark.parametrize(("kinds", "said", "found"), [
    ([["begin", "failed"], ["begin", "begin", "failed"]], "Connection closed by peer", True),
    ([["begin", "failed"], ["begin", "begin", "failed"]], "ValueError: a picture is broken", False),
    ([["begin", "failed"], ["begin", "failed"]], "Connection closed by peer", False),
    ([["begin", "failed"], ["begin", "begin"]], "Connection closed by peer", False)])
def test_ranks_that_wait_for_each_other_in_different_collectives_take_unequal_steps(kinds, said, found):
    run = made("B", [("w", [2])], [("w", [2])])
    for events, names in zip(run.events.values(), kinds):
        events[:] = [{"event": name} for name in names]
    fact = unequal_steps(run, Failure("exit code 1", said))
    assert fact == (f"not sure: the ranks of B take [1, 2] steps, and all fail, as if they waited in different "
                    f"collectives: {said}" if found else None)


def test_the_time_to_match_tensors_is_linear(monkeypatch):
    """Thousands of norms have the same initial value. A few hundred comparisons for each are enough."""
    calls = []
    for module in ("records", "explaining"):
        monkeypatch.setattr(f"verify.{module}.equal", lambda one, two: calls.append(1) or equal(one, two))
    rows, others = ([Row(f"{name}{number}", [4], [2.0 + max(0, number - 1999)] * 3, [0.1], [number] * 3, [1.0] * 3)
                     for number in range(count)] for name, count in (("a", 3000), ("b", 2000)))
    pairs = match(rows, others)
    assert [(one.name[1:], two.name[1:]) for one, two in pairs] == [(str(number),) * 2 for number in range(2000)]
    assert unmatched(rows, others, pairs)[0] == "unknown" and len(calls) < 300 * 5000


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 12345.0])
def test_a_tensor_is_found_by_its_initial_value(size):
    """Zeros, too, as in a LayerNorm's bias, and values that differ by rounding error."""
    [found], [other] = ([Row("w", [4], [value] * 3, [0.1], [1.0] * 3, [1.0] * 3)] for value in (size, size + 1))
    near = found._replace(start=[size * (1 + 1e-12)] * 3)
    assert Starts([other, found]).alike(near) == [1]


def test_a_command_that_fails_in_float64_is_named_with_what_to_do():
    line = float64_fails([None, Failure("exit code 1", "Traceback\nRuntimeError: same dtype, double != float")], [8, 3])
    assert line.startswith("in float64, command B fails after 3 step(s)") and "dtype of another tensor" in line
    assert line.endswith("RuntimeError: same dtype, double != float") and not float64_fails([None, None], [8, 8])
    for error in ("traceback : Signal 6 (SIGABRT) received by PID 8", "TypeError: 'float' object is not callable"):
        line = float64_fails([None, Failure("exit code 1", f"  {error}")], [8, 8])
        assert line.endswith(f"which proves less: {error}")


def test_the_error_of_a_process_without_a_traceback_is_in_torchruns_summary():
    rule, last = "=" * 60, "  traceback : Signal 6 (SIGABRT) received by PID 8"
    text = "\n".join([rule, "train.py FAILED", "-" * 60, "  exitcode  : -6 (pid: 8)", last, rule])
    assert own_error(text).splitlines()[-1] == last and not own_error("")


def test_a_parameter_is_known_by_its_name_or_by_its_place_or_by_its_weights():
    row = lambda name, shape, start: Row(name, shape, [start] * 3, [0.1], [0.0] * 3, [0.0] * 3)  # noqa: E731
    left = [row("a", [2], 1.0), row("b", [2], 2.0)]
    assert match(left, left[::-1]) == list(zip(left, left))
    assert match(left, [row("x", [2], 5.0), row("y", [2], 6.0)])[0][1][0] == "x"
    assert match(left, [row("0", [2], 2.0)]) == [(left[1], row("0", [2], 2.0))]
    twins = [row(name, [2], 1.0)._replace(grad=[value] * 3) for name, value in (("a", 5), ("b", 6), ("c", 5), ("d", 9))]
    assert match(twins[:2], twins[2:]) == [*zip(twins[:2], twins[2:])]  # each row once, though c is nearer to b
    scalars = [row(name, [], 0.0)._replace(grad=[value, value * (1 + error), -value]) for name, value, error in (
        ("amplitude", 1.0, 0.0), ("bias", 9.0, 0.0), ("amplitude", 1.0, 0.0), ("bias", 9.0, 1e-15))]
    for others in (scalars[2:], scalars[:1:-1]):
        unnamed = [row._replace(name=UNNAMED) for row in others]
        found = match([row._replace(name=UNNAMED) for row in scalars[:2]], unnamed)
        assert [one.grad[0] == pytest.approx(two.grad[0]) for one, two in found] == [True] * 2


@pytest.mark.parametrize(("right", "printed", "differs"), [
    ("epoch 1  loss 0.513  acc 81.3 %  2.1 s", "[0] epoch 1  loss 0.513  acc 81.3 %  1.7 s", None),
    ("{'val_loss': 0.5130}", "{'val_loss': 0.5131}", None),  # the last digit may be rounded
    ("{'val_loss': 0.5130}", "{'val_loss': 0.5170}", "val_loss 0.5130 and B 0.5170"),
    ("mIoU=0.2", "rank 0: mIoU=0.1\nrank 1: mIoU=0.3", None),  # a line of each rank
    ("train/loss: 1.5e-3", "train/loss: 3e-3", "train/loss 1.5e-3 and B 3e-3"), ("step 7", "step 8", None),
    ("epoch 1 loss 0.51", "epoch 1 loss 0.53", None),  # the loss of rank 0's share
    ("validation: loss 0.51", "validation: loss 0.53", "loss 0.51 and B 0.53")])
def test_metrics_that_both_commands_print_are_compared(right, printed, differs):
    said = printed_differ(right, printed, 1e-6)
    assert differs in said if differs else said is None


def test_the_time_to_read_metrics_is_linear():
    """In a word of a million characters, trying each letter again would take hours."""
    assert printed_differ("a1" * 500_000 + " loss 1", "a1" * 500_000 + " loss 1", 1e-6) is None


def test_a_difference_that_low_precision_allows_is_no_proof():
    rows = [[("weight", [2], [1.0] * 3, [1.0] * 3, [size] * 3)] for size in (1.0, 1.04)]
    a, b = (made(label, found) for label, found in zip("AB", rows))
    a.flags = b.flags = {"torch.bfloat16"}
    report = compare_runs(a, b, native=True)
    assert report["verdict"] == "alike" and "within 0.038: too coarse to prove" in report["message"]


@pytest.mark.parametrize(("native", "sizes", "decay", "verdict"), [
    (True, [2.50002, 3.0, 4.0], "0", "same"), (True, [2.5, 4.0, 4.0], "0", "different"),
    (True, [2.5, 3.0, 4.0], "0.1", "different"), (False, [2.5, 3.0, 4.0], "0", "different"),
    (True, [2.5, 3.0, 30.0], "0", "different")])  # by more than both have moved from 2.5
def test_a_few_updates_from_rounding_errors_are_no_difference_in_low_precision(native, sizes, decay, verdict):
    """As of the bias of attention's keys, whose gradient should be zero: Adam divides it by its own size."""
    a, b = (made(label, [(f"w{number}", [2], [2.5] * 3, [1.0] * 3, [value] * 3) for number, value in enumerate(values)])
            for label, values in (("A", [2.5, 3.0, 3.0]), ("B", sizes)))
    for state, value in zip(a.states(0) + b.states(0), ("0", decay)):
        state["rows"] = [[*row, None, 2, {"weight_decay": value}] for row in state["rows"]]
    report = compare_runs(a, b, native)
    assert report["verdict"] == verdict and report["cause"] == (None if verdict == "same" else "optimizer"), report


def test_a_batch_that_is_read_ahead_belongs_to_the_step_that_trains_on_it():
    read = [[0, 1], [2], [3], []]
    steps = in_step([{"batches": [[0, [], [float(number)], [], []] for number in numbers]} for numbers in read])
    assert [step["samples"] for step in steps] == [[0.0], [1.0], [2.0], [3.0]]


def test_weights_that_differ_by_rounding_are_copies():
    """As after a step to the worst neighbour and back, as in SAM, with another norm on each rank."""
    b = made("B", *[[("w", [2], [1.0, 1.0, 1.0 + rounding], [2.0] * 3, [1.0] * 3)] for rounding in (0, 1e-15)])
    assert len(b.at(0)[1]) == 1
    apart = made("B", *[[("w", [2], [1.0, 1.0, 1.0 + moved], [2.0] * 3, [1.0] * 3)] for moved in (0, 1e-3)])
    assert len(apart.at(0)[1]) == 2
    stages = made("B", *[[("bias", [size], [0.0] * 3, [2.0] * 3, [1.0] * 3)] for size in (2, 3)])
    assert len(stages.at(0)[1]) == 2


def test_ranks_that_skip_different_steps_stop_at_different_ones():
    """Only rank 0 has skipped a batch: its gradients in the next step are those of another batch."""
    first = made("B", *[[("w", [2], [1.0] * 3, [1.0] * 3, [1.0] * 3)]] * 2).states(0)[0]
    other = {**first, "rows": [[*row[:4], [2.0] * 3, row[5]] for row in first["rows"]]}
    a, b = Run("A", [(0, [first] * 3)]), Run("B", [(0, [first, other]), (1, [first] * 3)])
    report = compare_runs(a, b)
    assert (report["cause"], report["step"]) == ("rank-stops", 2) and "take [2, 3] steps" in report["message"], report


def test_a_rank_that_has_failed_has_not_stopped():
    step = made("B", [("w", [2])]).states(0)[0]
    failed = Run("B", [(0, [step, {"event": "failed"}]), (1, [step, step])])
    assert not unequal_steps(failed, None) and unequal_steps(Run("B", [(0, [step]), (1, [step, step])]), None)


@pytest.mark.parametrize(("change", "flat"), [
    ({}, True), ({"name": "w"}, False),  # the optimizer has a tensor of the module
    ({"shape": [2]}, False),  # a copy of the weight, as in float32: its gradients can be compared
    ({"grad": 0.0}, False),  # the optimizer was created before the model was moved
    ({"moved": 1.0}, False),  # the program trains its own tensor, not the module
    ({"states": [{"exp_avg": [1.0] * 3}]}, False),  # --resume compares the shards
    ({"second": "w"}, False)])  # the module's own optimizer steps later
def test_weights_are_compared_if_the_optimizer_has_flat_shards(change, flat):
    change = {"name": "parameter", "shape": [1], "grad": 1.0, "moved": 2.0} | change
    row = change["name"], change["shape"], [1.0] * 3, [change["grad"]] * 3, [2.0] * 3
    steps = [{**made("B", [row]).states(0)[0], "unoptimized": [["weight w", [2], [value] * 3]],
              "states": change.get("states", [])} for value in (1.0, change["moved"])]
    steps[1]["rows"] = [[change.get("second", change["name"]), *row[1:]] for row in steps[1]["rows"]]
    run = Run("B", [(0, [*steps, {"event": "end", "unoptimized": [["weight w", [2], [3.0] * 3]]}])])
    assert run.flat == flat and run.length == 2
    found = [(row.name, row.start[0], row.value[0]) for step in range(2) for row in run.at(step)[1]]
    assert (found == [("w", 1.0, 2.0), ("w", 1.0, 3.0)]) == flat
    assert Run("B", [(0, steps)]).length == 2 - flat  # the weights after the last step are not known


def test_flat_shards_with_several_rates_are_compared_without_these():
    step = {**made("", [("w", [2])]).states(0)[0], "states": []}
    shards = [["parameter", [1], [1.0] * 3, [rate], [1.0] * 3, [2.0] * 3] for rate in (0.1, 0.2)]
    weights = [[["weight w", [2], [value] * 3]] for value in (1.0, 2.0, 3.0)]
    flat = [{**step, "rows": shards, "unoptimized": found} for found in weights[:2]]
    flat.append({"event": "end", "unoptimized": weights[2]})
    whole = [{**step, "rows": [["w", [2], [1.0] * 3, [0.1], [1.0] * 3, [value] * 3]]} for value in (2.0, 3.0)]
    for one, two in ((flat, whole), (whole, flat)):
        report = compare_runs(Run("A", [(0, copy.deepcopy(one))]), Run("B", [(0, copy.deepcopy(two))]))
        assert report["verdict"] == "same", report


def test_unknown_gradients_and_rates_are_those_of_the_other_run():
    flat, other = (Row("w", [2], [1.0] * 3, rate, grad, [value] * 3) for rate, grad, value in (
        (MIXED, UNKNOWN, 1.0), ([0.1], [2.0, 1.0, 0.5], 2.0)))
    assert filled(flat, other) == other._replace(value=flat.value) and filled(other, flat) == other
    assert filled(flat._replace(rate=[0.2]), other).rate == [0.2]


@pytest.mark.parametrize(("met", "verdict"), [(2.0, "different"), (1.0, "alike")])
def test_weights_that_are_averaged_after_each_step_are_no_gradients(met, verdict):
    """Only with plain SGD is it the same."""
    step = made("A", [("w", [2])]).states(0)[0]

    def run(label, *ranks):
        return Run(label, [(rank, [{**step, **{when: [["w", [2], [size] * 3]] for when, size in zip(
            ("before", "after"), sizes)}} for sizes in steps]) for rank, steps in enumerate(ranks)])

    report = compare_runs(run("A", [(0.0, 1.0), (1.0, 3.0)]),
                          run("B", [(0.0, 0.5), (met, 2.0)], [(0.0, 1.5), (met, 4.0)]))
    assert (report["verdict"], report["cause"]) == (verdict, "not-averaged" if met == 2.0 else None), report


@pytest.mark.parametrize(("values", "found"), [((0.5, 1.5), (math.inf, [])), ((0.5, 0.5), (0, []))])
@pytest.mark.parametrize("end", [math.nan, 1e43])
def test_ranks_that_train_apart_and_diverge_have_not_met(end, values, found):
    """NaN or a huge number is no weight that they share. Replicas that diverge are not apart."""
    step = made("A", [("w", [2])]).states(0)[0]
    ranks = [[{**step, "before": [["w", [2], [before] * 3]], "after": [["w", [2], [after] * 3]]}
              for before, after in ((0.0, value), (end, end))] for value in values]
    run = Run("B", [*enumerate(ranks)])
    assert run.trains_apart() == found


def test_tensors_with_equal_starts_are_matched_by_the_direction_of_their_gradients():
    """Such as norms, if all gradients are four times as large."""
    grads = [4.0, 3.0, 2.6], [1.0, 0.9, 0.43]
    left, right = ([Row(str(factor * number), [2], [1.0] * 3, [0.1], [factor * value for value in grad], [1.0] * 3)
                    for number, grad in enumerate(grads, 1)] for factor in (1, 4))
    assert [(one.name, two.name) for one, two in match(left, right[::-1])] == [("1", "4"), ("2", "8")]
    noise = left[0]._replace(name="noise", grad=[1e-17 * value for value in grads[0]])
    pairs = match([noise, *left], [*right, noise._replace(name="other noise", grad=[1e-17, 0.0, 0.0])])
    assert [(one.name, two.name) for one, two in pairs] == [("noise", "other noise"), ("1", "4"), ("2", "8")]


def test_two_parameters_that_look_alike_are_two():
    rows = [("parameter", [2], [0.0] * 3, [size] * 3, [size] * 3) for size in (1.0, 7.0)]
    assert len(made("A", rows, rows).at(0)[1]) == 2


def test_a_step_has_what_each_of_its_optimizers_has():
    names = "before", "after", "clips", "flags", "stale"
    events = [{"event": kind, "rows": [], **{name: [number] for name in names}} for number, kind in enumerate((
        "step", "joined", "joined", "step"))]
    first, second = steps_of(events)
    assert [first[name] for name in names] == [[0, 1, 2]] * 5 and [second[name] for name in names] == [[3]] * 5
    assert load({"states": ["a"], "joined": [{"states": ["b"]}, {"states": ["c"]}]})["states"] == ["a", "b", "c"]


def test_rows_that_do_not_fit_their_table_are_not_cut(tmp_path):
    file = tmp_path / "0-1.jsonl"
    file.write_text('{"event": "rows", "rows": [[[0.1], [1], [1], 2, 0, null], [[0.1], [1], [1], 2, 0, null]]}\n')
    state = {"file": file, "place": 0, "table": [["w", [1], [1], None]], "options": [{}]}
    with pytest.raises(ValueError, match="longer"):
        load(state)
