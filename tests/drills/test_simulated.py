"""Tensors on the wrong device, which usually only a GPU reveals: the unchanged scripts run on a simulated device."""
import pytest
from conftest import (
    FLOAT64,
    FROM_ROOT,
    LAUNCH,
    PROGRAMS,
    PYTHON,
    SCRIPTS,
    command,
    copy_out,
    distance,
    good,
    load,
    replace_lines,
    run,
    same,
)
from torch.utils import backend_registration

pytestmark = pytest.mark.skipif(not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
                                reason="this torch has no devices written in Python")
SIMULATED = [PYTHON, PROGRAMS / "simulated.py"]
SAME = ["--epochs", "2", "--batch-size", "144", "--lr", "0.0003", "--seed", "3", "--workers", "0"]
# It cannot make a tensor in place of one on the meta device, where the sharded scripts begin: a GPU has to show those
WHOLE = [name for name in SCRIPTS[1:] if name not in ("train_FSDP.py", "train_TP.py", "train_PP.py", "train_DCP.py")]
CHILD = {"OMP_NUM_THREADS": "1"}  # sums in the same order in every launch


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Train train.py on the CPU and on the simulated device; return both output folders."""
    folder = tmp_path_factory.mktemp("simulated")
    good(run(PYTHON, "train.py", *SAME, "--save-every", "1", "--output-dir", folder / "cpu", env=CHILD))
    result = good(run(*SIMULATED, "train.py", *SAME, "--save-every", "1", "--output-dir", folder / "npy", env=CHILD))
    assert result.out.startswith("npy: ")
    return folder / "cpu", folder / "npy"


def test_trains_bit_for_bit_as_on_the_cpu(whole):
    on_cpu, on_device = (load(folder / "last.pt") for folder in whole)
    assert same(on_cpu, on_device)


def test_resumes_from_the_device(whole, tmp_path):
    folder = whole[1]
    good(run(*SIMULATED, "train.py", *SAME, "--resume", folder / "epoch-001.pt", "--output-dir", tmp_path, env=CHILD))
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))


def test_a_checkpoint_of_the_device_names_it(whole):
    """Without map_location, torch would load the tensors onto this device, which may not exist (E6)."""
    import torch

    with pytest.raises(RuntimeError, match="tagged with npy:0"):
        torch.load(whole[1] / "last.pt", weights_only=True)


@pytest.mark.nightly
@pytest.mark.parametrize(("script", "options"), [
    *((script, []) for script in WHOLE), ("train_amp.py", ["--precision", "fp16", "--freeze-layers"])])
def test_variants_train_the_same_model(whole, tmp_path, script, options):
    """The reference is train.py on the CPU or, for mixed precision, the same script on the CPU."""
    launch = command(script)
    at = launch.index(script)
    environ = ["--use_env"] if LAUNCH[-1] in launch else []  # else it puts --local-rank between the two programs
    good(run(*launch[:at], *environ, PROGRAMS / "simulated.py", *launch[at:], *SAME, *options, "--output-dir",
             tmp_path / "npy", env=CHILD))
    folder = whole[0]
    if script == "train_amp.py":
        folder = tmp_path / "cpu"
        good(run(*launch, *SAME, *options, "--output-dir", folder, env=CHILD))
    assert distance(folder / "last.pt", tmp_path / "npy/last.pt") < 1e-6
    assert load(folder / "last.pt")["score"] == load(tmp_path / "npy/last.pt")["score"]


@pytest.mark.nightly
def test_the_detector_trains_the_same_model(scenes, tmp_path):
    options = ["--dataset", "lines", "--data-path", scenes, "--epochs", "2", "--batch-size", "12", "--lr", "0.0003",
               "--workers", "0", "--output-dir"]  # not --multi-scale: torchvision rounds pixels as the device does
    *launch, script = command("detection/train_DDP.py")
    for program, name in ([], "cpu"), ([PROGRAMS / "simulated.py"], "npy"):
        good(run(*launch, *program, script, *options, tmp_path / name, env=FLOAT64))
    assert distance(tmp_path / "cpu/last.pt", tmp_path / "npy/last.pt") < 1e-11
    assert load(tmp_path / "cpu/last.pt")["score"] == load(tmp_path / "npy/last.pt")["score"]


@pytest.mark.nightly
def test_the_loader_delivers_to_the_device(tmp_path):
    on_cpu, on_device = (good(run(*start, PROGRAMS / "probe.py", "--workers", "1", cwd=tmp_path, env=FROM_ROOT)).out
                         for start in ([PYTHON], SIMULATED))
    assert "npy:0 npy:0" in on_device and on_device.replace("npy:0", "cpu") == on_cpu


MOVE = "    models.to_device(model, device)  # convolutions in channels-last, the fastest layout\n"
RESUME = "    start_epoch, best_score = checkpoint.resume(args.resume, folder, state)\n"


@pytest.mark.parametrize(("script", "wrong", "where", "says"), [
    ("train.py", {"torch.zeros(2 + len(METRICS), device=device)": "torch.zeros(2 + len(METRICS))"}, "in evaluate",
     "npy:0 and cpu"),
    pytest.param("train.py", {MOVE: "", RESUME: RESUME + MOVE}, "optimizer.step()", "npy:0 and cpu",
                 marks=pytest.mark.nightly),
    pytest.param("loader.py", {"torch.tensor(count, device=args.device)": "torch.tensor(count)"}, "in reduce_sum",
                 "No backend type associated with device type cpu", marks=pytest.mark.nightly),
    ("common/checkpoint.py", {', map_location="cpu"': ""}, "", "damaged or not from torch.save"),
], ids=["sums on the CPU", "optimizer loaded before the model moves", "count on the CPU",
        "no map_location"])
def test_a_wrong_placement_is_seen(whole, tmp_path, script, wrong, where, says):
    """Each mistake goes unnoticed on a CPU; here, it raises in the line where a GPU would fail."""
    copy = copy_out("train.py" if script.startswith("common") else script, tmp_path / "copy")
    replace_lines(copy.parent / script, wrong)
    options = [] if script == "loader.py" else [*SAME, "--resume", whole[1] / "epoch-001.pt",
                                                "--output-dir", tmp_path / "out"]
    result = run(*SIMULATED, copy, *options, cwd=tmp_path, env=CHILD)
    assert result.code and where in result.err and says in result.err.splitlines()[-1]
