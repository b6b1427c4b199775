"""What a CPU cannot show: DataParallel, SyncBatchNorm, nccl, fp16 at speed. Two gloo processes may share one GPU."""
import pytest
import torch
from conftest import LAUNCH, PYTHON, TORCHRUN, distance, epochs, good, load, run, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU (CUDA)")]
SAME = ["--epochs", "2", "--batch-size", "96", "--lr", "0.0003", "--seed", "3", "--save-every", "1"]
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}  # convolutions in TF32 differ in the fourth digit between two sizes of batch
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


def test_nccl_is_the_default_and_trains(tmp_path):
    devices = torch.cuda.device_count()
    result = good(run(*LAUNCH, f"--nproc_per_node={devices}", "train_DDP.py", "--batch-size", 16 * devices,
                      "--epochs", "4", "--output-dir", tmp_path))
    assert result.out.startswith("cuda:0: ") and epochs(result.out)[-1]["accuracy"] > 0.9
    assert "ProcessGroupNCCL" not in result.err  # which complains of a group that was not destroyed


def test_sync_batchnorm_sees_the_whole_batch(photos, tmp_path):
    """With it, two processes train a network with BatchNorm as one process does; without it they do not."""
    resnet = ["--dataset", "folder", "--data-path", photos, "--model", "resnet18", "--batch-size", "24",
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


def test_out_of_memory_is_one_line(tmp_path):
    result = run(PYTHON, "train.py", "--dataset", "fake", "--model", "resnet50", "--batch-size", "50000",
                 "--output-dir", tmp_path)
    assert result.code == 1 and len(result.err.splitlines()) == 1
    assert "out of memory" in result.err and "train_grad_accum.py" in result.err
