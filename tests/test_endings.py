"""A failure ends the launch and shows its cause, even if destroying the group would wait for the other processes."""
import os
import signal
import subprocess
import time
from pathlib import Path

import markers
import pytest
from conftest import FROM_ROOT, PROGRAMS, PYTHON, ROOT, TORCHRUN, descendants, free_port, good, run
from live import Live, alive, ours


def around(folder, script, *arguments):
    """Return the command of a launch of two processes whose destroy_process_group waits for both."""
    (folder / "left").mkdir()
    return [*TORCHRUN, "--nproc-per-node=2", PROGRAMS / "around.py", "waiting_destroy", folder / "left", script,
            *arguments, "--output-dir", folder / "out"]


@pytest.mark.parametrize("moment", ["early", pytest.param("late", marks=pytest.mark.drill)])
def test_an_interrupted_constructor_adds_nothing_to_the_line(moment):
    """A DataLoader's iterator has no workers yet, so its `__del__` fails; or they start, and torch misses them."""
    ended = run(PYTHON, PROGRAMS / "half_built.py", moment, env=FROM_ROOT)
    assert (ended.code, ended.err) == (143, "half_built.py: error: terminated by SIGTERM\n")


@pytest.mark.drill
def test_a_good_run_destroys_the_group(tmp_path):
    good(run(*around(tmp_path, "train_DDP.py", "--epochs", "1", "--batch-size", "718")))
    assert {path.name for path in (tmp_path / "left").iterdir()} == {"0", "1"}


@pytest.mark.drill
def test_a_process_that_fails_does_not_wait_for_the_others(broken_photo, tmp_path):
    """One process cannot read an image: it names the image and exits, while the other waits in an all-reduce."""
    data, broken = broken_photo
    with Live(*around(tmp_path, "train_DDP.py", "--dataset", "folder", "--data-path", data, "--batch-size", "4",
                      "--workers", "1")) as live:
        assert live.end(120) == 1
    line, = ours(live.err)
    assert line.startswith("train_DDP.py: error: rank ") and f"{broken}: cannot be read" in line
    assert "train_DDP.py\", line" not in live.said()  # no traceback of ours
    assert not (tmp_path / "out/last.pt").exists()


@pytest.mark.drill
def test_ctrl_c_does_not_wait_for_the_others(tmp_path):
    """Only one process is interrupted, in the middle of training."""
    with Live(*around(tmp_path, "train_DDP.py", "--epochs", "1000")) as live:
        live.wait_for("^epoch +1/")
        os.kill(live.ranks()[1], signal.SIGINT)
        assert live.end(120) == 1


@pytest.mark.drill
def test_ctrl_c_ends_what_the_script_has_started(tmp_path):
    """Here, mp.spawn's processes; drills/test_faults.py tests other signals, moments and launchers."""
    with Live(PYTHON, "train_mp.py", "--epochs", "1000", "--workers", "0", "--output-dir", tmp_path) as live:
        live.wait_for("^epoch +1/")
        live.interrupt()
        assert live.end(120) == 130
    assert [line for line in live.err if line.strip()] == ["train_mp.py: error: interrupted"]


@pytest.mark.drill
def test_a_batch_that_the_processes_cannot_share(tmp_path):
    result = run(PYTHON, "train_mp.py", "--batch-size", "63", "--output-dir", tmp_path)
    said = "train_mp.py: error: --batch-size 63: not a multiple of the 2 processes that share it\n"
    assert (result.code, result.err) == (2, said)


@pytest.mark.parametrize("script", [
    pytest.param(markers.name_of(path), marks=pytest.mark.drill if path.name == "train_4D.py" else pytest.mark.nightly)
    for path in markers.scripts() if "signals.note_signals(" in path.read_text()])
def test_a_mistake_ends_a_job_that_notes_signals_at_once(tmp_path, script):
    """Rank 0 reports it, and the launcher ends rank 1 by a signal that only sets a flag."""
    words = markers.words(ROOT / script)
    with Live(*TORCHRUN, "--nproc-per-node=2", *words, "--batch-size", "63", "--output-dir", tmp_path) as live:
        live.wait_for("error: ")
        assert live.end(5) == 1
    line, = ours(live.err)
    assert line.startswith(f"{Path(script).name}: error: --batch-size 63: not a multiple of the ")


@pytest.mark.drill
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_loaders_workers_end_with_a_killed_process(method):
    """Under forkserver, too, Python 3.14's default on Linux, where the workers' parent is the fork server."""
    process = subprocess.Popen([PYTHON, PROGRAMS / "loading.py", method], env=os.environ | FROM_ROOT,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "reading\n"
    family = descendants(process.pid)
    assert len(family) >= 3
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while any(map(alive, family)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in family if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.drill
def test_processes_find_out_that_they_share_a_device():
    """They use the store before the group exists, and the group then uses it, too: as on a laptop with one GPU."""
    said = good(run(*TORCHRUN, "--nproc-per-node=2", PROGRAMS / "shared.py", "GPU-1", env=FROM_ROOT)).out
    assert (said.count("shared"), said.count("apart")) == (2, 0)


@pytest.mark.drill
def test_processes_that_srun_started_share_a_device():
    """Under srun, rank 0 itself serves the store, and the group finds it at the same port."""
    from concurrent.futures import ThreadPoolExecutor

    shared = FROM_ROOT | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                          "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(2) as pool:
        runs = pool.map(lambda rank: run(PYTHON, PROGRAMS / "shared.py", "GPU-1",
                                         env=shared | {"RANK": rank, "LOCAL_RANK": rank}), "01")
        assert [good(one).out.count("shared") for one in runs] == [1, 1]
