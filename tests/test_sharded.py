"""A model of which each process holds a part: test_training.py compares the weights, this file what is special."""
import pickle
import re
import shutil

import pytest
import torch
from conftest import FLOAT64, PYTHON, SAME, TORCHRUN, distance, good, load, run, same
from live import ours

SHARDED = ["train_FSDP.py", "train_TP.py", "train_PP.py", "train_DCP.py"]


def shapes(content):
    """Return the content of a checkpoint with the shape and type of each tensor in its place."""
    if isinstance(content, dict):
        return {key: shapes(value) for key, value in content.items() if key not in ("score", "best_score")}
    return (content.shape, content.dtype) if isinstance(content, torch.Tensor) else content


@pytest.mark.parametrize("script", SHARDED)
def test_the_file_has_the_baselines_form_and_momentum(runs, script):
    """So every script loads it."""
    reference, variant = (load(runs(name)[0] / "last.pt") for name in ("train.py", script))
    assert shapes(reference) == shapes(variant)
    for number, values in reference["optimizer"]["state"].items():
        other = variant["optimizer"]["state"][number]
        assert (values["momentum_buffer"] - other["momentum_buffer"]).abs().max() < 1e-11


def test_fsdp_is_ddp_bit_for_bit_in_float32(tmp_path):
    """With a vision transformer and its layout; train_DDP.py's channels-last changes only convolutions' rounding."""
    for script in ("train_DDP.py", "train_FSDP.py"):
        good(run(*TORCHRUN, "--nproc-per-node=2", script, "--model", "vit", *SAME, "--epochs", "1", "--save-every", "0",
                 "--output-dir", tmp_path / script))
    left, right = (load(tmp_path / script / "last.pt") for script in ("train_DDP.py", "train_FSDP.py"))
    assert same({**left, "model": dict(left["model"])}, right)


def test_a_folder_is_resumed_by_another_number_of_processes(runs, tmp_path):
    """Written by two, read by one, which goes on; a torn folder is newer and does not count."""
    folder, _ = runs("train_DCP.py")
    shutil.copytree(folder / "step-0000028", tmp_path / "step-0000028")
    (tmp_path / "step-0000099").mkdir()
    (tmp_path / "step-0000099/__0_0.distcp").write_bytes(b"torn")
    result = good(run(PYTHON, "train_DCP.py", *SAME, "--resume", "auto", "--output-dir", tmp_path, env=FLOAT64))
    assert f"resume {tmp_path}/step-0000028: epoch 2 is done" in result.out
    good(run(PYTHON, "-m", "common.folders", tmp_path / "step-0000042", tmp_path / "last.pt"))
    assert distance(tmp_path / "last.pt", folder / "last.pt") < 1e-11


def test_a_folder_that_could_execute_code_is_rejected(runs, tmp_path):
    """Its .metadata is a pickle, which torch would load."""
    bad = shutil.copytree(runs("train_DCP.py")[0] / "step-0000028", tmp_path / "step-0000028")
    marker = tmp_path / "executed"
    (bad / ".metadata").write_bytes(pickle.dumps(Executed(str(marker))))
    result = run(PYTHON, "train_DCP.py", "--resume", bad, "--output-dir", tmp_path)
    assert result.code == 2 and not marker.exists()
    line, = ours(result.err.splitlines())
    assert re.fullmatch(rf"train_DCP.py: error: --resume {bad}: rejected: its .metadata is no list of tensors alone "
                        r"\((io|builtins)\.open\)", line)


class Executed:
    """An object whose unpickling creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(("script", "arguments", "message"), [
    ("train_PP.py", ["--model", "resnet18"], "--model: a pipeline needs a chain of layers: cnn, vit"),
    *(pytest.param(*case, marks=pytest.mark.drill) for case in [
        ("train_FSDP.py", ["--replicas", "3"], "--replicas 3: does not divide the 2 processes"),
        ("train_TP.py", ["--model", "resnet18"], "--model: its layers are in no tensor plan; "),
        ("train_PP.py", ["--micro-batches", "5"], "--batch-size 64: not a multiple of the 5 micro-batches"),
        ("train_PP.py", ["--micro-batches", "1"], "--micro-batches 1: fewer than the 2 pipeline stages"),
        ("train_PP.py", ["--chunks", "4"], "8 pipeline stages: the model has only 6 layers with parameters; ")])])
def test_what_cannot_be_split_is_named(tmp_path, script, arguments, message):
    result = run(*TORCHRUN, "--nproc-per-node=2", script, *arguments, "--output-dir", tmp_path)
    line, = ours(result.err.splitlines())
    assert line.startswith(f"{script}: error: {message}"), result.err
    assert f"{script}\", line" not in result.err
