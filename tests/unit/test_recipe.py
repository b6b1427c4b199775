"""Metrics, schedule, updates, compilation and the options of train_combined.py, tested in this process."""
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

import train_combined
from common import combined, errors, layers, recipe, updates


def trained(warm_up, skipped=(), state=None, fused=False, schedule=None):
    """Return the rates of the updates in six steps, two per epoch, and the warm-up. fp16 skips some steps."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scheduler = schedule(optimizer) if schedule else LambdaLR(optimizer, recipe.cosine(3, 0.0))
    counter, rates, used = updates.WarmUp(optimizer, warm_up), [], []
    if state:
        counter.load_state_dict(state)
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    updates.after_update(optimizer, lambda: rates.append(used[-1]))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale((weight * (float("inf") if step in skipped else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
        assert not rates or used[-1] == pytest.approx(scheduler.get_last_lr()[0] * counter.factor) or step in skipped
        if step % 2:
            scheduler.step()
    assert weight.item() == pytest.approx(1 - sum(rates))
    return rates, counter


def test_the_rate_rises_to_that_of_the_scheduler_and_follows_it():
    assert trained(0)[0] == pytest.approx([1, 1, 0.75, 0.75, 0.25, 0.25])
    assert trained(3)[0] == pytest.approx([1 / 3, 2 / 3, 0.75, 0.75, 0.25, 0.25])
    rates, counter = trained(4)
    assert rates == pytest.approx([0.25, 0.5, 0.75 * 0.75, 0.75, 0.25, 0.25]) and counter.state_dict() == {"done": 6}
    assert trained(4, state={"done": 3})[0] == pytest.approx([1, 1, 0.75, 0.75, 0.25, 0.25])
    assert trained(4, state={"done": 7})[1].done == 13  # updates, which train_combined.py logs


def test_a_scheduler_that_multiplies_the_rate_does_not_multiply_the_reduction():
    rates, _ = trained(4, schedule=lambda optimizer: StepLR(optimizer, 1, 0.5))
    assert rates == pytest.approx([0.25, 0.5, 0.5 * 0.75, 0.5, 0.25, 0.25])


def test_each_group_keeps_a_rate_of_its_own():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weight], "lr": rate} for weight, rate in zip(weights, (1.0, 0.1))])
    updates.WarmUp(optimizer, 2)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones(1)
        optimizer.step()
    assert [weight.item() for weight in weights] == pytest.approx([1 - 1.5, 1 - 0.15])
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflows_is_no_step_of_the_warm_up(fused):
    rates, counter = trained(4, skipped=[1], fused=fused)
    assert rates == pytest.approx([0.25, 0.75 * 0.5, 0.75 * 0.75, 0.25, 0.25]) and counter.done == 5


class Operators(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.__name__)
        return function(*args, **(kwargs or {}))


def test_the_average_is_torchs_without_its_copies():
    """On a GPU, torch's copy of the counter waits for all earlier steps."""
    model, operators = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)), Operators()
    own, of_torch = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        with operators:
            updates.update_average(own, model, 0.9)
        of_torch.update_parameters(model)
    assert own.n_averaged == of_torch.n_averaged == 3
    assert all(map(torch.equal, own.parameters(), of_torch.parameters()))
    assert "_foreach_lerp_.Scalar" in operators.names and not any("copy" in name for name in operators.names)


def test_smoothing_is_of_a_copy_and_of_a_loss_that_has_it():
    criterion = torch.nn.CrossEntropyLoss()
    smoothed = train_combined.smooth(criterion, 0.1)
    assert (criterion.label_smoothing, smoothed.label_smoothing) == (0.0, 0.1)
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    assert torch.equal(smoothed(outputs, targets), torch.nn.CrossEntropyLoss(label_smoothing=0.1)(outputs, targets))
    with pytest.raises(errors.UsageError, match="--label-smoothing 0.1: MSELoss does not support it"):
        train_combined.smooth(torch.nn.MSELoss(), 0.1)
    train_combined.smooth(torch.nn.MSELoss(), 0)


def test_powersgd_would_keep_an_overflow():
    """The script rejects it before it changes the model."""
    with pytest.raises(errors.UsageError, match="--compress powersgd: not with --precision fp16"):
        combined.compress(None, "powersgd", scaled=True)


def test_a_trace_has_five_steps_after_the_first_five(tmp_path, monkeypatch):
    monkeypatch.setattr("atexit.register", lambda *_: None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    combined.trace(tmp_path, torch.device("cpu"), optimizer, rank=3)
    for step in range(1, 13):
        with torch.profiler.record_function(f"step number {step}"):
            optimizer.step()
    seen = set(map(int, re.findall(r"step number (\d+)", (tmp_path / "trace-3.json").read_text())))
    assert seen == {6, 7, 8, 9, 10}


class Block(torch.nn.Module):
    """Four layers of 1 MiB, DDP's first bucket."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(512, 512) for _ in range(4)])

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


@pytest.mark.drill
def test_each_block_is_one_graph_and_equal_blocks_are_one_too(group):
    from torch._dynamo import config, utils

    utils.counters.clear()
    model = torch.nn.Sequential(Block(), Block())
    with config.patch(optimize_ddp=config.optimize_ddp):  # restores it afterwards
        layers.compile_blocks(model)
        DistributedDataParallel(model)(torch.randn(2, 512, requires_grad=True)).sum().backward()
    assert utils.counters["aot_autograd"]["ok"] == 1


class Half(torch.nn.Module):
    """A layer on every second token."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs)

    def forward(self, tokens):
        return self.layer(tokens)[:, ::2]


class Head(Half):
    pass


@pytest.mark.nightly
@pytest.mark.parametrize(("widths", "graphs"), [((4, 4, 4, 4), 6), ((4, 5, 6, 7), 12)])
def test_blocks_that_differ_compile_for_each_size_and_equal_ones_for_all_sizes(widths, graphs):
    """Four blocks, one of another class, three sizes of batch. A ResNet's kernels for all sizes would be slower."""
    from torch._dynamo import config, reset, utils

    reset()
    utils.counters.clear()
    model = torch.nn.Sequential(*map(Half, widths, widths[1:]), Head(widths[-1], 4))
    with config.patch(optimize_ddp=config.optimize_ddp):
        layers.compile_blocks(model)
        for size in (2, 3, 5):
            model(torch.randn(size, 16, 4)).sum().backward()
    assert utils.counters["aot_autograd"]["ok"] == graphs


def test_bf16_gradients_lose_digits_or_are_refused_where_torch_has_no_nccl(group):
    """The test accepts both builds of torch: the CUDA build has NCCL, and the CPU build does not."""
    model = torch.nn.Linear(3, 1, bias=False)
    parallel_model, inputs = DistributedDataParallel(model), torch.tensor([[1 / 3, 1 / 5, 1 / 7]])
    if not dist.is_nccl_available():
        with pytest.raises(errors.UsageError, match="--compress bf16: this build of torch has neither NCCL nor XCCL"):
            combined.compress(parallel_model, "bf16", scaled=False)
        return
    combined.compress(parallel_model, "bf16", scaled=False)
    parallel_model(inputs).sum().backward()
    assert torch.equal(model.weight.grad, inputs.bfloat16().float())
