"""Every variant, as launched, trains the baseline's model, measures it exactly, and goes on where it stopped."""
import json
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import LAUNCH, PYTHON, TORCHRUN, copy_out, distance, epochs, good, load, run, same
from live import Live, ours

# A rate at which training is stable. Sums in another order differ by 1e-7, which now and then puts a ReLU on its other
# side: a jump of up to 0.05 times the rate in some weight. At a high rate such jumps feed one another and grow.
SAME = ["--epochs", "4", "--batch-size", "96", "--lr", "0.0003", "--seed", "3", "--save-every", "1"]

RUNS = {
    "train": ([PYTHON, "train.py", "--workers", "0"]),
    "DP": ([PYTHON, "train_DP.py", "--workers", "1"]),
    "DDP2": ([*LAUNCH, "--nproc_per_node=2", "train_DDP.py"]),
    "DDP3": ([*TORCHRUN, "--nproc-per-node=3", "train_DDP.py", "--find-unused-parameters"]),
    "mp2": ([PYTHON, "train_mp.py", "--workers", "0"]),
    "accum 1x2": ([PYTHON, "train_grad_accum.py", "--accum-steps", "2"]),
    "accum 2x4": ([*TORCHRUN, "--nproc-per-node=2", "train_grad_accum.py", "--accum-steps", "4"]),
    "accum 2x5": ([*TORCHRUN, "--nproc-per-node=2", "train_grad_accum.py", "--accum-steps", "5"]),
    "elastic": ([*TORCHRUN, "--nproc-per-node=2", "train_elastic.py", "--snapshot-every", "5"]),
    # at a rate at which they learn more than the others
    "float32": ([*TORCHRUN, "--nproc-per-node=2", "train_DDP.py", "--lr", "0.02"]),
    "bf16": ([*TORCHRUN, "--nproc-per-node=2", "train_amp.py", "--lr", "0.02", "--clip-norm", "100"]),
}
EXACT = [name for name in RUNS if name not in ("train", "float32", "bf16")]
RESUMED = ["train", "DDP2", "accum 2x5",
           *(pytest.param(name, marks=pytest.mark.drill) for name in ("mp2", "DP"))]  # train_amp.py: see fp16


def command(name):
    """Return the command of RUNS with the arguments that all share; its own come last, so that they count."""
    at = next(index for index, part in enumerate(RUNS[name]) if part.startswith("train")) + 1
    return [*RUNS[name][:at], *SAME, *RUNS[name][at:]]


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Run each command of RUNS once, when a test first asks for it; return a function from name to (folder, result)."""
    folder = tmp_path_factory.mktemp("runs")
    done = {}

    def get(name):
        if name not in done:
            output = folder / name.replace(" ", "-")
            done[name] = output, good(run(*command(name), "--output-dir", output, terminal=name == "mp2"))
        return done[name]

    return get


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.drill) if name in ("accum 1x2", "accum 2x4") else name for name in EXACT])
def test_trains_the_same_model_as_the_baseline(runs, name):
    reference, variant = runs("train")[0], runs(name)[0]
    assert distance(reference / "epoch-001.pt", reference / "epoch-003.pt") > 2e-3  # it did train
    assert distance(reference / "epoch-003.pt", variant / "epoch-003.pt") < 1e-5


@pytest.mark.parametrize("name", ["mp2", "elastic"])
def test_what_starts_or_saves_otherwise_is_ddp_bit_for_bit(runs, name):
    assert same(load(runs("DDP2")[0] / "last.pt"), load(runs(name)[0] / "last.pt"))


@pytest.fixture(scope="session")
def stopped(runs, tmp_path_factory):
    """Return a folder with the snapshot of a run that one signal to one of its two processes has stopped."""
    folder = tmp_path_factory.mktemp("stopped")
    with Live(*command("elastic"), "--log-every", "1", "--output-dir", folder) as live:
        live.wait_for("^epoch +1/")
        rank1 = next(pid for pid in live.family() if "\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_text())
        os.kill(rank1, signal.SIGUSR1)
        os.kill(rank1, signal.SIGUSR1)
        said = live.wait_for("stopped by a signal and saved")
        assert live.end(30) != 0 and ours(live.err) == []
        assert re.search(r"exitcode *: 85", "\n".join(live.err))
    content = load(folder / "last.pt")
    assert said.startswith(f"epoch {content['epoch'] + 1}, step {content['step']}: ") and 0 < content["step"] < 15
    return folder


@pytest.mark.parametrize("processes", [2, *(pytest.param(number, marks=pytest.mark.drill) for number in (1, 3))])
def test_a_stopped_run_goes_on_within_its_epoch(runs, stopped, tmp_path, processes):
    """Bit for bit on as many processes, and to rounding on another number: no sample is left out or read twice."""
    content = load(stopped / "last.pt")
    shutil.copy(stopped / "last.pt", tmp_path)
    again = [f"--nproc-per-node={processes}" if "--nproc" in part else part for part in command("elastic")]
    result = good(run(*again, "--workers", "1", "--resume", "auto", "--output-dir", tmp_path))
    assert f"{content['step']} steps of epoch {content['epoch'] + 1} are done" in result.out
    if processes == 2:
        assert same(load(tmp_path / "last.pt"), load(runs("elastic")[0] / "last.pt"))
        whole, rest = epochs(runs("elastic")[1].out), epochs(result.out)
        for left, right in zip(whole[-len(rest):], rest, strict=True):
            assert left == pytest.approx(right, abs=2e-4)  # the loss too is that of the whole epoch
    else:
        assert distance(tmp_path / "last.pt", runs("elastic")[0] / "last.pt") < 1e-5


def test_a_snapshot_is_for_the_script_that_can_use_it(stopped, tmp_path):
    result = run(PYTHON, "train.py", "--resume", stopped / "last.pt", "--output-dir", tmp_path)
    assert result.code == 2 and result.err == (
        f"train.py: error: --resume {stopped / 'last.pt'}: a snapshot within an epoch; train_elastic.py goes on from"
        " it, and --weights takes its weights\n")
    result = run(PYTHON, "train_elastic.py", *SAME, "--batch-size", "64", "--resume", stopped / "last.pt",
                 "--output-dir", tmp_path)
    assert result.code == 2 and result.err == (
        "train_elastic.py: error: --resume: --batch-size 96 --seed 3 began this epoch and ends it, not"
        " --batch-size 64 --seed 3\n")


def test_a_snapshot_of_the_first_epoch_can_be_measured(stopped, tmp_path):
    import torch

    torch.save(load(stopped / "last.pt") | {"epoch": 0}, tmp_path / "last.pt")
    result = good(run(PYTHON, "train_elastic.py", *SAME, "--evaluate", "--resume", "auto", "--output-dir", tmp_path))
    assert re.search(r"steps of epoch 1 are done, .*\nval_loss [\d.]+  accuracy 0\.\d+", result.out)


@pytest.mark.drill
def test_bf16_reaches_the_accuracy_of_float32(runs):
    reached = {name: epochs(runs(name)[1].out)[-1]["accuracy"] for name in ("bf16", "float32")}
    assert reached["float32"] > 0.9 and abs(reached["bf16"] - reached["float32"]) < 0.015
    assert distance(runs("bf16")[0] / "epoch-001.pt", runs("float32")[0] / "epoch-001.pt") > 1e-5  # not the same run
    assert load(runs("bf16")[0] / "last.pt").keys() - load(runs("DDP2")[0] / "last.pt").keys() == {"scaler"}


def test_the_default_run_learns_the_digits(tmp_path):
    folder = copy_out("train_DDP.py", tmp_path / "x").parent
    result = good(run(*LAUNCH, "--nproc_per_node=2", "train_DDP.py", cwd=folder))
    assert epochs(result.out)[-1]["accuracy"] >= 0.97
    assert sum(float(seconds) for seconds in re.findall(r"([\d.]+) s ", result.out)) < 60
    assert {path.name.split(".")[0] for path in (tmp_path / "x/runs").glob("[!.]*")} == {"events", "best", "last"}


def test_one_line_says_what_the_run_is_and_one_each_epoch(runs):
    out = {name: runs(name)[1].out.splitlines() for name in ("train", "DDP2", "accum 2x5")}
    assert out["train"][0] == ("cpu: batch 96 = 1 process x 1 micro-batch x 96, lr 0.000225, "
                               "84,778 of 84,778 parameters")
    assert "batch 96 = 2 process(es) x 1 micro-batch x 48" in out["DDP2"][0]
    assert "batch 96 = 2 process(es) x 5 micro-batches x 9.6" in out["accum 2x5"][0]
    for lines in out.values():
        assert len(lines) == 5 and all(line.startswith(f"epoch   {n}/4  loss ") for n, line in enumerate(lines[1:], 1))
        assert all(re.search(r"lr [\d.]+  [\d.]+ s  [\d,]+ images/s$", line) for line in lines[1:])
    # the mean loss over all processes and micro-batches, at the rate that the epoch used
    for name in ("DDP2", "accum 2x5"):
        for left, right in zip(epochs("\n".join(out["train"])), epochs("\n".join(out[name])), strict=True):
            assert left == pytest.approx(right, abs=2e-4)
    assert epochs("\n".join(out["train"]))[0]["lr"] == 0.00022


def test_one_process_shows_one_bar(runs):
    err = runs("mp2")[1].err
    assert len(re.findall(r"epoch 2: +0%", err)) == 1
    assert re.search(r"epoch 4: .*loss=\d\.\d{4}", err)


def test_unused_parameters_are_looked_for_when_asked_for(runs):
    """DDP says of a model without any that looking was in vain: so it does look in the one run, not in the other."""
    complaint = "did not find any unused parameters"
    assert complaint in runs("DDP3")[1].err
    assert complaint not in runs("DDP2")[1].err


def test_one_process_writes_each_file(runs):
    for name in ("train", "DDP2", "mp2"):
        names = sorted(path.name for path in runs(name)[0].iterdir() if path.name != ".lock")
        events = [name for name in names if name.startswith("events.out.tfevents")]
        assert len(events) == 1
        assert set(names) - set(events) == {"best.pt", "last.pt", *(f"epoch-00{n}.pt" for n in range(1, 5))}


def test_tensorboard_reads_every_scalar_and_the_arguments(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, result = runs("DDP2")
    log = EventAccumulator(str(folder))
    log.Reload()
    assert set(log.Tags()["scalars"]) == {"loss", "val_loss", "accuracy", "accuracy_top5", "learning_rate", "seconds",
                                          "images_per_second"}
    printed = epochs(result.out)
    for tag, name in [("loss", "loss"), ("val_loss", "val_loss"), ("accuracy", "accuracy"), ("accuracy_top5", "top5"),
                      ("learning_rate", "lr")]:
        events = log.Scalars(tag)
        assert [event.step for event in events] == [1, 2, 3, 4]
        assert [event.value for event in events] == pytest.approx([line[name] for line in printed], abs=1e-4)
    text = log.Tensors("arguments/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "batch_size = 96" in text and "seed = 3" in text


def test_a_checkpoint_holds_plain_values_under_plain_names(runs):
    for name in ("train", "DDP2"):
        content = load(runs(name)[0] / "last.pt")
        assert content.keys() == {"model", "optimizer", "scheduler", "epoch", "accuracy", "best_accuracy"}
        assert not any(key.startswith("module.") for key in content["model"])
        printed = [line["accuracy"] for line in epochs(runs(name)[1].out)]
        assert content["epoch"] == 4 and content["accuracy"] == pytest.approx(printed[-1], abs=1e-4)
        best = load(runs(name)[0] / "best.pt")
        assert best["accuracy"] == content["best_accuracy"] == pytest.approx(max(printed), abs=1e-4)
        assert best["epoch"] == printed.index(max(printed)) + 1


def test_biases_are_not_decayed(runs):
    groups = load(runs("train")[0] / "last.pt")["optimizer"]["param_groups"]
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(1e-4, 6), (0.0, 6)]


@pytest.mark.parametrize("name", RESUMED)
def test_two_and_two_epochs_are_four(runs, tmp_path, name):
    folder, whole = runs(name)
    shutil.copy(folder / "epoch-002.pt", tmp_path / "last.pt")
    again = [*LAUNCH, "--use_env", *command(name)[len(LAUNCH):]] if name == "DDP2" else command(name)
    workers = "1" if name == "mp2" else "2"  # under mp.spawn workers start by spawn too, which takes seconds for each
    result = good(run(*again, "--workers", workers, "--resume", "auto", "--output-dir", tmp_path))
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))
    assert epochs(result.out) == epochs(whole.out)[2:]
    assert not (tmp_path / "epoch-002.pt").exists()  # the second epoch was not repeated


RING = {"train.py": "DDP2", "train_DP.py": "bf16", "train_DDP.py": "train", "train_mp.py": "accum 2x5",
        "train_amp.py": "DP", "train_grad_accum.py": "mp2", "train_elastic.py": "DDP2"}
RING_DRILLS = {"train_DP.py"}  # bf16 is slow on most CPUs


@pytest.fixture(scope="module")
def measured(runs, tmp_path_factory, request):
    """Evaluate checkpoints of RING by their scripts, copied out: all that are asked for, as many at a time as cores."""
    folder = tmp_path_factory.mktemp("copies")
    scripts = [item.callspec.params["script"] for item in request.session.items
               if getattr(item, "originalname", "") == "test_a_script_copied_out_measures_any_checkpoint_exactly"]
    commands = {script: [PYTHON, script, "--evaluate", "--workers", "0", "--resume", runs(RING[script])[0] / "last.pt"]
                for script in scripts}

    def measure(script):
        return run(*commands[script], cwd=copy_out(script, folder / script.removesuffix(".py")).parent)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(scripts, pool.map(measure, scripts), strict=True))


@pytest.mark.parametrize(("script", "name"), [
    pytest.param(*pair, marks=pytest.mark.drill if pair[0] in RING_DRILLS else []) for pair in RING.items()])
def test_a_script_copied_out_measures_any_checkpoint_exactly(runs, measured, script, name):
    """One process (two under mp) finds the very accuracy that another number of processes reported."""
    result, measured = runs(name)[1], good(measured[script]).out
    reported = epochs(result.out)[-1]
    assert re.search(r"accuracy ([\d.]+)  top5 ([\d.]+)$", measured.strip()).groups() == (
        f"{reported['accuracy']:.4f}", f"{reported['top5']:.4f}")


def test_evaluation_counts_every_sample_once_on_any_number_of_processes(runs, tmp_path):
    from common.datasets import create_datasets

    assert len(create_datasets("digits", "", 0, "")[1]) == 359  # neither 2 nor 3 divides it
    folder, result = runs("train")  # two padded samplers would agree with each other: the baseline has none
    said = good(run(*RUNS["DDP3"], "--evaluate", "--batch-size", "96", "--weights", folder / "last.pt", "--output-dir",
                    tmp_path)).out.splitlines()[-1]
    reported = epochs(result.out)[-1]
    assert said.split("accuracy ")[1] == f"{reported['accuracy']:.4f}  top5 {reported['top5']:.4f}"


# a program around a script, which says at the very end what threads of the process are left
LAST_THREADS = """
import atexit, pathlib, runpy, sys
tasks = pathlib.Path("/proc/self/task")
atexit.register(lambda: print("threads:", sorted((task / "comm").read_text().strip() for task in tasks.iterdir())))
sys.path[0], sys.argv = ".", sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_no_thread_of_the_backend_is_left_when_python_ends(runs, tmp_path):
    """One that still holds a tensor then aborts the process, once in some launches, when all its work is done."""
    said = good(run(PYTHON, "-c", LAST_THREADS, *RUNS["DDP2"][-1:], "--evaluate", "--weights",
                    runs("train")[0] / "last.pt", "--backend", "gloo", "--output-dir", tmp_path)).out
    threads = re.search(r"accuracy [\d.]+  .*\nthreads: (.+)", said)
    assert threads and "python" in threads[1] and "gloo" not in threads[1], said


@pytest.mark.drill
def test_a_resumed_run_may_have_another_number_of_processes(runs, tmp_path):
    shutil.copy(runs("train")[0] / "epoch-002.pt", tmp_path / "last.pt")
    good(run(*command("DDP2"), "--resume", "auto", "--output-dir", tmp_path))
    assert distance(tmp_path / "last.pt", runs("train")[0] / "last.pt") < 1e-5


def test_a_loss_that_is_not_finite_ends_all_processes_and_keeps_the_checkpoint(runs, tmp_path):
    shutil.copy(runs("train")[0] / "last.pt", tmp_path / "last.pt")
    before = (tmp_path / "last.pt").read_bytes()
    result = run(*RUNS["DDP2"], "--lr", "1e5", "--log-every", "4", "--output-dir", tmp_path)
    said = [line for line in result.err.splitlines() if line.startswith("train_DDP.py: error:")]
    assert result.code == 1
    assert said == ["train_DDP.py: error: epoch 1, step 4: the loss is nan; try a lower --lr"]
    assert (tmp_path / "last.pt").read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("[!.]*") if "events" not in path.name) == ["last.pt"]


def test_a_save_that_breaks_off_spares_what_was_saved(runs, tmp_path):
    """No file may grow beyond 100 KiB (some shells count in KiB: 200), a third of a checkpoint at most."""
    names = "best.pt", "last.pt"
    for name in names:
        shutil.copy(runs("train")[0] / name, tmp_path)
    assert all((tmp_path / name).stat().st_size > 600 * 1024 for name in names)
    before = [(tmp_path / name).read_bytes() for name in names]
    limited = ["sh", "-c", 'ulimit -f 200 && exec "$@"', "sh", *command("train")]
    result = run(*limited, "--epochs", "5", "--save-every", "0", "--resume", "auto", "--output-dir", tmp_path)
    left = {path.name: path.read_bytes() for path in tmp_path.glob("*.pt*")}
    assert [left.get(name) for name in names] == before, f"of {names} there is left: {left.keys()}"
    assert result.code == 1 and len(result.err.splitlines()) == 1, result.err
    assert "cannot save" in result.err and "what was saved before is whole" in result.err
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.drill
def test_fp16_scales_and_its_scaler_resumes(tmp_path):
    """Few steps, since a CPU has no fast float16: bit-equal with its scaler's state, and near bfloat16."""
    steps = ["--batch-size", "478", "--epochs", "2", "--save-every", "1", "--lr", "0.002", "--clip-norm", "1",
             "--freeze-layers"]
    folder, again = tmp_path / "whole", tmp_path / "again"
    whole = good(run(PYTHON, "train_amp.py", "--precision", "fp16", *steps, "--output-dir", folder))
    good(run(PYTHON, "train_amp.py", "--precision", "fp16", *steps, "--output-dir", again,
             "--resume", folder / "epoch-001.pt"))
    first, last = load(folder / "epoch-001.pt"), load(folder / "last.pt")
    assert same(last, load(again / "last.pt"))
    assert last["scaler"]["scale"] == 65536 and last["scaler"]["_growth_tracker"] == 6
    assert first["scaler"]["_growth_tracker"] == 3
    bf16 = good(run(PYTHON, "train_amp.py", "--precision", "bf16", *steps, "--output-dir", tmp_path / "bf16"))
    for left, right in zip(epochs(whole.out), epochs(bf16.out), strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=0.02)  # where nothing needs to be unscaled


def test_weights_that_fit_are_taken_and_the_others_listed(runs, photos, tmp_path):
    """From digits (1 channel, 10 classes) to photos (3 channels, 3 classes): the layers between are taken."""
    result = good(run(PYTHON, "train_DDP.py", "--weights", runs("train")[0] / "best.pt", "--dataset", "folder",
                      "--data-path", photos, "--batch-size", "48", "--epochs", "1", "--freeze-layers",
                      "--output-dir", tmp_path))
    said = result.out.splitlines()[0]
    weights, start = load(tmp_path / "last.pt")["model"], load(runs("train")[0] / "best.pt")["model"]
    taken = [name for name in weights if weights[name].shape == start[name].shape]
    assert f"took {len(taken)} of {len(weights)} tensors; of another shape: " in said
    assert all((weights[name] == start[name]).all() for name in taken) and "features.3.weight" in taken
    assert "195 of " in result.out.splitlines()[1]  # 64 x 3 + 3: the classifier alone is trained
    assert json.loads((tmp_path / "class_indices.json").read_text()) == {"0": "ash", "1": "beech", "2": "cedar"}
