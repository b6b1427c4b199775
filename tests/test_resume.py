"""README's first run, in float32: it learns and resumes; failures keep its checkpoints; other scripts load them."""
import json
import re
import shutil

import pytest
from conftest import FLOAT64, LAUNCH, PROGRAMS, PYTHON, RUNS, copy_out, epochs, good, load, run, same

README = [*LAUNCH, "--nproc_per_node=2", "train_DDP.py"]


@pytest.fixture(scope="module")
def finished(once):
    """Run README's first command in a copy, and also keep its eighth epoch; return (output folder, result)."""
    folder, result = once("readme", lambda folder: run(*README, "--save-every", "8",
                                                       cwd=copy_out("train_DDP.py", folder / "copy").parent))
    return folder / "copy/runs", result


@pytest.mark.drill
def test_the_default_run_learns_the_digits(finished):
    folder, result = finished
    assert epochs(result.out)[-1]["accuracy"] >= 0.97
    assert {path.name.split(".")[0] for path in folder.glob("[!.]*")} == {"events", "best", "last", "epoch-008"}


@pytest.mark.nightly
def test_a_resumed_run_of_two_processes_ends_bit_for_bit(finished, tmp_path):
    folder, whole = finished
    shutil.copy(folder / "epoch-008.pt", tmp_path / "last.pt")
    result = good(run(*LAUNCH, "--use_env", *README[len(LAUNCH):], "--workers", "2", "--resume", "auto",
                      "--output-dir", tmp_path))
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))
    assert epochs(result.out) == epochs(whole.out)[8:]


@pytest.mark.drill
def test_one_process_measures_what_two_reported(finished):
    """A copy of the script outside the repository is started by plain `python`."""
    folder, result = finished
    said = good(run(PYTHON, "train_DDP.py", "--evaluate", "--resume", "auto", cwd=folder.parent)).out
    reported = epochs(result.out)[-1]
    assert said.strip().endswith(f"accuracy {reported['accuracy']:.4f}  top5 {reported['top5']:.4f}")


@pytest.mark.parametrize("script", [
    pytest.param("train_DDP.py", marks=pytest.mark.drill), *(pytest.param(name, marks=pytest.mark.nightly) for name in (
        "train_FSDP.py", "train_TP.py", "train_PP.py", "train_DCP.py"))])
def test_no_thread_of_the_backend_is_left_when_python_ends(finished, tmp_path, script):
    """One that still holds a tensor then aborts the process, once in some launches, when all its work is done.

    A script with DTensors ends before Python does, and prints no threads.
    """
    said = good(run(PYTHON, PROGRAMS / "around.py", "last_threads", script, "--evaluate", "--weights",
                    finished[0] / "last.pt", "--backend", "gloo", "--output-dir", tmp_path)).out
    threads = re.search(r"accuracy [\d.]+  .*\n(?:threads: (.+))?", said)
    assert threads and "gloo" not in str(threads[1]), said
    assert (threads[1] is None) == (script in ("train_FSDP.py", "train_TP.py", "train_DCP.py")), said


def test_a_save_that_breaks_off_spares_what_was_saved(runs, scripts, tmp_path):
    """No file may grow beyond 100 KiB (some shells count in KiB: 200), a third of a checkpoint at most."""
    names = "best.pt", "last.pt"
    for name in names:
        shutil.copy(runs("train.py")[0] / name, tmp_path)
    assert all((tmp_path / name).stat().st_size > 600 * 1024 for name in names)
    before = [(tmp_path / name).read_bytes() for name in names]
    result = run("sh", "-c", 'ulimit -f 200 && exec "$@"', "sh", *RUNS["train.py"], "--epochs", "3", "--resume",
                 "auto", "--output-dir", tmp_path, cwd=scripts, env=FLOAT64)
    left = {path.name: path.read_bytes() for path in tmp_path.glob("*.pt*")}
    assert [left.get(name) for name in names] == before, f"of {names} there is left: {left.keys()}"
    assert result.code == 1 and len(result.err.splitlines()) == 1, result.err
    assert "cannot save" in result.err and "earlier checkpoints are intact" in result.err
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.drill
def test_weights_that_fit_are_taken_and_the_others_listed(finished, photos, tmp_path):
    """From digits (1 channel, 10 classes) to photos (3 channels, 3 classes), the layers in between are loaded."""
    result = good(run(PYTHON, "train_DDP.py", "--weights", finished[0] / "best.pt", "--dataset", "folder",
                      "--data-path", photos, "--batch-size", "12", "--epochs", "1", "--freeze-layers",
                      "--output-dir", tmp_path))
    said = result.out.splitlines()[0]
    weights, start = load(tmp_path / "last.pt")["model"], load(finished[0] / "best.pt")["model"]
    taken = [name for name in weights if weights[name].shape == start[name].shape]
    assert f"loaded {len(taken)} of {len(weights)} tensors; of a different shape or type: " in said
    assert all((weights[name] == start[name]).all() for name in taken) and "features.3.weight" in taken
    assert "195 of " in result.out.splitlines()[1]  # 64 x 3 + 3: the classifier alone is trained
    assert json.loads((tmp_path / "class_indices.json").read_text()) == {"0": "ash", "1": "beech", "2": "cedar"}
