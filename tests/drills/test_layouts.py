"""Sharded models on different numbers of processes: equal weights, exchangeable files, and failures."""
import os
import random
import signal
import time

import pytest
import torch
from conftest import FLOAT64, PYTHON, SAME, TORCHRUN, command, distance, epochs, good, load, run
from live import Live, ours
from torch.torch_version import TorchVersion

from common.folders import all_folders, steps_of, whole_folders

# few steps: on 2 cores, four processes take seconds for each
VIT = ["--model", "vit", *SAME, "--epochs", "2", "--batch-size", "288", "--save-every", "0"]
CLIP = ["--clip-norm", "0.5"]
GRID = pytest.mark.skipif(TorchVersion(torch.__version__) < "2.14", reason="train_TP.py needs torch 2.14 for groups")


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Return {whether it clips: the checkpoint of one process}."""
    folder = tmp_path_factory.mktemp("references")
    for name, start in [("False", [PYTHON, "train.py"]), ("True", [PYTHON, "train_FSDP.py", *CLIP])]:
        good(run(*start, *VIT, "--output-dir", folder / name, env=FLOAT64))
    assert distance(folder / "False/last.pt", folder / "True/last.pt") > 1e-3  # it did clip
    return lambda clips: folder / str(clips) / "last.pt"


LAYOUTS = {
    "FSDP on 3": (3, "train_FSDP.py"), "two replicas": (4, "train_FSDP.py", "--replicas", "2",
                                                        "--reshard-after-forward", "no", *CLIP),
    "TP on 2": (2, "train_TP.py"), "TP on 4": (4, "train_TP.py", "--tensor-parallel", "4"),
    "TP on 2 x 2": (4, "train_TP.py", *CLIP), "PP on 1": (1, "train_PP.py"),
    "interleaved": (3, "train_PP.py", "--chunks", "2", *CLIP)}


@pytest.mark.parametrize("name", [
    "FSDP on 3", "two replicas", "TP on 2", "interleaved",
    *(pytest.param(name, marks=[pytest.mark.nightly, GRID]) for name in ("TP on 2 x 2", "TP on 4", "PP on 1"))])
def test_a_layout_trains_the_baselines_model(references, tmp_path, name):
    processes, script, *options = LAYOUTS[name]
    good(run(*TORCHRUN, f"--nproc-per-node={processes}", script, *options, *VIT, "--output-dir", tmp_path, env=FLOAT64))
    reference, variant = load(references("--clip-norm" in options)), load(tmp_path / "last.pt")
    assert distance(references("--clip-norm" in options), tmp_path / "last.pt") < 1e-11
    for number, values in reference["optimizer"]["state"].items():
        other = variant["optimizer"]["state"][number]["momentum_buffer"]
        assert (values["momentum_buffer"] - other).abs().max() < 1e-11
    assert reference["score"] == pytest.approx(variant["score"], abs=1e-12)


def test_a_validation_set_smaller_than_the_processes_is_measured_exactly(photos, tmp_path):
    """With three images on four processes, one process has none but takes part in every forward pass."""
    arguments = ["--dataset", "folder", "--data-path", photos, "--model", "vit", "--epochs", "1", "--batch-size", "4",
                 "--workers", "0"]
    found = []
    for number, start in enumerate([[PYTHON, "train.py"], [*TORCHRUN, "--nproc-per-node=4", "train_FSDP.py"]]):
        found += epochs(good(run(*start, *arguments, "--output-dir", tmp_path / str(number), env=FLOAT64)).out)
    assert found[0] == found[1]


@pytest.mark.parametrize("script", ["train_FSDP.py", *(pytest.param(name, marks=pytest.mark.nightly) for name in (
    "train_TP.py", "train_PP.py", "train_DCP.py"))])
def test_a_killed_process_ends_the_launch(tmp_path, script):
    with Live(*command(script), "--epochs", "1000", "--workers", "0", "--output-dir", tmp_path) as live:
        live.wait_for("^epoch +1/")
        os.kill(live.ranks()[1], signal.SIGKILL)
        assert live.end(120) == 1
    assert "exitcode  : -9" in "\n".join(live.err)


@pytest.mark.parametrize("script", ["train_FSDP.py", pytest.param("train_TP.py", marks=pytest.mark.nightly)])
def test_a_process_that_fails_names_the_cause(broken_photo, tmp_path, script):
    data, broken = broken_photo
    with Live(*command(script), "--dataset", "folder", "--data-path", data, "--batch-size", "4", "--workers", "1",
              "--output-dir", tmp_path / "out") as live:
        assert live.end(120) == 1
    assert ours(live.err) and all(f"{broken}: cannot be read" in line for line in ours(live.err))


def test_a_kill_at_any_moment_of_a_save_loses_no_whole_folder(tmp_path):
    """Three times kill -9 of all processes, at random moments: mostly while a folder is being written.

    No other folder is lost: the one before it is a step older, or is of the same step, the last of an epoch.
    """
    start = [*command("train_DCP.py"), "--model", "vit", "--epochs", "1000", "--batch-size", "718", "--workers", "0",
             "--snapshot-every", "1", "--resume", "auto", "--output-dir", tmp_path]
    newest, torn = None, 0
    for number in range(3):
        with Live(*start) as live:
            if newest:
                assert str(newest) in live.wait_for("^resume ")
            live.wait_for("^epoch ")
            time.sleep(random.Random(number).random())  # the moment is random: nothing is waited for
            for pid in live.family():
                os.kill(pid, signal.SIGKILL)
        folders = whole_folders(tmp_path)
        begun = all_folders(tmp_path)
        assert folders and steps_of(folders[-1]) >= steps_of(begun[-1]) - 1
        newest = folders[-1]
        torn += len(begun) - len(folders)
    print(f"{torn} of 3 kills left a torn folder")
    good(run(*start, "--evaluate"))
