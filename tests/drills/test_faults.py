"""Interrupted runs: each ends with one line, leaves no process behind and loses nothing that was saved."""
import contextlib
import re
import signal

import pytest
from conftest import LAUNCH, PYTHON, TORCHRUN, good, load, run
from live import Live, ours
from test_machines import AS_ROOT, mounted

LONG = ["--epochs", "1000", "--workers", "1", "--log-every", "2"]
STARTS = {"train.py": [PYTHON, "train.py"], "train_mp.py": [PYTHON, "train_mp.py"],
          "torchrun": [*TORCHRUN, "--nproc-per-node=2", "train_DDP.py"],
          "launch": [*LAUNCH, "--nproc_per_node=2", "train_grad_accum.py"]}
# where in the run the signal comes: after this line; None: when all processes of the launch import torch
STAGES = {"start": None, "headline": "^cpu: batch", "training": "^epoch +1/"}


@pytest.mark.parametrize(("start", "stage", "sent"), [
    ("train_mp.py", "start", "SIGTERM"), ("torchrun", "training", "SIGTERM"),
    *(pytest.param(*row, marks=pytest.mark.nightly) for row in (
        ("train_mp.py", "headline", "SIGTERM"), ("train.py", "start", "SIGINT"), ("train.py", "training", "SIGTERM"),
        ("launch", "training", "SIGINT")))])
def test_an_interrupted_run_ends_at_once_and_leaves_nothing(tmp_path, start, stage, sent):
    """It ends long before its 1,000 epochs, with a nonzero exit code and, once the script runs, one line of its output.

    While Python still imports torch, an interrupt ends the script as it ends any program: with a traceback.
    """
    with Live(*STARTS[start], *LONG, "--output-dir", tmp_path) as live:
        if STAGES[stage]:
            live.wait_for(STAGES[stage])
        else:
            while live.with_torch() < (1 if start == "train.py" else 3):
                assert live.process.poll() is None, live.said()
        if sent == "SIGINT":
            live.interrupt()
        else:
            live.process.send_signal(signal.SIGTERM)
        code = live.end(60)
    assert code != 0
    if stage == "start":
        return
    assert not re.search("^epoch 1000/", live.said(), re.M)
    assert len(ours(live.err)) <= 1, live.err
    assert "train_DDP.py\", line" not in live.said() and "train_grad_accum.py\", line" not in live.said()
    if start in ("train.py", "train_mp.py"):  # a launcher adds a report
        word = "interrupted" if sent == "SIGINT" else "terminated by SIGTERM"
        assert [line for line in live.err if line.strip()] == [f"{start}: error: {word}"]
        assert code == {"SIGINT": 130, "SIGTERM": 143}[sent]


@pytest.mark.nightly
def test_one_output_folder_takes_one_run(tmp_path):
    """A second run is rejected, and the first continues; however the first ends, the folder is then free.

    tests/unit/test_checkpoint.py has a second run of two processes.
    """
    with Live(PYTHON, "train.py", *LONG, "--output-dir", tmp_path) as live:
        live.wait_for("^epoch +1/")
        live.process.send_signal(signal.SIGSTOP)  # it keeps its lock, and leaves the cores to the others
        second = run(PYTHON, "train.py", "--output-dir", tmp_path)
        said, = second.err.splitlines()
        assert said.startswith(f"train.py: error: --output-dir {tmp_path}: in use by another run (host and pro")
        assert f" {live.process.pid}); choose another folder" in said
        assert second.code == 2 and "epoch" not in second.out
        measured = good(run(PYTHON, "train.py", "--evaluate", "--resume", "auto", "--output-dir", tmp_path))
        assert "accuracy" in measured.out
        live.process.kill()
        live.end(60)
    done = load(tmp_path / "last.pt")["epoch"]
    third = good(run(PYTHON, "train.py", "--epochs", done + 1, "--resume", "auto", "--output-dir", tmp_path))
    assert f"epoch {done} is done" in third.out


@pytest.mark.nightly  # by day, the tests start several launches at a time, too
def test_runs_at_the_same_time(tmp_path, photos):
    """The runs use default ports, twice the same script, one data folder and separate output folders."""
    common = ["--dataset", "folder", "--data-path", photos, "--epochs", "1", "--batch-size", "12", "--workers", "0"]
    commands = [[PYTHON, "train_mp.py"], [*LAUNCH, "--nproc_per_node=2", "train_DDP.py"], [PYTHON, "train_mp.py"]]
    with contextlib.ExitStack() as stack:
        lives = [stack.enter_context(Live(*command, *common, "--output-dir", tmp_path / str(number)))
                 for number, command in enumerate(commands)]
        for number, live in enumerate(lives):
            assert live.end(240) == 0, live.said()
            assert load(tmp_path / str(number) / "last.pt")["epoch"] == 1
            assert (tmp_path / str(number) / "class_indices.json").stat().st_size


@pytest.mark.nightly
@pytest.mark.parametrize("command", [
    pytest.param([PYTHON, "train_mp.py"], id="mp"),
    pytest.param([*TORCHRUN, "--signals-to-handle=SIGTERM,SIGINT,SIGQUIT", "--nproc-per-node=2", "train_DDP.py"],
                 id="torchrun")])
def test_a_run_under_nohup_outlives_its_terminal(tmp_path, command):
    with Live("nohup", *command, *LONG, "--output-dir", tmp_path) as live:
        live.wait_for("^epoch +1/")
        live.process.send_signal(signal.SIGHUP)
        seen = sum(line.startswith("epoch") for line in live.out)
        live.wait_for(f"^epoch +{seen + 5}/")


@pytest.mark.nightly
def test_torchrun_ends_on_the_signal_of_a_closed_terminal_even_under_nohup(tmp_path):
    """If this fails, docs/operations.md need no longer name --signals-to-handle."""
    with Live("nohup", *STARTS["torchrun"], *LONG, "--output-dir", tmp_path) as live:
        live.wait_for("^epoch +1/")
        live.process.send_signal(signal.SIGHUP)
        assert live.end(60) and "got signal: 1" in live.said()


@AS_ROOT
def test_a_full_shared_memory_is_named(tmp_path):
    """As with Docker's 64 MB: a worker has no room for its batch."""
    command = [PYTHON, "train.py", "--workers", "1", "--batch-size", "700", "--epochs", "1", "--output-dir", tmp_path]
    result = run(*mounted("/dev/shm", "256k", command), seconds=120)
    said = "train.py: error: /dev/shm is full; enlarge it (in Docker: --shm-size=8g), or use fewer --workers\n"
    assert (result.code, result.err) == (1, said)
