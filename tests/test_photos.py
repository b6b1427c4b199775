"""A folder of images: augmentation, BatchNorm, workers, frozen layers."""
import re
import runpy
import shutil
import sys

import pytest
from conftest import FLOAT64, PYTHON, ROOT, TORCHRUN, distance, epochs, good, load, run, same

RESNET = ["--dataset", "folder", "--model", "resnet18", "--batch-size", "6", "--epochs", "2", "--lr", "0.1",
          "--save-every", "1"]


@pytest.fixture(scope="module")
def trained(photos, once):
    """Return a function that trains ResNet-18 on the photos once: name to (folder, result).

    The exact ones compute in float64, where one process and two can be compared.
    """
    two = [*TORCHRUN, "--nproc-per-node=2", "train_DDP.py", *RESNET]
    commands = {
        "frozen": [PYTHON, "train.py", *RESNET, "--freeze-layers", "--workers", "0"],
        "whole": [*two, "--workers", "0"],
        "exact 1": [PYTHON, "train.py", *RESNET, "--epochs", "1", "--freeze-layers", "--workers", "0"],
        "exact 2": [*two, "--epochs", "1", "--freeze-layers", "--workers", "2"],
    }

    return lambda name: once(f"photos {name}", lambda folder: run(
        *commands[name], "--data-path", photos, "--output-dir", folder, env=FLOAT64 if "exact" in name else {}))


@pytest.mark.nightly
def test_with_augmentation_and_frozen_batchnorm_two_processes_train_the_same_model(trained):
    """BatchNorm in training mode would differ: without --sync-bn, it sees only the process's part of the batch."""
    one, two, longer = (trained(name)[0] for name in ("exact 1", "exact 2", "frozen"))
    assert distance(one / "last.pt", longer / "last.pt") > 1e-3  # it did train
    assert distance(one / "last.pt", two / "last.pt") < 1e-11


@pytest.mark.nightly
def test_freezing_trains_the_classifier_alone_and_batchnorm_does_not_drift(trained):
    first, last = (load(trained("frozen")[0] / name)["model"] for name in ("epoch-001.pt", "last.pt"))
    assert {name for name in first if not first[name].equal(last[name])} == {"fc.weight", "fc.bias"}
    assert not load(trained("whole")[0] / "last.pt")["model"]["bn1.running_mean"].equal(first["bn1.running_mean"])
    assert "1,539 of 11,178,051 parameters" in trained("frozen")[1].out


@pytest.mark.drill
def test_what_was_measured_is_what_was_saved(photos, alone, monkeypatch, capsys, tmp_path):
    """Three processes measure two images: nothing may wait for the one without any, not even BatchNorm's buffers.

    Running statistics differ between processes: the accuracy must be measured with the saved ones.
    """
    for split, numbers in (("train", range(4)), ("val", [4])):
        for name in ("ash", "cedar"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in numbers:
                shutil.copy(photos / name / f"{number:02}.jpg", tmp_path / split / name)
    options = [*RESNET, "--workers", "0", "--data-path", tmp_path, "--output-dir", tmp_path / "out", "--epochs", "1"]
    result = good(run(*TORCHRUN, "--nproc-per-node=3", "train_DDP.py", *options, "--timeout", "30"))
    monkeypatch.setattr("atexit.register", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, options), "--evaluate", "--resume", "auto"])
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    said = re.search(r"val_loss ([\d.]+)  accuracy ([\d.]+)", capsys.readouterr().out)
    last, = epochs(result.out)
    assert float(said[1]) == pytest.approx(last["val_loss"], abs=2e-4) and float(said[2]) == last["accuracy"]


@pytest.mark.nightly
def test_one_and_one_epoch_are_two_with_batchnorm_augmentation_and_workers(trained, photos, tmp_path):
    """It runs under mp.spawn, where loader workers also start by spawn."""
    folder = trained("whole")[0]
    good(run(PYTHON, "train_mp.py", "--workers", "1", *RESNET, "--data-path", photos, "--output-dir", tmp_path,
             "--resume", folder / "epoch-001.pt"))
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))


@pytest.mark.nightly
def test_workers_start_by_spawn_as_on_macos_and_windows(trained, photos, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import multiprocessing\nmultiprocessing.set_start_method('spawn')\n")
    folder = trained("frozen")[0]
    result = run(PYTHON, "train.py", *RESNET, "--freeze-layers", "--workers", "2", "--data-path", photos,
                 "--output-dir", tmp_path, "--resume", folder / "epoch-001.pt", env={"PYTHONPATH": str(tmp_path)})
    assert (result.code, result.err) == (0, ""), "a worker ran the script instead of importing it"
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))
