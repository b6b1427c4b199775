"""A folder of pictures: augmentation, BatchNorm, workers, frozen layers."""
import re
import shutil
from pathlib import Path

import pytest
from conftest import FLOAT64, LAUNCH, PYTHON, TORCHRUN, distance, epochs, good, load, run, same

RESNET = ["--dataset", "folder", "--model", "resnet18", "--batch-size", "24", "--epochs", "2", "--lr", "0.1",
          "--save-every", "1"]


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    """Train ResNet-18 on the photos, frozen (one process; two) and whole (two processes): name to (folder, result).

    Each when a test first asks for it. The exact ones are in float64, where they can be compared.
    """
    folder = tmp_path_factory.mktemp("trained")
    two = [*TORCHRUN, "--nproc-per-node=2", "train_DDP.py"]
    commands = {
        "exact 1": [PYTHON, "train.py", "--freeze-layers", "--workers", "0"],
        "exact 2": [*two, "--freeze-layers", "--workers", "2"],
        "frozen 2": [*two, "--freeze-layers", "--workers", "2"],
        "whole 2": [*two, "--workers", "0"],
    }

    class Trained(dict):
        def __missing__(self, name):
            result = good(run(*commands[name], *RESNET, "--data-path", photos, "--output-dir", folder / name,
                              env=FLOAT64 if "exact" in name else {}))
            return self.setdefault(name, (folder / name, result))

    return Trained()


@pytest.mark.drill
def test_with_augmentation_and_frozen_batchnorm_two_processes_train_the_same_model(trained):
    """BatchNorm in training mode cannot: it sees a process's own part of the batch (or, with --sync-bn, all of it)."""
    one, two = trained["exact 1"][0], trained["exact 2"][0]
    assert distance(one / "epoch-001.pt", one / "last.pt") > 1e-3
    assert distance(one / "last.pt", two / "last.pt") < 1e-11


def test_freezing_trains_the_classifier_alone_and_batchnorm_does_not_drift(trained):
    first, last = (load(trained["frozen 2"][0] / name)["model"] for name in ("epoch-001.pt", "last.pt"))
    assert {name for name in first if not first[name].equal(last[name])} == {"fc.weight", "fc.bias"}
    assert not load(trained["whole 2"][0] / "last.pt")["model"]["bn1.running_mean"].equal(first["bn1.running_mean"])
    assert "1,539 of 11,178,051 parameters" in trained["frozen 2"][1].out


def test_what_was_measured_is_what_was_saved(trained, photos, tmp_path):
    """Each process has running statistics of its own: the accuracy must be that of the saved ones."""
    folder, result = trained["whole 2"]
    said = good(run(PYTHON, "train.py", "--evaluate", "--resume", folder / "last.pt", *RESNET, "--data-path", photos,
                    "--output-dir", tmp_path)).out
    val_loss, accuracy = map(float, re.search(r"val_loss ([\d.]+)  accuracy ([\d.]+)", said).groups())
    assert val_loss == pytest.approx(epochs(result.out)[-1]["val_loss"], abs=2e-4)
    assert accuracy == epochs(result.out)[-1]["accuracy"]


def test_a_process_may_have_nothing_to_evaluate(photos, tmp_path):
    """One picture for two processes (and so one class): nothing waits for both of them, BatchNorm's buffers neither."""
    for split, numbers in (("train", range(4)), ("val", [4])):
        (tmp_path / split / "ash").mkdir(parents=True)
        for number in numbers:
            shutil.copy(photos / "ash" / f"{number:02}.jpg", tmp_path / split / "ash")
    result = run(*TORCHRUN, "--nproc-per-node=2", "train_DDP.py", *RESNET, "--batch-size", "2", "--epochs", "1",
                 "--workers", "0", "--timeout", "30", "--data-path", tmp_path, "--output-dir", tmp_path / "out")
    assert len(epochs(good(result).out)) == 1


@pytest.mark.drill
@pytest.mark.parametrize("script", ["train_DDP.py", "train_mp.py"])
def test_one_and_one_epoch_are_two_with_batchnorm_augmentation_and_workers(trained, photos, tmp_path, script):
    folder = trained["whole 2"][0]
    # under mp.spawn the workers start by spawn too, which takes seconds for each
    command = ([PYTHON, script, "--workers", "1"] if script == "train_mp.py" else
               [*LAUNCH, "--nproc_per_node=2", script, "--workers", "2"])
    good(run(*command, *RESNET, "--data-path", photos, "--output-dir", tmp_path,
             "--resume", folder / "epoch-001.pt"))
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))


@pytest.mark.drill
def test_workers_start_by_spawn_as_on_macos_and_windows(trained, photos, tmp_path):
    float64 = Path(FLOAT64["PYTHONPATH"], "sitecustomize.py").read_text()
    (tmp_path / "sitecustomize.py").write_text(f"{float64}\nimport multiprocessing\n"
                                               "multiprocessing.set_start_method('spawn')\n")
    folder = trained["exact 1"][0]
    result = good(run(PYTHON, "-c", "import multiprocessing; print(multiprocessing.get_start_method())",
                      env={"PYTHONPATH": str(tmp_path)}))
    assert result.out.strip() == "spawn"
    result = run(PYTHON, "train.py", *RESNET, "--freeze-layers", "--workers", "2", "--data-path", photos,
                 "--output-dir", tmp_path, "--resume", folder / "epoch-001.pt", env={"PYTHONPATH": str(tmp_path)})
    assert (result.code, result.err) == (0, ""), "a worker ran the script instead of importing it"
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))
