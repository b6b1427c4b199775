"""A model of which each process holds a part; test_training.py compares weights and files."""
import pytest
from conftest import SAME, TORCHRUN, good, load, run, same
from live import ours


def test_fsdp_is_ddp_bit_for_bit_in_float32(tmp_path):
    """With a vision transformer and its layout; train_DDP.py's channels-last changes only convolutions' rounding."""
    for script in ("train_DDP.py", "train_FSDP.py"):
        good(run(*TORCHRUN, "--nproc-per-node=2", script, "--model", "vit", *SAME, "--epochs", "1", "--save-every", "0",
                 "--output-dir", tmp_path / script))
    left, right = (load(tmp_path / script / "last.pt") for script in ("train_DDP.py", "train_FSDP.py"))
    assert same({**left, "model": dict(left["model"])}, right)


@pytest.mark.parametrize(("script", "arguments", "message"), [
    ("train_PP.py", ["--model", "resnet18"], "--model: a pipeline needs a chain of layers: cnn, vit"),
    ("train_FSDP.py", ["--replicas", "3"], "--replicas 3: does not divide the 2 processes"),
    ("train_TP.py", ["--model", "resnet18"], "--model: its layers are in no tensor plan; ")])
def test_what_cannot_be_split_is_named(tmp_path, script, arguments, message):
    result = run(*TORCHRUN, "--nproc-per-node=2", script, *arguments, "--output-dir", tmp_path)
    line, = ours(result.err.splitlines())
    assert line.startswith(f"{script}: error: {message}"), result.err
    assert f"{script}\", line" not in result.err
