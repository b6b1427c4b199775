"""The other tests check some scripts; these check all: default runs, resuming, other numbers of processes."""
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import (
    FLOAT64,
    FROM_ROOT,
    PROGRAMS,
    PYTHON,
    RUNS,
    SAME,
    SCRIPTS,
    TORCHRUN,
    command,
    copy_out,
    distance,
    epochs,
    free_port,
    good,
    load,
    precision,
    run,
    same,
    whole_file,
)


@pytest.mark.nightly
def test_the_whole_default_run_trains_the_baselines_model(tmp_path):
    """Ten epochs with only the output folder as argument confirm README's claim about float64."""
    for number, script in enumerate(("train.py", "train_DDP.py")):
        good(run(*command(script), "--output-dir", tmp_path / str(number), env=FLOAT64))
    assert distance(tmp_path / "0/last.pt", tmp_path / "1/last.pt") < 1e-11


@pytest.mark.parametrize("script", [
    name if name == "train_combined.py" else pytest.param(name, marks=pytest.mark.nightly)
    for name in SCRIPTS if name not in ("train.py", "train_DDP.py")])
def test_a_resumed_run_ends_as_the_whole_run_bit_for_bit(runs, scripts, tmp_path, script):
    folder, whole = runs(script)
    second = folder / ("step-0000005" if script == "train_DCP.py" else "epoch-001.pt")
    result = good(run(*RUNS[script], "--resume", second, "--output-dir", tmp_path, cwd=scripts,
                      env=precision(script)))
    if script == "train_DCP.py":
        whole_file(tmp_path / "step-0000010", tmp_path / "last.pt")
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))
    assert epochs(result.out) == epochs(whole.out)[1:]


@pytest.mark.nightly  # test_resume.py measures with one script
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_copied_out_measures_any_checkpoint_exactly(runs, scripts, tmp_path, script):
    """One process (two with mp) evaluates another script's checkpoint and finds the reported accuracy."""
    other = SCRIPTS[SCRIPTS.index(script) - 1] if script != "train_mp.py" else "train_combined.py"
    folder, result = runs(other)
    copy = copy_out(script, tmp_path / "copy")
    shutil.copy(scripts / "common/digits.npz", copy.parent / "common")
    said = good(run(PYTHON, script, "--evaluate", "--workers", "0", "--resume", folder / "last.pt", cwd=copy.parent,
                    env=precision(other))).out
    reported = epochs(result.out)[-1]
    assert said.strip().endswith(f"accuracy {reported['accuracy']:.4f}  top5 {reported['top5']:.4f}")


@pytest.mark.nightly
def test_two_halves_of_a_launch_on_two_hosts_are_one_run(runs, scripts, tmp_path):
    """One command per host, as in README; here, both hosts are this machine, and train the last epoch."""
    port, whole = free_port(), runs("train_mp.py")[0]
    halves = [[*RUNS["train_mp.py"], "--nprocs", "1", "--nnodes", "2", "--node-rank", rank, "--ip", "127.0.0.1",
               "--port", port, "--resume", whole / "epoch-001.pt", "--output-dir", tmp_path] for rank in "01"]
    with ThreadPoolExecutor(2) as pool:
        said = [good(result).out for result in pool.map(lambda half: run(*half, cwd=scripts, env=FLOAT64), halves)]
    assert "batch 96 = 2 process(es) x 1 micro-batch x 48" in said[0]
    assert [len(epochs(out)) for out in said] == [1, 0]  # of all processes, rank 0 prints
    assert distance(tmp_path / "last.pt", whole / "last.pt") < 1e-11


@pytest.mark.nightly
def test_a_resumed_run_may_have_another_number_of_processes(runs, scripts, tmp_path):
    whole = runs("train.py")[0]
    good(run(*RUNS["train_DDP.py on 3"], "--resume", whole / "epoch-001.pt", "--output-dir", tmp_path, cwd=scripts,
             env=FLOAT64))
    assert distance(tmp_path / "last.pt", whole / "last.pt") < 1e-11


RING = ["train.py", "train_PP.py", "train_TP.py", "train_DCP.py", "train_FSDP.py", "train_amp.py"]


@pytest.mark.nightly
@pytest.mark.parametrize("writer", RING[:-1])
def test_a_file_crosses(runs, scripts, tmp_path, writer):
    """Each script resumes from the previous script's file, with its momentum, up to the end of the whole run."""
    reader = RING[RING.index(writer) + 1] if writer != "train_FSDP.py" else "train.py"
    file = runs(writer)[0] / "epoch-001.pt"
    if writer == "train_DCP.py":
        whole_file(file.with_name("step-0000005"), file)
    good(run(*RUNS[reader], "--resume", file, "--output-dir", tmp_path, cwd=scripts, env=FLOAT64))
    if reader == "train_DCP.py":
        whole_file(tmp_path / "step-0000010", tmp_path / "last.pt")
    assert distance(tmp_path / "last.pt", runs("train.py")[0] / "last.pt") < 1e-11


def test_a_trace_shows_what_each_step_does_and_sends(tmp_path):
    """A step has five micro-batches but sends gradients once; without no_sync(), it would send them five times."""
    rare = ["--log-every", "50", "--snapshot-every", "50"]  # the loss would travel, too
    good(run(*command("train_combined.py"), *SAME, "--epochs", "1", "--profile", *rare, "--output-dir",
             tmp_path))
    for rank in (0, 1):
        events = json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events if event.get("ph") == "X"]
        counts = {part: sum(part in name for name in names) for part in (
            "enumerate(DataLoader)", "DistributedDataParallel.forward", "Optimizer.step", "gloo:all_reduce")}
        assert list(counts.values()) == [5, 25, 5, 5], counts
        assert any("autograd::engine::evaluate_function" in name for name in names)


TWO = [*TORCHRUN, "--nproc-per-node=2"]


def kept(launcher, script, batch_size, folder, *more):
    """Train for two epochs; return the checksums of each rank's masks."""
    out = good(run(*launcher, PROGRAMS / "around.py", "dropout", script, "--batch-size", batch_size,
                   "--epochs", "2", "--save-every", "1", "--workers", "0", "--output-dir", folder, *more,
                   env=FROM_ROOT)).out
    return {rank: re.findall(rf"kept {rank} (\d+)", out) for rank in "01"}


@pytest.mark.parametrize(("script", "again"), [
    # one process with rank 0's share of the batch takes rank 0's masks, in twice as many steps
    ("train_DDP.py", [PYTHON]), pytest.param("train_elastic.py", TWO, marks=pytest.mark.nightly)])
def test_dropout_differs_between_ranks_steps_and_epochs_and_a_resumed_run_repeats_it(tmp_path, script, again):
    whole = kept(TWO, script, 478, tmp_path)
    assert [len(masks) for masks in whole.values()] == [6, 6]  # three steps in each epoch
    assert len({*whole["0"], *whole["1"]}) == 12
    rest = kept(again, script, 478 if again is TWO else 239, tmp_path, "--resume", tmp_path / "epoch-001.pt")
    assert rest["0"][:3] == whole["0"][3:]
    assert rest["1"] == (whole["1"][3:] if again is TWO else [])


@pytest.mark.nightly
def test_a_tensor_group_drops_the_same_outputs(tmp_path):
    """Each process has all outputs of a block: they must stay equal."""
    masks = kept(TWO, "train_TP.py", 478, tmp_path, "--model", "vit")
    assert len({*masks["0"]}) == 6 and masks["0"] == masks["1"]
