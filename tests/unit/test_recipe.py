"""The parts of common/recipe.py, in this process."""
import pytest
import torch

from common import errors, models, recipe


def trained(warm_up, skipped=(), state=None):
    """Return the rates of six steps of an optimizer at rate 1, two in an epoch, and the warm-up; fp16 skips some."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, models.cosine(3, 0.0))
    counter, rates = recipe.WarmUp(optimizer, scheduler, warm_up), []
    if state:
        counter.load_state_dict(state)
    optimizer.register_step_post_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale((weight * (float("inf") if step in skipped else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 2:
            scheduler.step()
    return rates, counter


def test_the_rate_rises_to_that_of_the_scheduler_and_follows_it():
    assert trained(0)[0] == pytest.approx([1, 1, 0.75, 0.75, 0.25, 0.25])
    assert trained(3)[0] == pytest.approx([1 / 3, 2 / 3, 0.75, 0.75, 0.25, 0.25])
    rates, counter = trained(4)
    assert rates == pytest.approx([0.25, 0.5, 0.75 * 0.75, 0.75, 0.25, 0.25]) and counter.state_dict() == {"done": 6}
    assert trained(4, state={"done": 3})[0] == pytest.approx([1, 1, 0.75, 0.75, 0.25, 0.25])


def test_a_step_that_overflows_is_no_step_of_the_warm_up():
    rates, counter = trained(4, skipped=[1])
    assert rates == pytest.approx([0.25, 0.75 * 0.5, 0.75 * 0.75, 0.25, 0.25]) and counter.done == 5


def test_smoothing_is_of_a_copy_and_of_a_loss_that_has_it():
    criterion = torch.nn.CrossEntropyLoss()
    smoothed = recipe.smooth(criterion, 0.1)
    assert (criterion.label_smoothing, smoothed.label_smoothing) == (0.0, 0.1)
    outputs, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    assert torch.equal(smoothed(outputs, labels), torch.nn.CrossEntropyLoss(label_smoothing=0.1)(outputs, labels))
    with pytest.raises(errors.UsageError, match="--label-smoothing 0.1: MSELoss has none"):
        recipe.smooth(torch.nn.MSELoss(), 0.1)
    recipe.smooth(torch.nn.MSELoss(), 0)
