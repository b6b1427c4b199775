"""Every variant, when launched, trains the baseline's model, evaluates it exactly, and resumes bit for bit."""
import os
import re
import shutil
import signal

import pytest
import torch
from conftest import FLOAT64, OPTIONS, PYTHON, RUNS, SAME, STRICT, distance, epochs, good, load, run, same
from live import Live, ours

import verify
from common import dcp_folders

# At night. A test below stops and resumes the first, and a drill resumes on three processes
NIGHTLY = ["train_DCP.py", "train_DDP.py on 3"]
# A new script is here without being named. Not exact by its idea: train_amp.py, see test_precision.py
EXACT = [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY), id=name)
         for name in RUNS if name not in ("train.py", "train_amp.py")]


@pytest.mark.parametrize("name", EXACT)
def test_trains_the_same_model_as_the_baseline(runs, name):
    reference, variant = runs("train.py")[0], runs(name)[0]
    assert distance(reference / "epoch-001.pt", reference / "last.pt") > 1e-2  # it did train
    assert distance(reference / "last.pt", variant / "last.pt") < 1e-11
    report = verify.compare(runs.steps("train.py"), runs.steps(name))
    assert (report["verdict"], report["steps"]) == ("same", [10, 10]) and report["difference"] < 1e-11, report


@pytest.mark.parametrize("name", EXACT)
def test_shows_the_numbers_of_the_baseline(runs, name):
    """The loss is the mean over all processes, micro-batches and stages; the learning rate is the one that was used."""
    reference, shown = (epochs(runs(script)[1].out) for script in ("train.py", name))
    assert [line["lr"] for line in shown] == [line["lr"] for line in reference] and reference[0]["lr"] == 0.0375
    for left, right in zip(reference, shown, strict=True):
        assert left == pytest.approx(right, abs=1.1e-4)  # four digits are printed


def test_what_starts_otherwise_is_ddp_bit_for_bit(runs):
    assert same(load(runs("train_DDP.py")[0] / "last.pt"), load(runs("train_mp.py")[0] / "last.pt"))


def test_evaluation_counts_every_sample_once_on_any_number_of_processes(runs):
    """The reference is the baseline, which has no sampler: two padded samplers would agree with each other.

    Two processes do not divide the 121 samples.
    """
    for file in ("epoch-001.pt", "last.pt"):
        accuracies = [load(runs(name)[0] / file)["score"] for name in ("train.py", "train_DDP.py", "train_combined.py")]
        assert set(accuracies) == {round(accuracies[0] * 121) / 121}


def test_a_resumed_run_ends_as_the_whole_run_bit_for_bit(runs, scripts, tmp_path):
    """The number of workers changes. For train_DDP.py, see test_resume.py; for others, drills/test_variants.py."""
    folder, whole = runs("train.py")
    shutil.copy(folder / "epoch-001.pt", tmp_path / "last.pt")
    result = good(run(*RUNS["train.py"], "--workers", "2", "--resume", "auto", "--output-dir", tmp_path,
                      cwd=scripts, env=FLOAT64))
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))
    assert epochs(result.out) == epochs(whole.out)[1:]
    assert not (tmp_path / "epoch-001.pt").exists()  # the first epoch was not repeated


@pytest.fixture(scope="module")
def stopped(once, scripts):
    """Return a function that trains a script in two commands, once: to its (folder, result), the first's output in it.

    One of two processes gets two signals in the first epoch. Both commands save snapshots. The second command of
    train_DCP.py has one process, and ignores a newer, incomplete folder. The result begins with the first's headline.
    """
    def train(script, folder):
        command = [*RUNS[script], "--output-dir", folder]
        with Live(*command, "--log-every", "1", cwd=scripts, env=STRICT | FLOAT64) as live:
            headline = live.wait_for("process.*x 48")
            os.kill(rank1 := live.ranks()[1], signal.SIGUSR1)
            os.kill(rank1, signal.SIGUSR1)
            said = live.wait_for("stopped by a signal and saved")
            assert live.end(60) != 0 and ours(live.err) == []
            assert re.search(r"exitcode *: 85", "\n".join(live.err))
        (folder / "said").write_text(said)
        if script == "train_DCP.py":
            (folder / "step-0000099").mkdir()
            (folder / "step-0000099/__0_0.distcp").write_bytes(b"torn")
            command = [PYTHON, script, *SAME, *OPTIONS[script], "--output-dir", folder]
        second = run(*command, "--resume", "auto", "--workers", "1", cwd=scripts, env=STRICT | FLOAT64)
        return second._replace(out=f"{headline}\n{second.out}")

    return lambda script: once(f"stopped {script}", lambda folder: train(script, folder))


@pytest.mark.parametrize(("script", "parent"), [
    pytest.param("train_elastic.py", "train_DDP.py", marks=pytest.mark.nightly), ("train_DCP.py", "train_FSDP.py")])
def test_a_stopped_run_resumes_within_its_epoch(runs, stopped, script, parent):
    """The second command loses and repeats no sample: the weights are those of the parent, which ran in one command.

    Bit for bit on the same number of processes; train_DCP.py resumes on another one.
    """
    (folder, result), (whole, expected) = stopped(script), runs(parent)
    step = re.search(r"^epoch 1, step (\d+): stopped", (folder / "said").read_text())[1]
    assert 0 < int(step) < 6 and f"{step} steps of epoch 1 are done" in result.out
    if script == "train_DCP.py":
        assert f"/snapshot-{int(step):07}: {step} steps of epoch 1 are done" in result.out
        dcp_folders.main(dcp_folders.whole_folders(folder)[-1], folder / "last.pt")
        assert distance(folder / "last.pt", whole / "last.pt") < 1e-11
    else:
        assert same(load(folder / "last.pt"), load(whole / "last.pt"))
    for left, right in zip(epochs(expected.out), epochs(result.out), strict=True):
        assert left == pytest.approx(right, abs=1.1e-4)  # the loss too is that of the whole epoch


def test_one_line_says_what_the_run_is_and_one_each_epoch(runs):
    names = "train.py", "train_DDP.py", "train_combined.py"
    out = {name: runs(name)[1].out.splitlines() for name in names}
    assert out["train.py"][0] == ("cpu: batch 96 = 1 process x 1 micro-batch x 96, lr 0.0375, "
                                  "84,778 of 84,778 parameters")
    assert "batch 96 = 2 process(es) x 1 micro-batch x 48" in out["train_DDP.py"][0]
    assert "batch 96 = 2 process(es) x 5 micro-batches x 9.6" in out["train_combined.py"][0]
    for lines in out.values():
        assert len(lines) == 3
        assert all(line.startswith(f"epoch {number:3}/2  loss ") for number, line in enumerate(lines[1:], 1))
        assert all(re.search(r"lr [\d.]+  [\d.]+ s  [\d,]+ images/s$", line) for line in lines[1:])


def test_one_process_shows_one_bar(runs):
    err = runs("train_mp.py")[1].err
    assert len(re.findall(r"epoch 2: +0%", err)) == 1
    assert re.search(r"epoch 2: .*loss=\d\.\d{4}", err)


def test_unused_parameters_are_looked_for_when_asked_for(runs):
    complaint = "did not find any unused parameters"
    assert complaint in runs("train_mp.py")[1].err
    assert complaint not in runs("train_DDP.py")[1].err


def test_one_process_writes_each_file(runs):
    for name in ("train.py", "train_DDP.py", "train_mp.py"):
        names = sorted(path.name for path in runs(name)[0].iterdir() if path.name != ".lock")
        events = [name for name in names if name.startswith("events.out.tfevents")]
        assert len(events) == 1
        assert set(names) - set(events) == {"best.pt", "last.pt", "epoch-001.pt", "epoch-002.pt"}


def test_tensorboard_reads_every_scalar_and_the_arguments(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, result = runs("train_DDP.py")
    log = EventAccumulator(str(folder))
    log.Reload()
    assert set(log.Tags()["scalars"]) == {"loss", "val_loss", "accuracy", "top5", "learning_rate", "seconds",
                                          "images_per_second"}
    printed = epochs(result.out)
    for tag, name in [("loss", "loss"), ("val_loss", "val_loss"), ("accuracy", "accuracy"), ("top5", "top5"),
                      ("learning_rate", "lr")]:
        events = log.Scalars(tag)
        assert [event.step for event in events] == [1, 2]
        assert [event.value for event in events] == pytest.approx([line[name] for line in printed], abs=1e-4)
    text = log.Tensors("arguments/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "batch_size = 96" in text and "seed = 3" in text


def test_a_checkpoint_holds_plain_values_under_plain_names(runs):
    for name in ("train.py", "train_DDP.py"):
        content = load(runs(name)[0] / "last.pt")
        assert content.keys() == {"model", "optimizer", "scheduler", "epoch", "score", "best_score"}
        assert not any(key.startswith("module.") for key in content["model"])
        printed = [line["accuracy"] for line in epochs(runs(name)[1].out)]
        assert content["epoch"] == 2 and content["score"] == pytest.approx(printed[-1], abs=1e-4)
        best = load(runs(name)[0] / "best.pt")
        assert best["score"] == content["best_score"] == pytest.approx(max(printed), abs=1e-4)
        assert best["epoch"] == printed.index(max(printed)) + 1


def shapes(content):
    """Return the content of a checkpoint, with each tensor replaced by its shape and type."""
    if isinstance(content, dict):
        return {key: shapes(value) for key, value in content.items() if key not in ("score", "best_score")}
    return (content.shape, content.dtype) if isinstance(content, torch.Tensor) else content


@pytest.mark.parametrize("script", ["train_FSDP.py", "train_TP.py", "train_PP.py"])
def test_the_file_has_the_baselines_form_and_momentum(runs, script):
    """So every script loads it."""
    reference, variant = (load(runs(name)[0] / "last.pt") for name in ("train.py", script))
    assert shapes(reference) == shapes(variant)
    for number, values in reference["optimizer"]["state"].items():
        other = variant["optimizer"]["state"][number]
        assert (values["momentum_buffer"] - other["momentum_buffer"]).abs().max() < 1e-11
