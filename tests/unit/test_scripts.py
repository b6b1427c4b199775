"""The training scripts in this process, on a few digits: details that a complete launched run would hide."""
import contextlib
import importlib
import json
import os
import re
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import PROGRAMS, ROOT, SCRIPTS, load, same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_yours import EDITS, put_in
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.profiler import profile

from common import datasets, errors, models
from language import gpt, pairs, preferences, sampling, text

TINY = ["--model", str(PROGRAMS / "tiny_llama")]


@pytest.fixture
def script(alone, tmp_path, monkeypatch):
    """Return a function from a script's name and arguments to its module and its parsed arguments.

    The digits are 8 to train on and 4 to measure. A variant has its group, of one process, as after join_group().
    """
    digits = datasets.digits()
    monkeypatch.setattr(datasets, "digits", lambda: [(images[:count], labels[:count]) for (images, labels), count in
                                                      zip(digits, (8, 4), strict=True)])

    def start(name, *arguments):
        small = ["--device", "cpu", "--batch-size", "4", "--epochs", "1", "--workers", "0", "--output-dir"]
        monkeypatch.setattr(sys, "argv", [name, *small, str(tmp_path), *map(str, arguments)])
        module = importlib.import_module(name)
        if hasattr(module, "signals"):  # it would block them here and in all that the tests start after this
            monkeypatch.setattr(module.signals, "note_signals", lambda *names: threading.Event())
        args = module.parse_args()
        if hasattr(module, "join_group"):
            module.join_group(args)
        return module, args

    return start


def scalars(folder, tag):
    return EventAccumulator(str(folder)).Reload().Scalars(tag)


def apart(left, right):
    return max((left[name] - right[name]).abs().max() for name in left)


def events(module, args, name):
    """Return how often the profiler of torch saw `name` in a run."""
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        module.main(args)
    return sum(event.name == name for event in trace.events())


def test_what_is_measured_is_what_the_words_mean(script):
    """Image n has label n, whose logit has rank n: 1 in 8 is correct, and 5 in 8 are in the top five.

    An image is a number, which the model looks up in a table of logits.
    """
    module, _ = script("train")
    table = torch.stack([torch.arange(8.0).neg()] * 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(8), torch.arange(8)), 3)
    model = torch.nn.Embedding.from_pretrained(table)
    loss, metrics = module.evaluate(model, loader, lambda images: images, torch.device("cpu"))
    assert metrics == {"accuracy": 1 / 8, "top5": 5 / 8}
    assert loss == pytest.approx(-table.log_softmax(1).diagonal().mean().item())  # the last batch is a smaller one


def test_a_model_that_has_become_useless_is_not_saved(script, tmp_path):
    """The epoch's only loss was computed with the old weights, so only the validation loss shows it."""
    module, args = script("train", "--lr", "1e38", "--batch-size", "8")
    with pytest.raises(errors.RunError, match="epoch 1, step 1: the validation loss is (inf|nan)"):
        module.main(args)
    assert not list(tmp_path.glob("*.pt"))


def test_one_write_has_the_names_of_all_checkpoints_of_an_epoch(script, tmp_path):
    """Other ranks wait for the write. The file keeps its other names when the next epoch replaces one."""
    module, args = script("train", "--save-every", "1")
    module.main(args)
    assert len({(tmp_path / name).stat().st_ino for name in ("best.pt", "epoch-001.pt", "last.pt")}) == 1
    content = load(tmp_path / "best.pt")
    assert content["best_score"] == content["score"] >= 0  # its own included
    args.epochs, args.resume = 2, "auto"
    module.main(args)
    assert [load(tmp_path / name)["epoch"] for name in ("epoch-001.pt", "epoch-002.pt", "last.pt")] == [1, 2, 2]


def test_deterministic_algorithms_are_chosen_before_the_group_starts(script, monkeypatch):
    """NCCL chooses its algorithms when it starts."""
    found, start = [], dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda *parts, **options: (
        found.append(torch.are_deterministic_algorithms_enabled()), start(*parts, **options)))
    try:
        script("train_DDP", "--deterministic")
        assert found == [True]
    finally:
        torch.use_deterministic_algorithms(False)


def test_buffers_are_not_sent_in_each_forward_pass(script, monkeypatch):
    """DDP's constructor and the end of the epoch send them, so the count is the same for two steps and for four."""
    monkeypatch.setattr(models, "create_model", lambda *_: torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.BatchNorm1d(28 * 28), torch.nn.Linear(28 * 28, 10)))
    module, args = script("train_DDP")
    counts = []
    for args.batch_size in (4, 2):
        counts.append(events(module, args, "gloo:broadcast"))
    assert counts[0] == counts[1] > 0


def test_epochs_that_are_trained_again_replace_those_in_tensorboard(script, tmp_path):
    module, args = script("train", "--epochs", "3", "--save-every", "1")
    module.main(args)
    args.resume = str(tmp_path / "epoch-001.pt")
    module.main(args)
    assert [event.step for event in scalars(tmp_path, "loss")] == [1, 2, 3]


def test_best_is_the_first_of_the_highest_and_stays_when_accuracy_falls(script, tmp_path, monkeypatch):
    module, args = script("train", "--epochs", "3")
    accuracies = iter([0.5, 0.5, float("nan"), 0.25])
    monkeypatch.setattr(module, "evaluate", lambda *_: (1.0, {"accuracy": next(accuracies)}))
    module.main(args)
    assert load(tmp_path / "best.pt")["epoch"] == 1
    args.epochs, args.resume = 4, "auto"
    module.main(args)
    assert load(tmp_path / "best.pt")["epoch"] == 1
    content = load(tmp_path / "last.pt")
    assert (content["epoch"], content["score"], content["best_score"]) == (4, 0.25, 0.5)


def test_a_folder_knows_the_best_score_although_a_later_one_is_lower(script, tmp_path, monkeypatch):
    module, args = script("train_DCP", "--epochs", "2")
    accuracies = iter([0.5, 0.25])
    monkeypatch.setattr(module, "evaluate", lambda *_: (1.0, {"accuracy": next(accuracies)}))
    module.main(args)
    values = json.loads((max(tmp_path.glob("step-*")) / "values.json").read_text())
    assert [["score"], 0.25] in values and [["best_score"], 0.5] in values


@pytest.mark.parametrize("name", ["train_FSDP", "train_TP", "train_DCP", "train_PP"])
def test_each_sharded_script_asks_whether_its_backend_can_split_a_model(script, monkeypatch, name):
    def reject(backend, device_type):
        raise errors.UsageError(f"{backend} on {device_type}")

    module, args = script(name)
    monkeypatch.setattr(module.shards, "reject_gloo", reject)
    with pytest.raises(errors.UsageError, match="^gloo on cpu$"):
        module.main(args)


def test_sharded_scripts_load_weights_as_train_does(script, tmp_path, capsys):
    """The file has all tensors or some of them, in 16 bits; the script draws the others."""
    torch.manual_seed(7)
    weights = {**models.create_model("vit", 10, (1, 28, 28)).bfloat16().state_dict(), "more": torch.ones(1)}
    weights.pop("blocks.0.mlp.0.weight")
    torch.save(weights, tmp_path / "weights.pt")
    said = []
    for name in ("train", "train_FSDP", "train_TP", "train_PP", "train_DCP"):
        module, args = script(name, "--model", "vit", "--weights", tmp_path / "weights.pt", "--evaluate")
        module.main(args)
        said.append(capsys.readouterr().out)
        if dist.is_initialized():
            dist.destroy_process_group()
    assert len(set(said)) == 1 and "loaded 70 of 71 tensors" in said[0]


def test_what_fsdp_is_asked_for(script, monkeypatch):
    """One mesh dimension for one replica: with two, FSDP2 would also all-reduce each gradient in a group of one rank.

    Each unit, the root and its blocks, sums gradients where torch can: a backend's own average may be wrong. Under
    --bf16, only the root returns float32: between blocks, nothing is cast up and down.
    """
    module, args = script("train_FSDP", "--bf16", "--model", "vit")
    asked, units, seen, shard, criterion = [], [], [], module.fully_shard, module.criterion
    monkeypatch.setattr(FSDPModule, "set_force_sum_reduction_for_comms", lambda unit, wanted: asked.append(
        (unit, wanted)), raising=False)
    monkeypatch.setattr(module, "fully_shard", lambda unit, **options: (
        units.append((unit, options)), shard(unit, **options))[1])
    monkeypatch.setattr(module, "criterion", lambda outputs, targets: (
        seen.append(outputs.dtype), criterion(outputs, targets))[1])
    module.main(args)
    found = [unit for unit, _ in units]
    assert len(found) > 2 and asked == [(unit, True) for unit in found[-1:] + found[:-1]]
    assert {options["mesh"].mesh_dim_names for _, options in units} == {("shard",)}
    dtypes = [options["mp_policy"].output_dtype for _, options in units]
    assert dtypes == [None] * (len(found) - 1) + [torch.float32] and set(seen) == {torch.float32}


def test_the_average_has_the_statistics_that_rank_0_sent(script, tmp_path, monkeypatch):
    """One process has no peers, so evaluating the model changes the statistics instead."""
    monkeypatch.setattr(models, "create_model", lambda *_: torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.BatchNorm1d(28 * 28), torch.nn.Linear(28 * 28, 10)))
    module, args = script("train_combined", "--precision", "fp32", "--accum-steps", "1", "--ema", "0.5")
    measured = []

    def evaluate(model, *_):
        if not measured:
            for buffer in model.buffers():
                buffer.fill_(7)
        measured.append([buffer.clone() for buffer in model.buffers()])
        return 1.0, {"accuracy": 0.5}

    monkeypatch.setattr(module, "evaluate", evaluate)
    module.main(args)
    assert len(measured) == 2 and len(measured[1]) == 3
    assert all((buffer == 7).all() for buffer in measured[1])
    average = load(tmp_path / "last.pt")["average"]
    assert all((average[f"module.1.{name}"] == 7).all() for name in ("running_mean", "running_var"))


def test_the_average_is_that_of_the_updates(script, tmp_path):
    """Each epoch has one update, and its checkpoint contains the weights."""
    module, args = script("train_combined", "--ema", "0.75", "--precision", "fp32", "--accum-steps", "1", "--epochs",
                          "3", "--batch-size", "8", "--save-every", "1", "--lr", "1")
    module.main(args)
    first, *later = (load(tmp_path / f"epoch-{epoch:03}.pt") for epoch in (1, 2, 3))
    average = first["model"]
    for content in later:
        average = {name: 0.75 * value + 0.25 * content["model"][name] for name, value in average.items()}
    found = {name.removeprefix("module."): value for name, value in later[-1]["average"].items()}
    assert apart(average, found) < 1e-6 and apart(first["model"], later[-1]["model"]) > 1e-3


def test_every_micro_batch_has_the_scale_and_the_smoothing(script, tmp_path):
    """fp16 differs from fp32 only by rounding; three micro-batches take the same step as one, smoothed or not."""
    module, args = script("train_combined", "--lr", "1", "--batch-size", "8")

    def train(*values):
        args.precision, args.accum_steps, args.label_smoothing = values
        module.main(args)
        return load(tmp_path / "last.pt")["model"]

    plain, half = train("fp32", 3, 0), train("fp16", 3, 0)
    smooth, whole = train("fp32", 3, 0.3), train("fp32", 1, 0.3)
    assert 1e-6 < apart(plain, half) < 3e-3
    assert apart(smooth, whole) < 1e-6 and apart(plain, smooth) > 5e-3


class Overflowing(torch.nn.CrossEntropyLoss):
    """The gradient of its fifth loss in training overflows in fp16, but not the loss."""

    calls = 0

    def forward(self, outputs, targets):
        self.calls += torch.is_grad_enabled()
        total = outputs.float().sum() * 1e9 * (self.calls == 5)
        return super().forward(outputs, targets) + total - total.detach()


def test_an_overflow_in_one_micro_batch_skips_the_step(script, tmp_path, monkeypatch):
    """The scale, the warm-up and the average agree on the steps that were taken: one of two."""
    module, args = script("train_combined", "--precision", "fp16", "--accum-steps", "3", "--ema", "0.9",
                          "--warmup-steps", "3", "--batch-size", "8", "--epochs", "2")
    monkeypatch.setattr(module, "criterion", Overflowing())
    module.main(args)
    last = load(tmp_path / "last.pt")
    assert last["scaler"]["scale"] == 32768 and last["warmup"] == {"done": 1} and last["average"]["n_averaged"] == 1


@pytest.mark.parametrize("trained", [0.5, 0])
def test_evaluate_measures_the_average_of_a_checkpoint_that_has_one(script, capsys, trained):
    """Otherwise, the average would be that of the initial weights."""
    module, args = script("train_combined", "--precision", "fp32", "--accum-steps", "1", "--ema", trained)
    module.main(args)
    args.evaluate, args.resume, args.ema = True, "auto", 0.5
    module.main(args)
    shown, measured = [re.findall(r"(\S*accuracy|\S*top5|val_loss) (\S+)", line) for line in
                       capsys.readouterr().out.splitlines() if "top5" in line]
    assert shown == measured and len(shown) == (5 if trained else 3)


def test_the_rate_that_is_shown_is_that_of_the_last_update(script, tmp_path):
    """Two of the 100 warm-up steps are done."""
    module, args = script("train_combined", "--precision", "fp32", "--warmup-steps", "100")
    module.main(args)
    assert [event.value for event in scalars(tmp_path, "learning_rate")] == pytest.approx([0.05 * 4 / 128 * 2 / 100])


def test_the_optimizer_has_the_settings_of_the_command(script, tmp_path):
    """Biases get no weight decay."""
    module, args = script("train", "--lr", "0.2", "--momentum", "0.7", "--weight-decay", "0.3", "--lrf", "0.5")
    module.main(args)
    content = load(tmp_path / "last.pt")
    assert [(group["initial_lr"], group["momentum"], group["weight_decay"], len(group["params"])) for group in
            content["optimizer"]["param_groups"]] == [(0.2 * 4 / 128, 0.7, 0.3, 6), (0.2 * 4 / 128, 0.7, 0, 6)]
    assert content["scheduler"]["_last_lr"] == pytest.approx([0.5 * 0.2 * 4 / 128] * 2)


def test_any_dataset_of_windows_trains_a_language_model(script, tmp_path, capsys, monkeypatch):
    module, args = script("language.train", "--sample", "")
    rows = torch.arange(36).view(4, 9)
    data = torch.utils.data.TensorDataset(rows[:, :-1], rows[:, 1:])
    data.vocabulary = 36
    monkeypatch.setattr(module.text, "create_datasets", lambda *_: (data, data))
    module.main(args)
    assert load(tmp_path / "last.pt")["epoch"] == 1 and ", stdlib: 4 samples\n" in capsys.readouterr().out


def test_the_language_model_is_trained_as_the_command_says(script, tmp_path, monkeypatch):
    """All language scripts take these lines from language/train.py, so comparing them would not show a mistake."""
    (tmp_path / "text.txt").write_text("def one(): return 1\n" * 99)
    module, args = script("language.train", "--dataset", "text", "--data-path", tmp_path / "text.txt", "--length", "16",
                          "--windows", "8", "--momentum", "0.7", "--weight-decay", "0.3", "--epochs", "2")
    create, ends, read, windows = gpt.GPT, [], text.Windows.__getitems__, []
    monkeypatch.setattr(gpt, "GPT", lambda size, vocabulary, end: (ends.append(end), create(size, vocabulary, end))[1])
    monkeypatch.setattr(text.Windows, "__getitems__", lambda dataset, indices: (
        windows.append(dataset.starts), read(dataset, indices))[1])
    for args.document_mask in (False, True):
        module.main(args)
    assert ends == [None, 0]
    assert len({tuple(starts.tolist()) for starts in windows}) == 3  # of two epochs, and to measure
    groups = load(tmp_path / "last.pt")["optimizer"]["param_groups"]
    assert [(group["betas"], group["weight_decay"]) for group in groups] == [((0.7, 0.95), 0.3), ((0.7, 0.95), 0)]
    speeds, seconds = (scalars(tmp_path, tag)[-1].value for tag in ("tokens_per_second", "seconds"))
    assert speeds * seconds == pytest.approx(2 * 4 * 16)


def test_each_token_of_an_answer_has_the_same_weight(script, tmp_path, capsys):
    """The only step reads all pairs, whose answers differ in length; its gradient is that of the mean over tokens."""
    rows = [{"prompt": "ask", "completion": "b" * (number * 7 % 29 + 1)} for number in range(60)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, val = pairs.create_datasets("chat", str(tmp_path / "chat.jsonl"), None, 32, None, "drop")
    module, args = script("language.train_SFT", "--dataset", "chat", "--data-path", tmp_path / "chat.jsonl",
                          "--length", "32", "--batch-size", len(train), "--warmup-steps", "0", "--lr", "0.5", *TINY)
    torch.manual_seed(args.seed)
    model = gpt.GPT(args.model, 256)
    inputs, targets = train.__getitems__(range(len(train)))
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    wanted = [parameter.grad for parameter in model.parameters() if parameter.ndim > 1]
    for args.accum_steps in (1, 3):
        module.main(args)
        content = load(tmp_path / "last.pt")
        for number, gradient in enumerate(wanted):
            torch.testing.assert_close(content["optimizer"]["state"][number]["exp_avg"] / 0.1, gradient, rtol=1e-3,
                                       atol=1e-6)
        said = capsys.readouterr().out
        assert f" x {args.accum_steps} micro-batch(es) x " in said and f"  loss {loss.item():.4f}  " in said
        model.load_state_dict(content["model"])
        inputs, targets = val.__getitems__(range(len(val)))
        scores = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
        assert content["score"] == pytest.approx(-scores.sum().item() / pairs.count(targets).item(), rel=1e-5)
        assert len(val) > 1 and said.splitlines()[-1].startswith("ask")  # a prompt and what the model answers
    args.accum_steps = len(train) + 1
    with pytest.raises(errors.UsageError, match=f"--accum-steps {len(train) + 1} > {len(train)} windows per process"):
        module.main(args)


def test_preferences_are_relative_to_the_starting_weights(script, tmp_path, monkeypatch, capsys):
    """In the first step, the reference is the model. Also after a resume, margins are relative to the first weights."""
    rows = [{"prompt": "ask", "chosen": "b" * (number * 7 % 29 + 1), "rejected": "c" * (number * 5 % 23 + 1)}
            for number in range(60)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    module, args = script("language.train_DPO", "--dataset", "chat", "--data-path", tmp_path / "chat.jsonl", "--length",
                          "32", "--batch-size", "57", "--warmup-steps", "0", "--lr", "0.02", "--beta", "0.3", *TINY)
    torch.manual_seed(args.seed)
    start = gpt.GPT(args.model, 256)
    train, val = (preferences.create_datasets("chat", args.data_path, None, 32, None, "drop")[part] for part in (0, 1))

    def gains(model, dataset):
        """Return log p(chosen) - log p(rejected) for each pair."""
        tokens, targets = (torch.from_numpy(part.reshape(-1, 32)).long() for part in (dataset.inputs, dataset.targets))
        scores = model(tokens).log_softmax(2).gather(2, targets.clamp(min=0)[..., None])[..., 0]
        sums = scores.where(targets >= 0, 0).sum(1)
        return sums[::2] - sums[1::2]

    before = gains(start, val).detach()
    (gains(start, train).mean() * -0.3 / 2).backward()  # the slope of -log(sigmoid(x)) at 0 is -1 / 2
    wanted = [parameter.grad for parameter in start.parameters() if parameter.ndim > 1]
    for args.accum_steps in (1, 3):
        module.main(args)
        content, said = load(tmp_path / "last.pt"), capsys.readouterr().out
        for number, gradient in enumerate(wanted):
            torch.testing.assert_close(content["optimizer"]["state"][number]["exp_avg"] / 0.1, gradient, rtol=1e-3,
                                       atol=1e-5)
        assert f" x {args.accum_steps} micro-batch(es) x " in said and "  loss 0.6931  " in said
    args.resume, args.epochs = tmp_path / "last.pt", 4
    module.main(args)
    again, said = load(tmp_path / "last.pt"), capsys.readouterr().out
    assert same(content["reference"], again["reference"]) and same(content["val_reference"], again["val_reference"])
    model = gpt.GPT(args.model, 256)
    model.load_state_dict(again["model"])
    margins = 0.3 * (gains(model, val).detach() - before)
    assert len(margins) == 3 and 0.01 < margins.abs().min()
    shown = re.findall(r"val_loss (\S+)  margin (\S+)  accuracy (\S+)", said)[-1]
    expected = [-F.logsigmoid(margins).mean(), margins.mean(), (margins > 0).float().mean()]
    assert list(map(float, shown)) == pytest.approx([each.item() for each in expected], abs=2e-4)
    args.evaluate, args.resume = True, tmp_path / "last.pt"
    module.main(args)
    assert f"val_loss {shown[0]}  margin {shown[1]}  accuracy {shown[2]}\n" in capsys.readouterr().out
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows[::-1])))
    with pytest.raises(errors.UsageError, match="its reference does not fit; check the options of the model, the data"):
        module.main(args)


def test_a_token_of_an_answer_has_the_weight_of_its_group(script, tmp_path, capsys, monkeypatch):
    """The only batch has all prompts; after one and two updates, the gradients are those that autograd finds here."""
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"prompt": "a" * (1 + n % 5)}) for n in range(9)))
    module, args = script("language.train_GRPO", "--dataset", "chat", "--data-path", tmp_path / "chat.jsonl", "--group",
                          "4", "--max-new", "6", "--batch-size", "8", "--warmup-steps", "0", "--lr", "0.01",
                          "--clip-ratio", "0.05", "--temperature", "0.7", "--weight-decay", "0", "--sample", "")
    module.reward = lambda row, text: len(row["prompt"]) * sum(map(str.isascii, text))  # the groups' scales differ
    train, _ = module.sampling.create_datasets("chat", args.data_path, None, 512, None, "drop", None, (6, 4, 0.7, 0))
    train.set_epoch(1)
    torch.manual_seed(args.seed)
    model = gpt.GPT(args.model, 256)
    answers = sampling.draw(model, train, *train.__getitems__(range(8)))[1]
    monkeypatch.setattr(pairs.Bytes, "end_token", int(answers[5, -5]))  # so that an answer ends early
    inputs, answers, _ = sampling.draw(model, train, *train.__getitems__(range(8)))
    counted = answers != pairs.IGNORED
    rewards = sampling.rewards(module.reward, train, torch.arange(8), answers)
    gain = ((rewards - rewards.mean(1, True)) / rewards.std(1, correction=0, keepdim=True)).view(32, 1)
    assert 32 < counted.sum() < 32 * 6

    def found():
        chances = (model(inputs) / 0.7).softmax(2).gather(2, answers.clamp(min=0)[:, :, None])[:, :, 0]
        return chances, torch.autograd.grad((torch.min(chances / old * gain, (chances / old).clamp(0.95, 1.05) * gain)
                                             * counted).sum() / -counted.sum(), [*model.parameters()])

    old = torch.ones(())
    old = found()[0].detach()
    _, first = found()
    average = [0.1 * gradient for gradient in first]
    for args.updates, args.accum_steps in ((1, 1), (1, 3), (2, 1)):
        module.main(args)
        content, said = load(tmp_path / "last.pt"), capsys.readouterr().out
        if args.updates == 2:
            chances, second = found()
            assert ((chances / old - 1).abs() * counted > 0.05).any()
            average = [0.9 * before + 0.1 * gradient for before, gradient in zip(average, second)]
        states = dict(zip([name for name, _ in model.named_parameters()], average))
        names = [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
        for number, name in enumerate(names):
            torch.testing.assert_close(content["optimizer"]["state"][number]["exp_avg"], states[name], rtol=2e-3,
                                       atol=1e-6)
        assert content["warmup"]["done"] == args.updates and " differ by up to " not in said
        assert f"answers in training:  reward {rewards.mean():.4f}  " in said
        assert re.search(r"\nanswers before this run:  reward .+\nanswers after this run:  reward ", said)
        model.load_state_dict(content["model"])


def test_the_group_has_the_timeout_of_the_command(script):
    script("train_DDP", "--timeout", "77")
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=77)


def test_mp_tells_each_process_its_place(script, monkeypatch):
    """The process is the last one on the second of two hosts with three processes each."""
    module, args = script("train_mp", "--nprocs", "3", "--nnodes", "2", "--node-rank", "1", "--ip", "head", "--port",
                          "29400")
    dist.destroy_process_group()
    told = {}
    monkeypatch.setattr(module, "join_group", lambda _: told.update(os.environ))
    monkeypatch.setattr(module, "main", lambda _: None)
    monkeypatch.setattr(module.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(module.cli, "report_errors", contextlib.nullcontext)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "")
    module.worker(2, args)
    wanted = {"RANK": "5", "LOCAL_RANK": "2", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "head",
              "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert {name: told[name] for name in wanted} == wanted


def test_gradients_are_clipped_before_the_step(script, tmp_path):
    module, args = script("train_amp", "--clip-norm", "1e-9", "--weight-decay", "0", "--seed", "5")
    module.main(args)
    torch.manual_seed(5)
    start, end = models.create_model("cnn", 10, (1, 28, 28)).state_dict(), load(tmp_path / "last.pt")["model"]
    assert apart(start, end) < 1e-9


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_pass_alone_has_the_precision_asked_for(script, precision, dtype):
    module, args = script("train_amp", "--precision", precision)
    seen = set()
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda part, inputs, output: seen.add((part.training, output.dtype)) if isinstance(
            part, (torch.nn.Conv2d, torch.nn.Linear)) else None)
    module.main(args)
    hook.remove()
    assert seen == {(True, dtype), (False, torch.float32)}


def test_micro_batches_send_no_more_than_a_whole_batch(script):
    module, args = script("train_grad_accum", "--accum-steps", "1")
    whole = events(module, args, "gloo:all_reduce")
    args.accum_steps = 4
    assert events(module, args, "gloo:all_reduce") == whole > 2


def test_a_process_cannot_have_more_micro_batches_than_samples(script, monkeypatch):
    """Two processes get two samples each of a batch of four: a third micro-batch would be empty, with a nan loss."""
    module, args = script("train_grad_accum", "--accum-steps", "3")
    monkeypatch.setattr(module.reduce, "exact_share", lambda batch_size, world_size: batch_size // 2)
    with pytest.raises(errors.UsageError, match="--accum-steps 3 > 2 samples per process"):
        module.main(args)


def test_data_parallel_trains_through_its_wrapper(script, monkeypatch):
    """The module is called either way, so with one device or none, the weights would be the same."""
    module, args = script("train_DP")
    monkeypatch.setattr(module.devices, "device_ids", lambda device: [0])  # without a device it calls the module
    assert events(module, args, "DataParallel.forward") == 2


@pytest.mark.parametrize("name", ["train_elastic", "train_DCP"])
def test_no_snapshot_is_written_of_weights_that_are_not_finite(script, tmp_path, name):
    """The loss of the previous step is still finite."""
    module, args = script(name, "--lr", "1e38", "--snapshot-every", "1")
    with pytest.raises(errors.RunError, match="epoch 1, step 1: the norm of the weights is (inf|nan)"):
        module.main(args)
    assert not list(tmp_path.glob("last.pt")) and not list(tmp_path.glob("s*-*"))


@pytest.fixture
def snapshot(script, tmp_path, monkeypatch):
    """Return the snapshot of a run that a signal stopped after the first of two steps."""
    stop = threading.Event()
    stop.set()
    module, args = script("train_elastic", "--log-every", "1")
    monkeypatch.setattr(module.signals, "note_signals", lambda *names: stop)
    assert module.main(args) == 85 and load(tmp_path / "last.pt")["step"] == 1
    dist.destroy_process_group()
    stop.clear()
    return tmp_path / "last.pt"


@pytest.mark.parametrize(("name", "arguments", "complaint"), [
    ("train", [], "a snapshot within an epoch; resume it with the script that wrote it, or load its weights with "
                  "--weights"),
    ("train_elastic", ["--seed", "1"], "this epoch began with --batch-size 4 --seed 0; use it, not .*--seed 1")],
    ids=["another script", "another seed"])
def test_a_snapshot_is_for_the_command_that_can_use_it(script, snapshot, name, arguments, complaint):
    module, args = script(name, "--resume", snapshot, *arguments)
    with pytest.raises(errors.UsageError, match=complaint):
        module.main(args)


def test_a_snapshot_of_the_first_epoch_can_be_measured(script, snapshot, capsys):
    module, args = script("train_elastic", "--evaluate", "--resume", "auto")
    module.main(args)
    assert "1 steps of epoch 1 are done" in (said := capsys.readouterr().out) and "accuracy" in said


@pytest.mark.parametrize("name", ["language.train_combined", "language.train_4D"])
def test_the_speed_counts_only_the_steps_of_this_run(script, tmp_path, monkeypatch, name):
    """A signal stops the run after the first of two steps, so the resumed run takes one."""
    stop = threading.Event()
    (tmp_path / "text.txt").write_text("def one(): return 1\n" * 99)
    module, args = script(name, "--dataset", "text", "--data-path", tmp_path / "text.txt", "--length", "16",
                          "--windows", "8", "--log-every", "1", "--resume", "auto")
    monkeypatch.setattr(module.signals, "note_signals", lambda *names: stop)
    with loss_parallel():
        stop.set()
        assert module.main(args) == 85
        stop.clear()
        module.main(args)
    speed, seconds = (scalars(tmp_path, tag)[-1].value for tag in ("tokens_per_second", "seconds"))
    assert speed * seconds == pytest.approx(4 * 16)


def test_all_scripts_mark_what_readers_replace_alike():
    marked = {name: [line.strip() for line in (ROOT / name).read_text().splitlines() if "# yours: " in line]
              for name in SCRIPTS}
    assert all(lines == marked["train.py"] for lines in marked.values())
    assert len(marked["train.py"]) >= 7


@pytest.mark.parametrize("name", SCRIPTS)
def test_early_stopping_saves_and_prints_the_last_epoch_and_lasts(script, tmp_path, monkeypatch, capsys, name):
    """With a scheduler that steps after every batch. The first epoch is the best, and three more are too many."""
    (tmp_path / f"mine_{name}").write_text(put_in((ROOT / name).read_text(), EDITS[2]))
    monkeypatch.syspath_prepend(tmp_path)
    module, args = script(f"mine_{name}".removesuffix(".py"), "--epochs", "9")
    scores = iter([0.5, 0.1, 0.2, 0.3])
    monkeypatch.setattr(module, "evaluate", lambda *_: (1.0, {"accuracy": next(scores)}))
    module.main(args)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said if line.startswith("epoch")] == ["1/9", "2/9", "3/9", "4/9"]
    if name == "train_DCP.py":
        assert [*tmp_path.glob("step-0000008/.metadata")]
    else:
        last = load(tmp_path / "last.pt")
        assert (last["epoch"], last["scheduler"]["best_epoch"], last["scheduler"]["last_epoch"]) == (4, 1, 8)
    args.resume = "auto"
    module.main(args)
    assert "\nepoch" not in capsys.readouterr().out


def test_all_scripts_have_the_defaults_of_the_baseline(monkeypatch):
    defaults = {}
    for name in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [name])
        defaults[name] = vars(importlib.import_module(name.removesuffix(".py")).parse_args())
    for values in defaults.values():
        assert {name: values.get(name) for name in defaults["train.py"]} == defaults["train.py"]


def test_paths_for_rays_workers_are_absolute(tmp_path, monkeypatch):
    """Each worker has its own working directory, so a relative path would lead elsewhere."""
    monkeypatch.syspath_prepend(ROOT / "launch")
    monkeypatch.chdir(tmp_path)
    names = ("data_path", "output_dir", "weights", "resume")
    options = [part for name in names for part in ("--" + name.replace("_", "-"), f"{name}.pt")]
    monkeypatch.setattr(sys, "argv", ["ray_train.py", "--num-workers", "2", "--", *options])
    _, args = importlib.import_module("ray_train").parse_args()
    assert [getattr(args, name) for name in names] == [str(tmp_path / f"{name}.pt") for name in names]
    monkeypatch.setattr(sys, "argv", ["ray_train.py", "--max-failures", "1", "--", "--resume", "auto"])
    assert importlib.import_module("ray_train").parse_args()[1].resume == "auto"
    monkeypatch.setattr(sys, "argv", ["ray_train.py", "--max-failures", "1", "--"])
    with pytest.raises(errors.UsageError, match="--max-failures: every restart would lose .*--resume auto"):
        importlib.import_module("ray_train").parse_args()
