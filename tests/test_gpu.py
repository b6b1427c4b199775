"""What only GPUs show. Each test is a row of the report: it runs on GPUs or is listed as not run, with the reason.

    python -m pytest -m gpu                              # on the GPUs of this machine
    python -m pytest -m nightly tests/test_gpu.py        # the same rows on CPU processes, where these can show them

The rows for one GPU ran on an H100 (docs/gpus/1x-h100.md); those for several GPUs or hosts have not run on GPUs yet.
Two hosts: start it inside `salloc --nodes=2 --gpus-per-node=1`.
"""
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import markers
import pytest
import torch
from conftest import (
    LAUNCH,
    PROGRAMS,
    PYTHON,
    ROOT,
    TORCHRUN,
    distance,
    epochs,
    good,
    load,
    run,
    same,
    unexplained,
    whole_file,
)
from live import Live, ours

GPUS = torch.cuda.device_count()
SAME = ["--epochs", "2", "--batch-size", "96", "--lr", "0.0003", "--seed", "3", "--save-every", "1"]
VIT = ["--model", "vit", *SAME]
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}  # TF32 differs in the fourth digit between two sizes of batch
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
SHARDED = ["train_FSDP.py", "train_TP.py", "train_PP.py", "train_DCP.py"]

# What torch may say in a good run; every other warning of torch, of its C++ or of our own files fails the row
WARNING = re.compile(r"Warning: |^(\[rank\d+\]:)?\[?[WE]\d{4} |Traceback \(most")
EXPLAINED = {
    r"(site|dist)-packages/(?!torch/)\S+:\d+: \w+Warning: ": "another package's own: each version of it differs",
    r"/lib/python3\.\d+/(?!(site|dist)-packages)\S+:\d+: \w+Warning: ": "Python's own: each version differs",
    r"torch/distributed/run\.py:\d+\] ": "torchrun says that it sets OMP_NUM_THREADS to 1",
    r"launch\.py:\d+: FutureWarning: The module torch.distributed.launch is deprecated": "README names this launcher",
    r"No CUDA runtime is found, using CUDA_HOME": "a CPU, on a machine with CUDA's compiler",
    r"Not enough SMs to use max_autotune": "a small GPU, such as a T4; nothing here asks for that mode",
    r"find_unused_parameters=True was specified": "--deterministic sets it, to keep DDP's buckets",
    r"Synchronization debug mode is a prototype feature": "around.py calls set_sync_debug_mode() in a `no_waiting` row",
    r"Profiler clears events at the end of each cycle": "torch 2.11 and 2.12, even before the first cycle",
}


def rows(names="place", gpus=1, cpu=True, needs="", cases=((),)):
    """Parametrize a test: `place`, on GPUs or nightly on as many CPU processes, and the arguments of each case.

    `gpus` is how many the test needs, or None if each case begins with its own number. `needs` is what else is missing.
    """
    found = []
    for case in cases:
        number = gpus or case[0]
        lacks = needs or f"needs {number} GPU{'s' * (number > 1)}; this machine has {GPUS}"
        marks = {"gpu": [pytest.mark.gpu, pytest.mark.skipif(bool(needs) or number > GPUS, reason=lacks)]}
        marks |= {"cpu": [pytest.mark.nightly]} if cpu and number <= 4 else {}
        for place, of_place in marks.items():
            words = [str(word) for value in case for word in (value if isinstance(value, list) else [value])]
            found.append(pytest.param(place, *case, marks=of_place, id=" ".join([place, *words])))
    return pytest.mark.parametrize(names, found)


def command(place, script, *options, processes=0, program=()):
    """Return the command that starts a script on the devices of `place`: by torchrun, or for 0 processes by itself."""
    start = [*TORCHRUN, f"--nproc-per-node={processes}"] if processes else [PYTHON]
    words = markers.words(ROOT / script)
    return [*start, *program, *words, *options, *(["--device", "cpu"] if place == "cpu" else [])]


def quiet(result):
    """Return the result of a run that must have succeeded, with no warning except those that EXPLAINED lists."""
    noise = unexplained(good(result).err, WARNING, EXPLAINED)
    assert not noise, "\n".join(noise)
    return result


def train(*where, env=EXACT, **how):
    return quiet(run(*command(*where, **how), env=env, seconds=600))


@pytest.fixture
def trained(once):
    """Return a function that does each run of train() once for all tests, and returns its folder."""
    def get(*where, processes=0):
        def make(folder):
            result = train(*where, "--output-dir", folder, processes=processes)
            if steps := [*folder.glob("step-*")]:  # train_DCP.py's
                whole_file(max(steps), folder / "last.pt")
            return result

        return once(re.sub(r"\W+", "-", " ".join(map(str, [*where, processes]))), make)[0]

    return get


def gap(left, right):
    """Return the greatest difference between any two weights, or two momentum buffers, of two checkpoints."""
    momenta = [{number: each["momentum_buffer"] for number, each in load(path)["optimizer"]["state"].items()}
               for path in (left, right)]
    assert momenta[0].keys() == momenta[1].keys() and momenta[0]
    apart = [(momenta[0][number] - momenta[1][number]).abs().max().item() for number in momenta[0]]
    return max(distance(left, right), *apart)


@pytest.fixture
def near(record_property):
    """Return a function that asserts a difference to be below a limit, and notes it for the report."""
    def check(difference, limit):
        record_property("said", f"{difference:.1e} apart")
        assert difference < limit

    return check


# One device

KINDS = {"CUDA": bool(torch.version.cuda) and GPUS > 0, "ROCm": bool(torch.version.hip) and GPUS > 0,
         "XPU": torch.xpu.is_available(), "MPS": torch.backends.mps.is_available(), "Windows": sys.platform == "win32"}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.skipif(not here, reason=f"needs {kind}"))
                                  for kind, here in KINDS.items()])
def test_this_kind_of_device_trains_what_a_cpu_trains(near, trained, kind):
    """With the default device; on Windows, two processes may choose any device."""
    script, processes = ("train_DDP.py", 2) if kind == "Windows" else ("train.py", 0)
    near(distance(trained("cpu", "train.py", *SAME) / "last.pt",
                  trained("gpu", script, *SAME, processes=processes) / "last.pt"), 1e-4)


@rows()
def test_data_parallel_trains_the_baselines_model(near, trained, tmp_path, place):
    result = train(place, "train_DP.py", *SAME, "--output-dir", tmp_path)
    assert place == "cpu" or f"over {GPUS} device(s)" in result.out and "MiB" in result.out
    near(distance(trained(place, "train.py", *SAME) / "last.pt", tmp_path / "last.pt"), 1e-5)


@rows()
def test_two_gloo_processes_on_one_device_train_1000_steps_as_one(near, trained, tmp_path, place):
    steps = [*SAME, "--epochs", "17", "--batch-size", "24", "--save-every", "0"]
    two = command(place, "train_DDP.py", *steps, "--backend", "gloo", "--output-dir", tmp_path, processes=2)
    quiet(run(*two, env=EXACT | ONE_GPU))
    near(distance(trained(place, "train.py", *steps) / "last.pt", tmp_path / "last.pt"), 1e-3)  # rounding: 2e-5


@rows("place, script", cases=[(script,) for script in SHARDED], cpu=False)
def test_two_processes_do_not_shard_a_model_on_one_gpu(tmp_path, place, script):
    """gloo cannot send their messages from a GPU, and NCCL rejects the second process."""
    result = run(*command(place, script, "--model", "vit", "--output-dir", tmp_path, processes=2), env=ONE_GPU)
    assert result.code == 1 and len(ours(result.err.splitlines())) == 1, result.err
    assert f'{script}", line' not in result.err


@rows()
def test_readmes_first_command_works_on_one_device(tmp_path, place):
    """NCCL refuses two processes on one GPU, so gloo connects them, and one line says so."""
    result = run(*LAUNCH, "--nproc_per_node=2", "train_DDP.py", "--output-dir", tmp_path, env=ONE_GPU)
    assert quiet(result).out.count("using gloo on cuda:0") == (place == "gpu")
    assert epochs(result.out)[-1]["accuracy"] >= 0.97


@rows("place, script, processes, options", cases=[
    ("train.py", 0, []), ("train_amp.py", 1, []), ("train_FSDP.py", 1, []), ("train_combined.py", 1, ["--ema", "0.9"]),
    ("language/train_combined.py", 1, ["--ema", "0.9", "--clip-norm", "1", "--sample", ""])])
def test_a_step_between_two_looks_at_the_loss_does_not_wait_for_the_device(tmp_path, place, script, processes, options):
    program = [PROGRAMS / "around.py", "no_waiting"]
    result = train(place, script, *options, "--epochs", "1", "--output-dir", tmp_path, processes=processes,
                   program=program)
    assert "steps 4 to 8 are done" in result.out


@rows("place, script, processes, options", cases=[
    ("train.py", 0, ["--dataset", "folder", "--model", "resnet18", "--batch-size", "12"]), ("train_DDP.py", 1, [])])
def test_with_deterministic_a_resumed_run_is_bit_equal(photos, tmp_path, place, script, processes, options):
    again = [*options, "--data-path", photos, "--epochs", "2", "--save-every", "1", "--deterministic"]
    train(place, script, *again, "--output-dir", tmp_path / "whole", processes=processes)
    train(place, script, *again, "--resume", tmp_path / "whole/epoch-001.pt", "--output-dir", tmp_path / "again",
          processes=processes)
    assert same(load(tmp_path / "whole/last.pt"), load(tmp_path / "again/last.pt"))


@rows("place, precision", cases=[("bf16",), ("fp16",)])
def test_mixed_precision_learns_and_resumes(tmp_path, place, precision):
    options = ["--precision", precision, "--clip-norm", "1", "--epochs", "4", "--save-every", "2"]
    whole = train(place, "train_amp.py", *options, "--output-dir", tmp_path / "whole")
    assert epochs(whole.out)[-1]["accuracy"] > 0.9
    if precision == "fp16":
        train(place, "train_amp.py", *options, "--resume", tmp_path / "whole/epoch-002.pt", "--output-dir",
              tmp_path / "again")
        assert same(*(load(tmp_path / name / "last.pt")["scaler"] for name in ("whole", "again")))


@rows()
def test_the_combined_script_learns_resumes_and_traces_the_device(tmp_path, place):
    options = ["--epochs", "4", "--batch-size", "96", "--save-every", "2", "--precision", "fp16", "--deterministic",
               "--ema", "0.9", "--warmup-steps", "5"]
    whole = train(place, "train_combined.py", *options, "--output-dir", tmp_path / "whole", "--profile", processes=1)
    train(place, "train_combined.py", *options, "--output-dir", tmp_path / "again", "--resume",
          tmp_path / "whole/epoch-002.pt", processes=1)
    assert epochs(whole.out)[-1]["accuracy"] > 0.8
    assert same(load(tmp_path / "whole/last.pt"), load(tmp_path / "again/last.pt"))
    assert place == "cpu" or "kernel" in (tmp_path / "whole/trace-0.json").read_text()


@rows()
def test_compiling_a_resnet_meets_no_recompile_limit(photos, tmp_path, place):
    """Training and evaluation on 12 and 3 photos, twice: Dynamo would say at its limit that blocks run eagerly."""
    result = train(place, "train_combined.py", "--dataset", "folder", "--data-path", photos, "--model", "resnet18",
                   "--precision", "fp32", "--accum-steps", "1", "--batch-size", "6", "--epochs", "2", "--compile",
                   "--output-dir", tmp_path)
    assert len(epochs(result.out)) == 2 and "recompile_limit" not in result.err


@rows("place, name", cases=[("loader",), ("loader_streaming",), ("loader_DALI",)])
def test_a_loader_delivers_the_same_pairs(trained, tmp_path, place, name):
    """The first pairs equal those of loader.py on the CPU, whether the CPU or the device decodes them."""
    from torchvision.io import read_image

    if name == "loader_DALI" and not importlib.util.find_spec("nvidia.dali"):
        pytest.skip("needs DALI: pip install -r requirements/dali.txt")
    pictures = []
    for script, where in (("loader.py", "cpu"), (f"{name}.py", place)):
        picture = tmp_path / f"{script}.png"
        result = quiet(run(*command(where, script, "--epochs", "1", "--preview", picture)))
        assert len(epochs(result.out)) == 1
        pictures.append(read_image(str(picture)).float())
    if name != "loader_streaming":  # it shuffles in its own way
        assert (pictures[0] - pictures[1]).abs().mean() < 2


@rows()
def test_verify_finds_the_same_model(tmp_path, place):
    one, two = (" ".join(map(str, command(place, script, "--batch-size", "96", "--output-dir", tmp_path / script,
                                          processes=processes)))
                for script, processes in (("train.py", 0), ("train_DDP.py", min(2, GPUS) if place == "gpu" else 2)))
    result = quiet(run(PYTHON, "-m", "verify", "--steps", "5", one, two, seconds=600))
    assert "same: 5 steps, greatest relative difference" in result.out


@rows(cpu=False)
def test_memory_stays_flat_over_20_epochs(tmp_path, place):
    """The peak stops growing after the first evaluation."""
    result = train(place, "train_DDP.py", "--epochs", "20", "--output-dir", tmp_path)
    peaks = re.findall(r"([\d,]+) MiB$", result.out, re.M)
    assert len(peaks) == 20 and len(set(peaks[1:])) == 1, peaks


@rows(cpu=False)
def test_out_of_memory_is_one_line(tmp_path, place):
    """Another process allocates all but 1 GiB of the GPU."""
    hold = ("import sys, torch; held = torch.empty(torch.cuda.mem_get_info(0)[0] - 2**30, dtype=torch.uint8, "
            "device='cuda:0'); print('held', flush=True); sys.stdin.read()")
    with subprocess.Popen([PYTHON, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        result = run(*command(place, "train.py", "--dataset", "fake", "--model", "resnet50", "--batch-size", "2048",
                              "--output-dir", tmp_path))
        holder.stdin.close()
    assert result.code == 1 and len(result.err.splitlines()) == 1, result.err
    assert "out of memory" in result.err and "train_grad_accum.py" in result.err


@rows("place, options", cases=[(["detection/train.py", "--deterministic", "--multi-scale"],),
                               (["detection/train_amp.py", "--precision", "fp16", "--clip-norm", "10"],)])
def test_the_detector_trains(tmp_path, place, options):
    assert len(epochs(train(place, *options, "--epochs", "1", "--output-dir", tmp_path).out)) == 1


# Several devices

@rows("place, gpus, script, options", None, cases=[
    (1, "train_FSDP.py", []),  # NCCL's mean over a group of one rank
    (2, "train_DDP.py", []), (2, "train_FSDP.py", []), (2, "train_TP.py", []), (2, "train_PP.py", []),
    (2, "train_FSDP.py", ["--activation-checkpointing", "--reshard-after-forward", "no"]),
    (2, "train_FSDP.py", ["--replicas", "2"]), (2, "train_PP.py", ["--chunks", "2"]), (2, "train_DCP.py", []),
    (4, "train_FSDP.py", ["--replicas", "2"]), (4, "train_TP.py", ["--tensor-parallel", "2"]), (4, "train_PP.py", [])])
def test_several_devices_train_the_baselines_model(near, trained, place, gpus, script, options):
    """The test compares the weights and the momentum."""
    baseline, variant = trained(place, "train.py", *VIT), trained(place, script, *options, *VIT, processes=gpus)
    near(gap(baseline / "last.pt", variant / "last.pt"), 1e-5)


@rows("place, gpus, script, options", None, cases=[
    (2, "language/train_TP.py", []), (2, "language/train_CP.py", []), (2, "language/train_4D.py", []),
    (4, "language/train_CP.py", ["--tensor-parallel", "2"]), (4, "language/train_4D.py", ["--tensor-parallel", "2"]),
    (8, "language/train_4D.py", ["--tensor-parallel", "2", "--context-parallel", "2"])])
def test_a_mesh_trains_the_language_model(near, trained, place, gpus, script, options):
    """The test compares the validation loss: AdamW enlarges the rounding of gradients that are almost 0."""
    text = ["--epochs", "1", "--batch-size", "32", "--windows", "256", "--length", "64", "--sample", "", "--seed", "3"]
    found = [load(trained(place, *command, *text, processes=count) / "last.pt")["score"]
             for count, command in ((0, ["language/train.py"]), (gpus, [script, *options]))]
    near(abs(found[0] - found[1]), 1e-3)


@rows(gpus=2, cpu=False)
def test_a_pipeline_trains_over_nccl_lazy_alone(near, trained, place):
    if not torch.distributed.is_backend_available("nccl-lazy"):
        pytest.skip(f"torch {torch.__version__} has no nccl-lazy")
    pipeline = trained(place, "train_PP.py", "--chunks", "2", "--backend", "nccl-lazy", *VIT, processes=2)
    near(gap(trained(place, "train.py", *VIT) / "last.pt", pipeline / "last.pt"), 1e-5)


@rows("place, script", 2, cases=[(script,) for script in SHARDED])
def test_a_sharded_script_resumes_with_its_momentum(near, trained, tmp_path, place, script):
    whole = trained(place, script, *VIT, processes=2)
    first = min(whole.glob("step-*")) if script == "train_DCP.py" else whole / "epoch-001.pt"
    train(place, script, *VIT, "--resume", first, "--output-dir", tmp_path / "again", processes=2)
    if script == "train_DCP.py":
        whole_file(max((tmp_path / "again").glob("step-*")), tmp_path / "again/last.pt")
    near(gap(whole / "last.pt", tmp_path / "again/last.pt"), 1e-5)


@rows("place, script", 2, cases=[("train_FSDP.py",), ("train_TP.py",), ("train_PP.py",)])
def test_a_sharded_script_clips_the_norm_of_the_whole_gradient(near, trained, place, script):
    clip = ["--clip-norm", "0.1", *VIT]
    one = trained(place, "train_amp.py", "--precision", "fp32", *clip)
    assert gap(one / "last.pt", trained(place, "train.py", *VIT) / "last.pt") > 1e-4  # it does clip
    near(gap(one / "last.pt", trained(place, script, *clip, processes=2) / "last.pt"), 1e-5)


@rows("place, kind", 2, cases=[("bf16",), ("powersgd",)])
def test_compressed_gradients_train_slightly_different_weights(near, trained, tmp_path, place, kind):
    options = ["--precision", "fp32", "--accum-steps", "1", "--batch-size", "96", "--lr", "0.001", "--epochs", "1"]
    train(place, "train_combined.py", "--compress", kind, *options, "--output-dir", tmp_path, processes=2)
    apart = distance(trained(place, "train_combined.py", *options, processes=2) / "last.pt", tmp_path / "last.pt")
    assert apart > 1e-6
    near(apart, {"bf16": 1e-4, "powersgd": 1e-3}[kind])


@rows(gpus=2)
def test_a_checkpoint_saved_while_training_goes_on_is_that_of_its_epoch(near, tmp_path, place):
    """train_FSDP.py waits for its file, train_DCP.py trains on; the weights move by more than 1e-3 per epoch."""
    options = ["--model", "vit_base" if place == "gpu" else "vit", "--epochs", "2", "--save-every", "1",
               "--deterministic", "--output-dir"]
    for script in ("train_FSDP.py", "train_DCP.py"):
        train(place, script, *options, tmp_path / script, processes=2)
    steps = sorted((tmp_path / "train_DCP.py").glob("step-*"))
    whole_file(steps[0], tmp_path / "first.pt")
    first = tmp_path / "train_FSDP.py/epoch-001.pt"
    assert distance(first, tmp_path / "train_FSDP.py/last.pt") > 1e-3
    near(gap(first, tmp_path / "first.pt"), 1e-5)


@rows(gpus=2, cpu=False)
def test_a_sharded_model_learns_in_bf16_and_takes_less_memory(tmp_path, place):
    """The larger the model's part of the memory, the closer the ratio is to one half."""
    peaks = []
    for script, options in (("train_DDP.py", []), ("train_FSDP.py", ["--bf16"])):
        result = train(place, script, *options, "--model", "vit_base", "--epochs", "2", "--lr", "0.01", "--output-dir",
                       tmp_path / script, processes=2)
        assert epochs(result.out)[-1]["loss"] < epochs(result.out)[0]["loss"]
        peaks.append(int(re.findall(r"([\d,]+) MiB", result.out)[-1].replace(",", "")))
    assert peaks[1] < 0.7 * peaks[0]


@rows(gpus=2, cpu=False)
def test_sync_batchnorm_sees_the_whole_batch(photos, tmp_path, place):
    """Two processes train a network with BatchNorm as one process does only with SyncBatchNorm."""
    resnet = ["--dataset", "folder", "--data-path", photos, "--model", "resnet18", "--batch-size", "12", "--epochs",
              "1", "--lr", "0.001", "--output-dir"]
    train(place, "train.py", *resnet, tmp_path / "one")
    for name, options in (("sync", ["--sync-bn"]), ("apart", [])):
        train(place, "train_DDP.py", *options, *resnet, tmp_path / name, processes=2)
    synced, apart = (distance(tmp_path / "one/last.pt", tmp_path / name / "last.pt") for name in ("sync", "apart"))
    assert synced < 1e-3 < apart


@rows("place, options", 2, cases=[(["--multi-scale"],), (["--model", "tiny-bn", "--sync-bn"],)], cpu=False)
def test_two_processes_train_the_detector_of_one(near, tmp_path, place, options):
    for processes in (1, 2):
        train(place, "detection/train_DDP.py", *options, "--epochs", "1", "--lr", "0.0003", "--output-dir",
              tmp_path / str(processes), processes=processes)
    near(distance(tmp_path / "1/last.pt", tmp_path / "2/last.pt"), 1e-4)


@rows(gpus=2)
def test_a_failure_ends_the_job_at_once(photos, tmp_path, place):
    """One rank cannot read an image. Under NCCL, destroying the group would wait for the other process."""
    for split in ("train", "val"):
        shutil.copytree(photos, tmp_path / "data" / split)
    (tmp_path / "data/train/ash/03.jpg").write_bytes(b"")
    result = run(*command(place, "train_DDP.py", "--dataset", "folder", "--data-path", tmp_path / "data",
                          "--batch-size", "4", "--epochs", "1", "--output-dir", tmp_path, processes=2))
    assert result.code == 1 and "03.jpg: cannot be read" in result.err


def rank1(live):
    """Return the process of rank 1 in a launch that has begun to train."""
    live.wait_for("^epoch +1/")
    return next(pid for pid in live.family() if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())


@rows(gpus=2)
def test_a_killed_rank_ends_the_job(tmp_path, place):
    with Live(*command(place, "train_DDP.py", "--epochs", "1000", "--output-dir", tmp_path, processes=2)) as live:
        os.kill(rank1(live), signal.SIGKILL)
        assert live.end(120) == 1
    assert re.search(r"exitcode *: -9", "\n".join(live.err))


@rows(gpus=2)
def test_a_rank_that_sleeps_ends_the_job_after_the_timeout(tmp_path, place, record_property):
    """gloo raises an error, and the script prints one line; NCCL's watchdog aborts the process with its own message."""
    with Live(*command(place, "train_DDP.py", "--epochs", "1000", "--timeout", "20", "--output-dir", tmp_path,
                       processes=2)) as live:
        os.kill(rank1(live), signal.SIGSTOP)
        assert live.end(300) == 1
    said = [line for line in live.err if re.search(r"exitcode *:|timed? ?out|SIGABRT", line, re.I)]
    record_property("said", " | ".join(line.strip()[:150] for line in said[:4]))
    assert any(re.search(r"timed? ?out", line, re.I) for line in said), live.said()
    assert place == "gpu" or len(ours(live.err)) == 1


@rows(gpus=2)
def test_torchrun_restarts_a_killed_run_to_the_same_weights(tmp_path, place):
    options = ["--epochs", "20", "--snapshot-every", "5", "--deterministic", "--resume", "auto", "--output-dir"]
    train(place, "train_elastic.py", *options, tmp_path / "whole", processes=2)
    again = command(place, "train_elastic.py", *options, tmp_path / "again", processes=2)
    again.insert(len(TORCHRUN), "--max-restarts=1")
    with Live(*again, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}) as live:
        os.kill(rank1(live), signal.SIGKILL)
        assert live.end(300) == 0, live.said()
    assert re.search("^resume ", "\n".join(live.out), re.M)
    assert same(load(tmp_path / "whole/last.pt"), load(tmp_path / "again/last.pt"))


@rows("place, gpus", None, cases=[(2,), (4,), (8,)])
def test_with_deterministic_two_runs_are_bit_equal(tmp_path, place, gpus):
    """NVLink's own sums (NVLS) differ from call to call; on a GPU, the model is large enough for them."""
    model = "resnet18" if place == "gpu" else "cnn"
    for name in ("one", "two"):
        train(place, "train_DDP.py", "--model", model, "--epochs", "1", "--deterministic", "--output-dir",
              tmp_path / name, processes=gpus)
    assert same(load(tmp_path / "one/last.pt"), load(tmp_path / "two/last.pt"))


@rows("place, gpus", None, cases=[(2,), (4,), (8,)])
def test_the_copies_of_a_tensor_group_do_not_drift_apart(tmp_path, place, gpus, record_property):
    """Within an epoch, nothing synchronizes the weights outside the plan: each rank must compute the same values."""
    step, epochs = ("1000", "17") if place == "gpu" else ("100", "2")
    result = train(place, "train_TP.py", "--model", "vit", "--tensor-parallel", "2", "--batch-size", "24", "--epochs",
                   epochs, "--output-dir", tmp_path, processes=gpus, program=[PROGRAMS / "around.py", "replicas", step])
    line, drift = re.search(rf"(step {step}: .* copies, (\S+) apart)", result.out).groups()
    record_property("said", line)
    assert float(drift) < 1e-5


# Two hosts, through Slurm

@pytest.fixture
def hosts():
    """Return the variables of the allocation, in which srun starts tasks on two hosts."""
    return {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}


NO_HOSTS = "" if int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) > 1 else (
    "needs two hosts: salloc --nodes=2 --gpus-per-node=1")
SRUN = ["srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1"]


@rows("place, options", needs=NO_HOSTS, cases=[(["--gpus-per-node=1"],), (["--gpus-per-task=1"],)], cpu=False)
def test_two_hosts_train_the_baselines_model(near, trained, hosts, tmp_path, place, options):
    quiet(run(*SRUN, *options, *command(place, "train_DDP.py", *SAME, "--output-dir", tmp_path), env=EXACT | hosts))
    near(distance(trained(place, "train.py", *SAME) / "last.pt", tmp_path / "last.pt"), 1e-5)


@rows(needs=NO_HOSTS, cpu=False)
def test_a_process_lost_on_the_second_host_ends_the_job_and_it_resumes(hosts, tmp_path, place):
    """The test does not power off a host, because it could not switch the host on again."""
    script = command(place, "train_elastic.py", "--snapshot-every", "5", "--resume", "auto", "--output-dir", tmp_path)
    note = ["sh", "-c", f'echo $$ $SLURMD_NODENAME > {tmp_path}/task$SLURM_PROCID; exec "$@"', "sh"]
    with Live(*SRUN, *note, *script, "--epochs", "1000", env=hosts) as live:
        live.wait_for("^epoch +1/")
        pid, node = (tmp_path / "task1").read_text().split()
        good(run("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "kill", "-9", pid, env=hosts))
        assert live.end(120) != 0
    done = load(tmp_path / "last.pt")["epoch"]
    result = quiet(run(*SRUN, *script, "--epochs", str(done + 2), env=hosts))
    assert "resume " in result.out and epochs(result.out)
