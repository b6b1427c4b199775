"""What a CPU cannot show: DataParallel, SyncBatchNorm, nccl, shards, fp16. Two gloo processes may share one GPU.

    python -m pytest -m "gpu or not gpu" tests/test_gpu.py        # has not run on a GPU yet
"""
import re

import pytest
import torch
from conftest import LAUNCH, PYTHON, TORCHRUN, distance, epochs, good, load, run, same, whole_file

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU (CUDA)")]
SAME = ["--epochs", "2", "--batch-size", "96", "--lr", "0.0003", "--seed", "3", "--save-every", "1"]
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}  # convolutions in TF32 differ in the fourth digit between two sizes of batch
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
TWO = [*TORCHRUN, "--nproc-per-node=2", "train_DDP.py", "--backend", "gloo"]


def test_data_parallel_trains_the_baselines_model(tmp_path):
    good(run(PYTHON, "train.py", *SAME, "--output-dir", tmp_path / "one", env=EXACT))
    result = good(run(PYTHON, "train_DP.py", *SAME, "--output-dir", tmp_path / "all", env=EXACT))
    assert f"over {torch.cuda.device_count()} device(s)" in result.out and "MiB" in result.out
    assert distance(tmp_path / "one/last.pt", tmp_path / "all/last.pt") < 1e-5


def test_two_processes_on_one_gpu_train_the_baselines_model(tmp_path):
    good(run(PYTHON, "train.py", *SAME, "--output-dir", tmp_path / "one", env=EXACT))
    good(run(*TWO, *SAME, "--output-dir", tmp_path / "two", env=EXACT))
    assert distance(tmp_path / "one/last.pt", tmp_path / "two/last.pt") < 1e-5


@pytest.mark.parametrize(("script", "options"), [
    ("train_FSDP.py", []), ("train_FSDP.py", ["--activation-checkpointing", "--reshard-after-forward", "no"]),
    ("train_TP.py", []), ("train_PP.py", []), ("train_DCP.py", [])])
def test_a_sharded_script_trains_the_baselines_model(tmp_path, script, options):
    """Over nccl, on two GPUs if there are as many; one GPU shows that meta tensors, gathering and saving work."""
    vit = ["--model", "vit", *SAME, "--output-dir"]
    processes = min(2, torch.cuda.device_count())
    good(run(PYTHON, "train.py", *vit, tmp_path / "one", env=EXACT))
    good(run(*TORCHRUN, f"--nproc-per-node={processes}", script, *options, *vit, tmp_path / "all", env=EXACT))
    if script == "train_DCP.py":
        whole_file(max((tmp_path / "all").glob("step-*")), tmp_path / "all/last.pt")
    assert distance(tmp_path / "one/last.pt", tmp_path / "all/last.pt") < 1e-5


def test_a_sharded_model_learns_in_bf16_and_takes_less_memory(tmp_path):
    """The more of the memory is the model, the nearer to half: needs two GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    peaks = []
    for script, options in (("train_DDP.py", []), ("train_FSDP.py", ["--bf16"])):
        result = good(run(*TORCHRUN, "--nproc-per-node=2", script, *options, "--model", "vit_base", "--epochs", "2",
                          "--lr", "0.01", "--output-dir", tmp_path / script))
        assert epochs(result.out)[-1]["loss"] < epochs(result.out)[0]["loss"]
        peaks.append(int(re.findall(r"([\d,]+) MiB", result.out)[-1].replace(",", "")))
    assert peaks[1] < 0.7 * peaks[0]


def test_readmes_first_command_works_on_one_gpu(tmp_path):
    """Two processes share it: NCCL refuses that, so gloo connects them, and one line says so."""
    result = good(run(*LAUNCH, "--nproc_per_node=2", "train_DDP.py", "--output-dir", tmp_path, env=ONE_GPU))
    assert result.out.count("using gloo on cuda:0") == 1
    assert epochs(result.out)[-1]["accuracy"] > 0.97


def test_nccls_own_error_is_shown_whole(tmp_path):
    result = run(*LAUNCH, "--nproc_per_node=2", "train_DDP.py", "--backend", "nccl", "--output-dir", tmp_path,
                 env=ONE_GPU)
    assert result.code == 1 and "Traceback" in result.err
    assert "Duplicate GPU detected" in result.err or "Multiple Ranks are using the same GPU" in result.err


@pytest.mark.parametrize("launcher", [[PYTHON], [*TORCHRUN, "--nproc-per-node=1"]])
@pytest.mark.parametrize("script", ["train.py", "train_DDP.py"])
def test_with_deterministic_a_resumed_run_is_bit_equal(photos, tmp_path, launcher, script):
    if script == "train.py" and launcher != [PYTHON]:
        pytest.skip("train.py has no launcher")
    for number, data in enumerate([["--dataset", "digits"],
                                   ["--dataset", "folder", "--data-path", photos, "--model", "resnet18"]]):
        whole, again = (tmp_path / f"{name}{number}" for name in ("whole", "again"))
        command = [*launcher, script, *data, "--batch-size", "12", "--epochs", "2", "--save-every", "1",
                   "--deterministic", "--output-dir"]
        good(run(*command, whole))
        good(run(*command, again, "--resume", whole / "epoch-001.pt"))
        assert same(load(whole / "last.pt"), load(again / "last.pt"))


def test_a_device_that_is_named_is_used(tmp_path):
    """On a machine with a GPU: the CPU in train_DP.py, the named device under one process, not under two."""
    command = ["--epochs", "1", "--output-dir", tmp_path]
    assert good(run(PYTHON, "train_DP.py", "--device", "cpu", *command)).out.startswith("cpu: ")
    said = good(run(PYTHON, "train_DP.py", "--device", "cuda:0", *command)).out
    assert said.startswith("cuda:0: ") and "over 1 device(s)" in said
    last = f"cuda:{torch.cuda.device_count() - 1}"
    assert good(run(PYTHON, "train_DDP.py", "--device", last, *command)).out.startswith(f"{last}: ")
    refused = run(*TORCHRUN, "--nproc-per-node=2", "train_DDP.py", "--device", last, *command)
    assert f"--device {last}: the 2 processes on this host need one device each" in refused.err


def test_nothing_opens_a_context_twice_or_warns_of_a_barrier(tmp_path):
    """`device_id` tells NCCL the device before the first collective, so a barrier need not guess it."""
    result = good(run(*TORCHRUN, "--nproc-per-node=1", "train_elastic.py", "--epochs", "1", "--snapshot-every", "5",
                      "--output-dir", tmp_path))
    assert "barrier" not in result.err and "using GPU" not in result.err


def test_a_failure_ends_the_job_at_once_under_nccl(photos, tmp_path):
    """ncclCommDestroy would wait for the other process: needs two GPUs."""
    import shutil

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for split in ("train", "val"):
        shutil.copytree(photos, tmp_path / "data" / split)
    (tmp_path / "data/train/ash/03.jpg").write_bytes(b"")
    result = run(*TORCHRUN, "--nproc-per-node=2", "train_DDP.py", "--dataset", "folder", "--data-path",
                 tmp_path / "data", "--batch-size", "4", "--epochs", "1", "--output-dir", tmp_path, seconds=90)
    assert result.code == 1 and "03.jpg: cannot be read" in result.err


def test_nccl_is_the_default_and_trains(tmp_path):
    devices = torch.cuda.device_count()
    result = good(run(*LAUNCH, f"--nproc_per_node={devices}", "train_DDP.py", "--batch-size", 16 * devices,
                      "--epochs", "4", "--output-dir", tmp_path))
    assert result.out.startswith("cuda:0: ") and epochs(result.out)[-1]["accuracy"] > 0.9
    assert "ProcessGroupNCCL" not in result.err  # which complains of a group that was not destroyed


def test_sync_batchnorm_sees_the_whole_batch(photos, tmp_path):
    """With it, two processes train a network with BatchNorm as one process does; without it they do not."""
    resnet = ["--dataset", "folder", "--data-path", photos, "--model", "resnet18", "--batch-size", "12",
              "--epochs", "1", "--lr", "0.001"]
    good(run(PYTHON, "train.py", *resnet, "--output-dir", tmp_path / "one", env=EXACT))
    good(run(*TWO, *resnet, "--sync-bn", "--output-dir", tmp_path / "sync", env=EXACT))
    good(run(*TWO, *resnet, "--output-dir", tmp_path / "apart", env=EXACT))
    synced, apart = (distance(tmp_path / "one/last.pt", tmp_path / name / "last.pt") for name in ("sync", "apart"))
    assert synced < 1e-3 < apart


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_and_resumes(tmp_path, precision):
    command = [PYTHON, "train_amp.py", "--precision", precision, "--clip-norm", "1", "--epochs", "4",
               "--save-every", "2"]
    whole = good(run(*command, "--output-dir", tmp_path / "whole"))
    good(run(*command, "--resume", tmp_path / "whole/epoch-002.pt", "--output-dir", tmp_path / "again"))
    assert epochs(whole.out)[-1]["accuracy"] > 0.9
    assert same(load(tmp_path / "whole/last.pt")["scaler"], load(tmp_path / "again/last.pt")["scaler"])


def test_the_combined_script_learns_resumes_and_traces_the_gpu(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node=1", "train_combined.py", *SAME, "--lr", "0.05", "--precision", "fp16",
               "--deterministic", "--ema", "0.9", "--warm-up", "5", "--compile", "--output-dir"]
    whole = good(run(*command, tmp_path / "whole", "--profile"))
    good(run(*command, tmp_path / "again", "--resume", tmp_path / "whole/epoch-001.pt"))
    assert epochs(whole.out)[-1]["accuracy"] > 0.8
    assert same(load(tmp_path / "whole/last.pt"), load(tmp_path / "again/last.pt"))
    assert "kernel" in (tmp_path / "whole/trace-0.json").read_text() and (tmp_path / "whole/memory-0.pickle").exists()


def test_out_of_memory_is_one_line(tmp_path):
    result = run(PYTHON, "train.py", "--dataset", "fake", "--model", "resnet50", "--batch-size", "50000",
                 "--output-dir", tmp_path)
    assert result.code == 1 and len(result.err.splitlines()) == 1
    assert "out of memory" in result.err and "train_grad_accum.py" in result.err


@pytest.mark.parametrize("options", [["--multi-scale"], ["--model", "tiny-bn", "--sync-bn"]])
def test_two_processes_train_the_detector_of_one(tmp_path, options):
    same_run = [*options, "--epochs", "1", "--lr", "0.0003", "--backend", "gloo", "--output-dir"]
    for processes in "12":
        good(run(*TORCHRUN, f"--nproc-per-node={processes}", "train_yolov3_DDP.py", *same_run, tmp_path / processes,
                 env=EXACT))
    assert distance(tmp_path / "1/last.pt", tmp_path / "2/last.pt") < 1e-4


@pytest.mark.parametrize("options", [["train_yolov3.py", "--deterministic", "--multi-scale"],
                                     ["train_yolov3_amp.py", "--precision", "fp16", "--clip-norm", "10"]])
def test_the_detector_trains(tmp_path, options):
    good(run(PYTHON, *options, "--epochs", "1", "--output-dir", tmp_path))
