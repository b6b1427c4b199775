"""Sharded models on different numbers of processes: equal weights, exchangeable files, and compiled blocks."""
import json
import re
import shutil

import pytest
import torch
from conftest import FLOAT64, FROM_ROOT, PROGRAMS, PYTHON, SAME, TORCHRUN, distance, epochs, good, load, run
from torch.torch_version import TorchVersion

# few steps: on 2 cores, four processes take seconds for each
VIT = ["--model", "vit", *SAME, "--epochs", "2", "--batch-size", "120", "--save-every", "0"]
CLIP = ["--clip-norm", "0.5"]


@pytest.fixture(scope="module")
def references(once, scripts):
    """Return a function from whether it clips to the checkpoint of one process."""
    def get(clips):
        start = ["train_FSDP.py", *CLIP] if clips else ["train.py"]
        return once(f"layout of one {clips}", lambda folder: run(PYTHON, *start, *VIT, "--output-dir", folder,
                                                                 cwd=scripts, env=FLOAT64))[0] / "last.pt"

    return get


@pytest.mark.nightly
def test_the_reference_did_clip(references):
    assert distance(references(False), references(True)) > 1e-3


LAYOUTS = {
    "FSDP on 3": (3, "train_FSDP.py"), "two replicas": (4, "train_FSDP.py", "--replicas", "2",
                                                        "--reshard-after-forward", "no", *CLIP),
    "TP on 2": (2, "train_TP.py"), "TP on 4": (4, "train_TP.py", "--tensor-parallel", "4"),
    "TP on 2 x 2": (4, "train_TP.py", *CLIP), "PP on 1": (1, "train_PP.py"),
    "interleaved": (3, "train_PP.py", "--chunks", "2", *CLIP)}


@pytest.mark.parametrize("name", [
    "two replicas", *(pytest.param(name, marks=pytest.mark.nightly) for name in (
        "interleaved", "FSDP on 3", "TP on 2", "PP on 1", "TP on 2 x 2", "TP on 4"))])
def test_a_layout_trains_the_baselines_model(references, scripts, tmp_path, name):
    processes, script, *options = LAYOUTS[name]
    good(run(*TORCHRUN, f"--nproc-per-node={processes}", script, *options, *VIT, "--output-dir", tmp_path, cwd=scripts,
             env=FLOAT64))
    reference, variant = load(references("--clip-norm" in options)), load(tmp_path / "last.pt")
    assert distance(references("--clip-norm" in options), tmp_path / "last.pt") < 1e-11
    for number, values in reference["optimizer"]["state"].items():
        other = variant["optimizer"]["state"][number]["momentum_buffer"]
        assert (values["momentum_buffer"] - other).abs().max() < 1e-11
    assert reference["score"] == pytest.approx(variant["score"], abs=1e-12)


@pytest.mark.nightly
def test_a_validation_set_smaller_than_the_processes_is_measured_exactly(photos, tmp_path):
    """With two images on three processes, one process has none but takes part in every forward pass."""
    shutil.copytree(photos, tmp_path / "data", ignore=shutil.ignore_patterns("beech"))
    arguments = ["--dataset", "folder", "--data-path", tmp_path / "data", "--model", "vit", "--epochs", "1",
                 "--batch-size", "6", "--workers", "0"]
    found = []
    for number, start in enumerate([[PYTHON, "train.py"], [*TORCHRUN, "--nproc-per-node=3", "train_FSDP.py"]]):
        found += epochs(good(run(*start, *arguments, "--output-dir", tmp_path / str(number), env=FLOAT64)).out)
    assert found[0] == found[1]


@pytest.mark.nightly
def test_fsdp_is_ddp_in_float32_too(tmp_path):
    """On some processors the bits are equal; on one with AVX2 only, matrices in other memory round differently."""
    for script in ("train_DDP.py", "train_FSDP.py"):
        good(run(*TORCHRUN, "--nproc-per-node=2", script, "--model", "vit", *SAME, "--epochs", "1", "--save-every", "0",
                 "--output-dir", tmp_path / script))
    assert distance(tmp_path / "train_DDP.py/last.pt", tmp_path / "train_FSDP.py/last.pt") < 1e-6


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
                          "--epochs", "1", "--save-every", "0", "--output-dir", tmp_path / str(len(options))))
        found.append(epochs(result.out)[-1])
    assert 1e-6 < distance(tmp_path / "0/last.pt", tmp_path / "1/last.pt") < 0.05
    assert found[0]["val_loss"] == pytest.approx(found[1]["val_loss"], rel=0.05)
    assert {part.dtype for part in load(tmp_path / "1/last.pt")["model"].values()} == {
        part.dtype for part in load(tmp_path / "0/last.pt")["model"].values()}


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["train_FSDP.py --model vit", "language/train_TP.py --windows 128 --sample="])
def test_gradients_in_bf16_are_summed_in_float32(tmp_path, script):
    """Up to torch 2.14, those of norms under TP are not (github.com/pytorch/pytorch/issues/190626)."""
    result = good(run(*TORCHRUN, "--nproc-per-node=2", PROGRAMS / "around.py", "sums", tmp_path, *script.split(),
                      "--bf16", "--epochs", "1", "--batch-size", "64", "--workers", "0", "--output-dir", tmp_path))
    found = json.loads(re.search("^sums (.+)", result.out, re.M)[1])
    fixed = TorchVersion(torch.__version__) >= "2.15"
    assert found == ({"c10d::_reduce_scatter_base_": ["float"]} if "FSDP" in script else
                     {"_c10d_functional::all_reduce": [*["c10::BFloat16"] * (not fixed), "float"]})


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["train_FSDP.py", "train_TP.py", "train_combined.py --precision fp32"])
def test_compiled_blocks_train_the_same_model(tmp_path, script):
    """Equal blocks share their graphs. Compiled code sums in a different order, so the weights differ slightly."""
    for options in ([], ["--compile"]):
        result = good(run(*TORCHRUN, "--nproc-per-node=2", *script.split(), *options, "--model", "vit", *SAME,
                          "--epochs", "1", "--save-every", "0", "--output-dir", tmp_path / str(len(options))))
        assert "recompile_limit" not in result.err
    assert 0 < distance(tmp_path / "0/last.pt", tmp_path / "1/last.pt") < 1e-4
