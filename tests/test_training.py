"""Every variant, as launched, trains the baseline's model, measures it exactly, and goes on where it stopped."""
import json
import os
import re
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import FLOAT64, LAUNCH, PYTHON, TORCHRUN, copy_out, distance, epochs, good, load, run, same
from live import Live, ours

# All else is as a script has it. Processes and micro-batches share a batch of 96 evenly or not: 48, 32, 9.6 samples.
SAME = ["--batch-size", "96", "--seed", "3", "--save-every", "2"]

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
    "float32": ([*LAUNCH, "--nproc_per_node=2", "train_DDP.py"]),
    "DDP3 deterministic": ([*TORCHRUN, "--nproc-per-node=3", "train_DDP.py", "--deterministic"]),
    "bf16": ([*TORCHRUN, "--nproc-per-node=2", "train_amp.py", "--clip-norm", "100"]),
}
FLOAT32 = ["float32", "bf16", "DDP3 deterministic"]  # as users run them; all others are in float64
EXACT = [name for name in RUNS if name not in ("train", *FLOAT32)]
RESUMED = ["train", "float32",  # train_amp.py: see fp16
           *(pytest.param(name, marks=pytest.mark.drill) for name in ("accum 2x5", "mp2", "DP", "DDP3 deterministic"))]


def command(name):
    """Return the command of RUNS with the arguments that all share; its own come last, so that they count."""
    at = next(index for index, part in enumerate(RUNS[name]) if part.startswith("train")) + 1
    return [*RUNS[name][:at], *SAME, *RUNS[name][at:]]


def environment(name):
    """Return what makes a command of RUNS compute in its precision."""
    return {} if name in FLOAT32 else FLOAT64


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Run each command of RUNS once, when a test first asks for it; return a function from name to (folder, result)."""
    folder = tmp_path_factory.mktemp("runs")
    done = {}

    def get(name):
        if name not in done:
            output = folder / name.replace(" ", "-")
            done[name] = output, good(run(*command(name), "--output-dir", output, env=environment(name),
                                          terminal=name == "mp2"))
        return done[name]

    return get


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.drill) if name in ("DP", "accum 1x2", "accum 2x4") else name
    for name in EXACT])
def test_trains_the_same_model_as_the_baseline(runs, name):
    reference, variant = runs("train")[0], runs(name)[0]
    assert distance(reference / "epoch-002.pt", reference / "last.pt") > 1e-2  # it did train
    assert distance(reference / "last.pt", variant / "last.pt") < 1e-11


@pytest.mark.parametrize("name", ["mp2", "elastic"])
def test_what_starts_or_saves_otherwise_is_ddp_bit_for_bit(runs, name):
    assert same(load(runs("DDP2")[0] / "last.pt"), load(runs(name)[0] / "last.pt"))


def test_two_halves_of_a_launch_on_two_hosts_are_one_run(runs, tmp_path):
    """As README has it, one command for each host; here both are this one, and go through the last two epochs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    halves = [[PYTHON, "train_mp.py", *SAME, "--nprocs", "1", "--nnodes", "2", "--node-rank", rank, "--ip", "127.0.0.1",
               "--port", port, "--resume", runs("DDP2")[0] / "epoch-008.pt", "--output-dir", tmp_path] for rank in "01"]
    with ThreadPoolExecutor(2) as pool:
        said = [good(result).out for result in pool.map(lambda half: run(*half, env=FLOAT64), halves)]
    assert "batch 96 = 2 process(es) x 1 micro-batch x 48" in said[0]
    assert [len(epochs(out)) for out in said] == [2, 0]  # of all processes, rank 0 prints
    assert distance(tmp_path / "last.pt", runs("DDP2")[0] / "last.pt") < 1e-11


@pytest.fixture(scope="session")
def stopped(runs, tmp_path_factory):
    """Return a folder with the snapshot of a run that one signal to one of its two processes has stopped."""
    folder = tmp_path_factory.mktemp("stopped")
    begun = ["--resume", runs("elastic")[0] / "epoch-006.pt"]
    with Live(*command("elastic"), *begun, "--log-every", "1", "--output-dir", folder, env=FLOAT64) as live:
        live.wait_for("^epoch +7/")
        rank1 = next(pid for pid in live.family() if "\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_text())
        os.kill(rank1, signal.SIGUSR1)
        os.kill(rank1, signal.SIGUSR1)
        said = live.wait_for("stopped by a signal and saved")
        assert live.end(60) != 0 and ours(live.err) == []
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
    result = good(run(*again, "--workers", "1", "--resume", "auto", "--output-dir", tmp_path, env=FLOAT64))
    assert f"{content['step']} steps of epoch {content['epoch'] + 1} are done" in result.out
    if processes == 2:
        assert same(load(tmp_path / "last.pt"), load(runs("elastic")[0] / "last.pt"))
        whole, rest = epochs(runs("elastic")[1].out), epochs(result.out)
        for left, right in zip(whole[-len(rest):], rest, strict=True):
            assert left == pytest.approx(right, abs=1.1e-4)  # the loss too is that of the whole epoch
    else:
        assert distance(tmp_path / "last.pt", runs("elastic")[0] / "last.pt") < 1e-11


def test_a_snapshot_is_for_the_script_that_can_use_it(stopped, tmp_path):
    result = run(PYTHON, "train.py", "--resume", stopped / "last.pt", "--output-dir", tmp_path)
    assert result.code == 2 and result.err == (
        f"train.py: error: --resume {stopped / 'last.pt'}: a snapshot within an epoch; resume it with train_elastic.py,"
        " or load its weights with --weights\n")
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
    assert load(runs("bf16")[0] / "last.pt").keys() - load(runs("DDP2")[0] / "last.pt").keys() == {"scaler"}


def test_the_default_run_learns_the_digits(tmp_path):
    folder = copy_out("train_DDP.py", tmp_path / "x").parent
    result = good(run(*LAUNCH, "--nproc_per_node=2", "train_DDP.py", cwd=folder))
    assert epochs(result.out)[-1]["accuracy"] >= 0.97
    assert sum(float(seconds) for seconds in re.findall(r"([\d.]+) s ", result.out)) < 60
    assert {path.name.split(".")[0] for path in (tmp_path / "x/runs").glob("[!.]*")} == {"events", "best", "last"}


def test_one_line_says_what_the_run_is_and_one_each_epoch(runs):
    out = {name: runs(name)[1].out.splitlines() for name in ("train", "DDP2", "accum 2x5")}
    assert out["train"][0] == ("cpu: batch 96 = 1 process x 1 micro-batch x 96, lr 0.0375, "
                               "84,778 of 84,778 parameters")
    assert "batch 96 = 2 process(es) x 1 micro-batch x 48" in out["DDP2"][0]
    assert "batch 96 = 2 process(es) x 5 micro-batches x 9.6" in out["accum 2x5"][0]
    for lines in out.values():
        assert len(lines) == 11
        assert all(line.startswith(f"epoch {number:3}/10  loss ") for number, line in enumerate(lines[1:], 1))
        assert all(re.search(r"lr [\d.]+  [\d.]+ s  [\d,]+ images/s$", line) for line in lines[1:])
    # the mean loss over all processes and micro-batches, at the rate that the epoch used
    for name in ("DDP2", "accum 2x5"):
        for left, right in zip(epochs("\n".join(out["train"])), epochs("\n".join(out[name])), strict=True):
            assert left == pytest.approx(right, abs=1.1e-4)  # four digits are printed
    assert epochs("\n".join(out["train"]))[0]["lr"] == 0.0375


def test_one_process_shows_one_bar(runs):
    err = runs("mp2")[1].err
    assert len(re.findall(r"epoch 2: +0%", err)) == 1
    assert re.search(r"epoch 10: .*loss=\d\.\d{4}", err)


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
        assert set(names) - set(events) == {"best.pt", "last.pt", *(f"epoch-{n:03}.pt" for n in range(2, 11, 2))}


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
        assert [event.step for event in events] == list(range(1, 11))
        assert [event.value for event in events] == pytest.approx([line[name] for line in printed], abs=1e-4)
    text = log.Tensors("arguments/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "batch_size = 96" in text and "seed = 3" in text


def test_a_checkpoint_holds_plain_values_under_plain_names(runs):
    for name in ("train", "DDP2"):
        content = load(runs(name)[0] / "last.pt")
        assert content.keys() == {"model", "optimizer", "scheduler", "epoch", "accuracy", "best_accuracy"}
        assert not any(key.startswith("module.") for key in content["model"])
        printed = [line["accuracy"] for line in epochs(runs(name)[1].out)]
        assert content["epoch"] == 10 and content["accuracy"] == pytest.approx(printed[-1], abs=1e-4)
        best = load(runs(name)[0] / "best.pt")
        assert best["accuracy"] == content["best_accuracy"] == pytest.approx(max(printed), abs=1e-4)
        assert best["epoch"] == printed.index(max(printed)) + 1


def test_biases_are_not_decayed(runs):
    groups = load(runs("train")[0] / "last.pt")["optimizer"]["param_groups"]
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(1e-4, 6), (0.0, 6)]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_as_the_whole_run_bit_for_bit(runs, tmp_path, name):
    folder, whole = runs(name)
    shutil.copy(folder / "epoch-008.pt", tmp_path / "last.pt")
    again = [*LAUNCH, "--use_env", *command(name)[len(LAUNCH):]] if name == "float32" else command(name)
    workers = "1" if name == "mp2" else "2"  # under mp.spawn workers start by spawn too, which takes seconds for each
    result = good(run(*again, "--workers", workers, "--resume", "auto", "--output-dir", tmp_path,
                      env=environment(name)))
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))
    assert epochs(result.out) == epochs(whole.out)[8:]
    assert not (tmp_path / "epoch-008.pt").exists()  # the eighth epoch was not repeated


@pytest.mark.drill
def test_the_command_line_wins_on_resume(runs, tmp_path):
    """The headline's rate is the one that trains: one line says what differs from the checkpoint's."""
    from common.models import cosine

    path = runs("float32")[0] / "epoch-008.pt"
    said = good(run(*command("float32"), "--lr", "0.1", "--momentum", "0.5", "--resume", path, "--output-dir",
                    tmp_path)).out
    factors = [cosine(10, 0.01)(done) for done in (8, 9)]
    old, new = (f"{0.75 * lr * factors[0]:g}" for lr in (0.05, 0.1))
    assert said.count(f"resume {path}: this command changes lr from {old} to {new}, momentum from 0.9 to 0.5\n") == 1
    assert ", lr 0.075, " in said
    assert [line["lr"] for line in epochs(said)] == pytest.approx([0.075 * factor for factor in factors], abs=1e-5)
    groups = load(tmp_path / "last.pt")["optimizer"]["param_groups"]
    assert [group["momentum"] for group in groups] == [0.5, 0.5]


def test_data_parallel_ends_the_baselines_run(runs, tmp_path):
    """On a CPU it has no device to copy to; its whole run is a drill."""
    folder = runs("train")[0]
    good(run(*command("DP"), "--resume", folder / "epoch-008.pt", "--output-dir", tmp_path, env=FLOAT64))
    assert same(load(tmp_path / "last.pt"), load(folder / "last.pt"))


RING = {"train.py": "DDP2", "train_DP.py": "bf16", "train_DDP.py": "train", "train_mp.py": "accum 2x5",
        "train_amp.py": "DP", "train_grad_accum.py": "mp2", "train_elastic.py": "DDP2"}
RING_DRILLS = RING.keys() - {"train_DDP.py", "train_mp.py"}


@pytest.fixture(scope="module")
def measured(runs, tmp_path_factory, request):
    """Evaluate checkpoints of RING by their scripts, copied out: all that are asked for, as many at a time as cores."""
    folder = tmp_path_factory.mktemp("copies")
    scripts = [item.callspec.params["script"] for item in request.session.items
               if getattr(item, "originalname", "") == "test_a_script_copied_out_measures_any_checkpoint_exactly"]
    commands = {script: [PYTHON, script, "--evaluate", "--workers", "0", "--resume", runs(RING[script])[0] / "last.pt"]
                for script in scripts}

    def measure(script):
        return run(*commands[script], cwd=copy_out(script, folder / script.removesuffix(".py")).parent,
                   env=environment(RING[script]))

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
                    tmp_path, env=FLOAT64)).out.splitlines()[-1]
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
    shutil.copy(runs("train")[0] / "epoch-008.pt", tmp_path / "last.pt")
    good(run(*command("DDP2"), "--resume", "auto", "--output-dir", tmp_path, env=FLOAT64))
    assert distance(tmp_path / "last.pt", runs("train")[0] / "last.pt") < 1e-11


def test_a_loss_that_is_not_finite_ends_all_processes_and_keeps_the_checkpoint(runs, tmp_path):
    shutil.copy(runs("train")[0] / "last.pt", tmp_path / "last.pt")
    before = (tmp_path / "last.pt").read_bytes()
    result = run(*RUNS["DDP2"], "--lr", "1e5", "--log-every", "4", "--output-dir", tmp_path)
    said = [line for line in result.err.splitlines() if line.startswith("train_DDP.py: error:")]
    assert result.code == 1
    assert len(said) == 1 and re.search("error: epoch 1, step 4: the loss is (nan|inf); try a lower --lr$", said[0])
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
    result = run(*limited, "--epochs", "11", "--save-every", "0", "--resume", "auto", "--output-dir", tmp_path,
                 env=FLOAT64)
    left = {path.name: path.read_bytes() for path in tmp_path.glob("*.pt*")}
    assert [left.get(name) for name in names] == before, f"of {names} there is left: {left.keys()}"
    assert result.code == 1 and len(result.err.splitlines()) == 1, result.err
    assert "cannot save" in result.err and "earlier checkpoints are intact" in result.err
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.drill
def test_best_is_the_first_of_the_highest_and_stays_when_accuracy_falls(runs, tmp_path):
    import torch

    tiny = [PYTHON, "train.py", "--lr", "1e-15", "--batch-size", "719", "--workers", "0", "--output-dir", tmp_path]
    level = good(run(*tiny, "--epochs", "3", "--weights", runs("float32")[0] / "last.pt"))
    accuracies = [line["accuracy"] for line in epochs(level.out)]
    assert len(accuracies) == 3 and len(set(accuracies)) == 1 and accuracies[0] > 0.5
    before, best = (tmp_path / "best.pt").read_bytes(), load(tmp_path / "best.pt")
    assert best["epoch"] == 1 and best["accuracy"] == pytest.approx(accuracies[0], abs=1e-4)

    content = load(tmp_path / "last.pt")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in content["model"].items()}
    torch.save(content | {"model": zeros}, tmp_path / "last.pt")
    fallen = good(run(*tiny, "--epochs", "5", "--resume", "auto"))
    assert [line["accuracy"] < 0.5 for line in epochs(fallen.out)] == [True, True]
    assert (tmp_path / "best.pt").read_bytes() == before
    assert load(tmp_path / "last.pt")["best_accuracy"] == best["accuracy"]


def test_weights_that_fit_are_taken_and_the_others_listed(runs, photos, tmp_path):
    """From digits (1 channel, 10 classes) to photos (3 channels, 3 classes): the layers between are taken."""
    result = good(run(PYTHON, "train_DDP.py", "--weights", runs("float32")[0] / "best.pt", "--dataset", "folder",
                      "--data-path", photos, "--batch-size", "48", "--epochs", "1", "--freeze-layers",
                      "--output-dir", tmp_path))
    said = result.out.splitlines()[0]
    weights, start = load(tmp_path / "last.pt")["model"], load(runs("float32")[0] / "best.pt")["model"]
    taken = [name for name in weights if weights[name].shape == start[name].shape]
    assert f"loaded {len(taken)} of {len(weights)} tensors; of another shape: " in said
    assert all((weights[name] == start[name]).all() for name in taken) and "features.3.weight" in taken
    assert "195 of " in result.out.splitlines()[1]  # 64 x 3 + 3: the classifier alone is trained
    assert json.loads((tmp_path / "class_indices.json").read_text()) == {"0": "ash", "1": "beech", "2": "cedar"}
