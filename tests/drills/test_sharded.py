"""Models that are split over the processes; test_training.py compares weights and files."""
import json
import re

import pytest
from conftest import FROM_ROOT, PROGRAMS, SAME, TORCHRUN, distance, epochs, good, load, run, same
from live import ours


def test_fsdp_is_ddp_bit_for_bit_in_float32(tmp_path):
    """This needs a vision transformer: for convolutions, train_DDP.py's channels-last layout changes the rounding."""
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


def test_copies_in_a_tensor_group_become_equal_and_parts_stay_as_they_are():
    """Norms, some biases, patches and classifier become equal; each process keeps its own columns and rows."""
    result = good(run(*TORCHRUN, "--nproc-per-node=2", PROGRAMS / "copies.py", env=FROM_ROOT))
    split = re.compile(r"attention\.(query|key|value)\.|mlp\.0\.|(project|mlp\.2)\.weight")
    found = json.loads(result.out)
    assert found == {name: [not (name.startswith("blocks") and split.search(name))] * 2 for name in found}
    assert {*map(tuple, found.values())} == {(True, True), (False, False)}


@pytest.mark.nightly
def test_a_pipeline_in_bf16_learns_as_in_float32(tmp_path):
    found = []
    for options in ([], ["--bf16"]):
        result = good(run(*TORCHRUN, "--nproc-per-node=2", "train_PP.py", *options, "--model", "vit", *SAME,
                          "--save-every", "0", "--output-dir", tmp_path / str(len(options))))
        found.append(epochs(result.out)[-1])
    assert 1e-6 < distance(tmp_path / "0/last.pt", tmp_path / "1/last.pt") < 0.05
    assert found[0]["val_loss"] == pytest.approx(found[1]["val_loss"], rel=0.05)
    assert {part.dtype for part in load(tmp_path / "1/last.pt")["model"].values()} == {
        part.dtype for part in load(tmp_path / "0/last.pt")["model"].values()}


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["train_FSDP.py", "train_TP.py"])
def test_compiled_blocks_train_the_same_model(tmp_path, script):
    """Equal blocks share their graphs. Compiled code sums in a different order, so the weights differ slightly."""
    for options in ([], ["--compile"]):
        result = good(run(*TORCHRUN, "--nproc-per-node=2", script, *options, "--model", "vit", *SAME, "--epochs", "1",
                          "--save-every", "0", "--output-dir", tmp_path / str(len(options))))
        assert "recompile_limit" not in result.err
    assert distance(tmp_path / "0/last.pt", tmp_path / "1/last.pt") < 1e-4
