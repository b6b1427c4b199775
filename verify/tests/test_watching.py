"""What one run shows without another: equal shares, rates, orders and copies that differ."""
import json
from types import SimpleNamespace

import pytest
import torch
from made import made

from verify.comparing import LIMITS
from verify.recording import only_creates_state
from verify.records import Run
from verify.watching import new_order, one_share, rates, replicas, watch


@pytest.mark.parametrize("numbers", [(0, 2), (0, 1)])
def test_parts_of_a_tensor_may_have_an_optimizer_of_their_own(numbers):
    """It follows a backward pass of its own, as in a GAN, or joins the other one in the second step."""
    first = made("the run", *[[("w", [2], [1.0] * 3, [1.0] * 3, [2.0] * 3)]] * 2)
    second = made("the run", *[[("table", [4], [size] * 3, [size] * 3, [size] * 3),
                                ("norm", [3], [1.0] * 3, [1.0] * 3, [2.0] * 3)] for size in (1.0, 2.0)])
    for rank in first.ranks:
        one, two = first.ranks[rank][0], second.ranks[rank][0]
        steps = ({**one, "optimizer": 0}, {**one, "optimizer": 0, "rows": one["rows"] + two["rows"]},
                 {**two, "optimizer": 1})
        first.ranks[rank] = [steps[number] for number in numbers]
    first.length = 2
    assert replicas(first, LIMITS["own"]) is None


@pytest.mark.parametrize(("rates", "grad", "only"), [
    ([0.0, torch.tensor(0.0)], 0.0, True), ([0.0, 0.1], 0.0, False), ([0.0, 0.0], 1.0, False),  # such as a warm-up
    ([None, None], 0.0, False)])  # an optimizer without rates
def test_a_step_without_rate_and_gradients_is_none_of_training(rates, grad, only):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in rates]
    for item in parameters:
        item.grad = torch.full((2,), grad)
    groups = [{"params": [item], "lr": rate} for item, rate in zip(parameters, rates)]
    assert only_creates_state(SimpleNamespace(param_groups=groups), parameters) == only


@pytest.mark.parametrize(("shuffled", "loader", "said"), [
    (True, 0, ("set-epoch", "rank 0 reads the same order in epochs 1 and 2", None)), (False, 0, None),
    (True, 1, ("set-epoch", "rank 0 reads the same order of loader 2 in epochs 1 and 2", None))])
def test_only_an_order_that_is_shuffled_must_change(shuffled, loader, said):
    batches = [[number, [], [1.0, 2.0, 3.0], [], []] for number in range(loader + 1)]
    epoch = [{"event": "step", "rows": [], "batches": batches, "flags": []},
             {"event": "epoch", "shuffled": shuffled, "loader": loader}]
    assert new_order(Run("the run", [(0, 2 * epoch)]), None) == said


@pytest.mark.parametrize(("name", "cause"), [("parameter", "samples"), ("w", None)])
def test_without_modules_ranks_with_equal_weights_must_read_other_samples(name, cause):
    """With modules whose inputs were not seen, they may have parts of a sequence."""
    found = one_share(made("the run", *[[(name, [2], [1.0] * 3)]] * 2), None)
    assert (found and found[0]) == cause


@pytest.mark.parametrize(("first", "later", "cause"), [(0.1, 0.1, None), (0.1, 0.2, "rank-lr"), (0.2, 0.2, None)])
def test_stages_with_equal_rates_at_first_must_have_equal_rates_later(first, later, cause):
    run = made("the run", [("one", [2])], [("two", [2])])
    for rank, steps in run.ranks.items():
        name, shape, start, _, *more = steps[0]["rows"][0]
        steps[:] = [steps[0] | {"optimizer": 0, "rows": [[name, shape, start, [rate if rank else 0.1], *more]]}
                    for rate in (first, later)]
    run.length = 2
    assert (rates(run, None) or (None, 0))[0] == cause


def test_copies_of_the_model_must_start_equal_on_all_ranks():
    """Such as the target network of a critic that is copied before DDP sends the weights of rank 0."""
    run = made("the run", [("w", [2], [1.0] * 3)], [("w", [2], [1.0] * 3)])
    for rank, state in enumerate(run.states(0)):
        state["unoptimized"] = [["average of w", [2], [1.0 + rank] * 3]]
    said = replicas(run, LIMITS["own"])[1]
    assert "copies of the model differ, such as average of w; copy the model after its weights are equal" in said


@pytest.mark.parametrize(("earlier", "cause"), [([], "start"), ([["average of w", [2], [1.0] * 3]], None)])
def test_copies_are_compared_when_their_optimizer_first_steps(earlier, cause):
    """As those of a generator, after the critic's steps; later, only rank 0 may update them."""
    run = made("the run", [("w", [2], [1.0] * 3)], [("w", [2], [1.0] * 3)])
    for rank, steps in run.ranks.items():
        late = {"optimizer": 1, "unoptimized": [["average of w", [2], [1.0 + rank] * 3]]}
        steps[:] = [steps[0] | {"optimizer": 0, "unoptimized": earlier}, steps[0] | late]
    run.length = 2
    found = replicas(run, LIMITS["own"])
    assert found == (cause and (cause, found[1], 2)), found


@pytest.mark.parametrize(("grads", "cause"), [((1.0, 1.0), "start"), ((1.0, 2.0), None), ((0.0, 0.0), None)])
def test_equal_gradients_show_that_weights_which_start_apart_are_replicas(grads, cause):
    """Without DDP, other weights may be parts of a tensor, whose gradients differ, or are all zero."""
    ranks = [[("w", [2], [1.0] * 3, [1.0] * 3, [1.0] * 3), ("v", [2], [start] * 3, [size] * 3, [1.0] * 3)]
             for start, size in zip((1.0, 2.0), grads)]
    assert (replicas(made("the run", *ranks), LIMITS["own"]) or (None,))[0] == cause


def test_replicas_may_start_at_zero():
    run = made("the run", [("w", [2])], [("w", [2])])
    for state in run.states(0):
        state["replicas"] = True
    assert replicas(run, LIMITS["own"]) is None


def test_a_run_in_which_all_parameters_are_frozen_is_not_sound(tmp_path):
    events = [{"event": "parameters", "optimizer": 0, "rows": []}]
    for _ in range(4):
        events += [{"event": "rows", "rows": [], "options": [], "unoptimized": [], "states": []},
                   {"event": "step", "optimizer": 0, "batches": [], "flags": [], "samples": []}]
    (tmp_path / "0-1.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    report = watch(tmp_path)
    assert report["verdict"] == "not comparable"
    assert report["message"] == "no parameter in its optimizers requires a gradient"
