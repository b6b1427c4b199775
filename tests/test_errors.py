"""A mistake that can be foreseen ends in one line that names it, the right exit code, and no process left."""
import os
import pickle
import shutil
import socket
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import LAUNCH, PYTHON, TORCHRUN, run


def ends_in_one_line(result, code, *parts):
    """Check that standard error is one line with `parts` in it, and nothing on standard output looks like training."""
    assert result.code == code, result.err
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].split(".py: error: ")[0].startswith("train"), lines[0]
    for part in parts:
        assert str(part) in lines[0]
    assert "epoch" not in result.out


# command: what its one line names; {tmp} is a folder with an empty folder, one without images, and a plain file
MISTAKES = {
    # these show before any data is read
    "train.py --dataset nope": ["--dataset", "'nope'", "fashion-mnist"],
    "train.py --epochs -1": ["--epochs", "'-1'", "above 0"],
    "train.py --lr nan": ["--lr", "'nan'"],
    "train.py --lrf 1.5": ["--lrf", "'1.5'", "0 to 1"],
    "train.py --batch-size 12.5": ["--batch-size", "'12.5'"],
    "train.py --epoch 3": ["--epoch"],
    "train.py --device warp": ["--device warp"],
    "train_grad_accum.py --accum-steps 0": ["--accum-steps", "'0'"],
    "train_DDP.py --sync-bn False": ["False"],
    "train_DDP.py --backend smoke": ["--backend smoke", "gloo"],
    "train_DDP.py --backend nccl --device cpu": ["--backend nccl", "cpu", "gloo"],
    "train_mp.py --port 70000": ["--port", "'70000'"],
    "train_mp.py --nnodes 2 --ip 127.0.0.1": ["--nnodes 2", "--port"],
    # these when the data or the model is there
    "train.py --batch-size 1439": ["--batch-size 1439", "1438"],
    "train.py --evaluate": ["--evaluate", "--weights", "--resume"],
    "train.py --evaluate --resume auto": ["--evaluate", "--resume"],
    "train.py --weights mistyped.pt": ["--weights mistyped.pt", "no such file"],
    "train.py --resume mistyped.pt": ["--resume mistyped.pt", "no such file"],
    "train.py --dataset folder --data-path {tmp}/missing": ["{tmp}/missing", "no such folder"],
    "train.py --dataset folder --data-path {tmp}/empty": ["{tmp}/empty", "no subfolders"],
    "train.py --dataset folder --data-path {tmp}/hollow": ["{tmp}/hollow", "'oak'", "no images"],
    "train.py --dataset cifar10 --data-path {tmp}/file": ["{tmp}/file"],
    "train.py --output-dir {tmp}/file": ["--output-dir {tmp}/file"],
    "train_DDP.py --sync-bn --device cpu": ["--sync-bn", "cpu"],
    "train_grad_accum.py --accum-steps 65": ["--accum-steps 65", "64"],
    # and these when a checkpoint is read
    "train.py --resume {tmp}/resnet.pt": ["--resume {tmp}/resnet.pt", "model", "--model"],
    "train.py --weights {tmp}/resnet.pt": ["--weights {tmp}/resnet.pt", "no tensor in it matches"],
    "train.py --resume {tmp}/weights.pt": ["--resume {tmp}/weights.pt", "no 'optimizer'", "--weights"],
    "train.py --resume {tmp}/torn.pt": ["--resume {tmp}/torn.pt", "incomplete"],
    "train.py --resume {tmp}/void.pt": ["--resume {tmp}/void.pt", "incomplete"],
    "train.py --resume {tmp}/newer.pt": ["--resume {tmp}/newer.pt", "a newer torch"],
    "train.py --resume {tmp}/shapes.pt": ["--resume {tmp}/shapes.pt", "model", "--dataset"],
    "train.py --weights {tmp}/text.pt": ["--weights {tmp}/text.pt", "not"],
    "train.py --resume {tmp}/code.pt": ["--resume {tmp}/code.pt", "rejected"],
    "train.py --weights {tmp}/zipped-code.pt": ["--weights {tmp}/zipped-code.pt", "rejected"],
}
RARER = {"train.py --device warp", "train_grad_accum.py --accum-steps 0", "train.py --output-dir {tmp}/file",
         "train_grad_accum.py --accum-steps 65", "train.py --dataset folder --data-path {tmp}/hollow",
         "train.py --resume {tmp}/shapes.pt", "train.py --weights {tmp}/zipped-code.pt", "train.py --epochs -1",
         "train.py --lr nan", "train.py --lrf 1.5", "train.py --epoch 3", "train.py --batch-size 12.5",
         "train.py --evaluate --resume auto", "train.py --resume {tmp}/void.pt", "train.py --resume {tmp}/newer.pt",
         "train.py --weights {tmp}/text.pt", "train.py --dataset cifar10 --data-path {tmp}/file",
         "train_mp.py --nnodes 2 --ip 127.0.0.1", "train_mp.py --port 70000", "train.py --batch-size 1439",
         "train.py --dataset folder --data-path {tmp}/empty", "train.py --resume {tmp}/weights.pt",
         "train.py --resume mistyped.pt", "train_DDP.py --backend smoke"}


class Code:
    """An object whose pickle, when loaded without care, makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory, request):
    """Make each mistake that is asked for, as many at a time as there are cores; return the folder, and the results."""
    import torch

    from common import models

    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "empty").mkdir()
    (folder / "hollow/oak").mkdir(parents=True)
    (folder / "file").write_text("a file, not a folder\n")
    resnet = {"model": {"conv1.weight": torch.zeros(64, 1, 3, 3)}, "optimizer": {}, "scheduler": {}, "epoch": 1,
              "accuracy": 0.5, "best_accuracy": 0.5}
    torch.save(resnet, folder / "resnet.pt")
    torch.save({"model": resnet["model"]}, folder / "weights.pt")
    whole = (folder / "resnet.pt").read_bytes()
    (folder / "torn.pt").write_bytes(whole[:len(whole) // 2])
    (folder / "void.pt").write_bytes(b"")
    (folder / "text.pt").write_text("dear diary\n")
    with zipfile.ZipFile(folder / "resnet.pt") as old, zipfile.ZipFile(folder / "newer.pt", "w") as new:
        for entry in old.infolist():
            new.writestr(entry, b"99\n" if entry.filename.endswith("/version") else old.read(entry))
    shapes = models.create_model("cnn", 3, (3, 224, 224)).state_dict()
    torch.save(resnet | {"model": shapes}, folder / "shapes.pt")
    (folder / "code.pt").write_bytes(pickle.dumps(Code(folder / "ran"), protocol=2))
    torch.save({"model": Code(folder / "ran")}, folder / "zipped-code.pt")

    def make(number, command):
        script, *arguments = command.format(tmp=folder).split()
        arguments += [] if "--output-dir" in arguments else ["--output-dir", folder / f"out{number}"]
        return run(PYTHON, script, *arguments)

    asked = [item.callspec.params["command"] for item in request.session.items
             if getattr(item, "originalname", "") == "test_a_mistake_is_named_in_one_line"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(make, range(len(asked)), asked)
        return folder, dict(zip(asked, results, strict=True))


@pytest.mark.parametrize("command", [pytest.param(command, marks=pytest.mark.drill if command in RARER else [])
                                     for command in MISTAKES])
def test_a_mistake_is_named_in_one_line(mistakes, command):
    folder, results = mistakes
    ends_in_one_line(results[command], 2, *(part.format(tmp=folder) for part in MISTAKES[command]))
    assert not (folder / "ran").exists()  # no code in a checkpoint was run


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(PYTHON, "train_mp.py", "--port", port, "--output-dir", tmp_path)
    ends_in_one_line(result, 2, f"--port {port}", "in use")


@pytest.mark.parametrize("launcher", [[*LAUNCH, "--nproc_per_node=2"], None, pytest.param(
    [*TORCHRUN, "--nproc-per-node=2"], marks=pytest.mark.drill)])
def test_a_batch_that_the_processes_cannot_share(tmp_path, launcher):
    """One line of ours, also under a launcher, which adds a report of its own and exits with 1."""
    command = [*launcher, "train_DDP.py"] if launcher else [PYTHON, "train_mp.py"]
    result = run(*command, "--batch-size", "63", "--output-dir", tmp_path)
    said = [line for line in result.err.splitlines() if "error: " in line and line.startswith("train")]
    assert said == [f"{command[-1]}: error: --batch-size 63: not a multiple of the 2 processes that share it"]
    assert result.code == (1 if launcher else 2)
    if not launcher:
        assert result.err.splitlines() == said
    assert "train_DDP.py\", line" not in result.err


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.drill), "1"])
def test_an_unreadable_image_is_named_by_the_process_that_met_it(photos, tmp_path, workers):
    data = tmp_path / "data"
    shutil.copytree(photos, data)
    for split in ("train", "val"):  # a split of one's own, so that the broken picture is sure to be trained on
        (data / split).mkdir()
    for name in ("ash", "beech", "cedar"):
        shutil.copytree(data / name, data / "val" / name)
        shutil.move(data / name, data / "train" / name)
    broken = data / "train/beech/07.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    result = run(*LAUNCH, "--nproc_per_node=2", "train_DDP.py", "--dataset", "folder", "--data-path", data,
                 "--batch-size", "60", "--epochs", "1", "--workers", workers, "--output-dir", tmp_path / "out")
    said = [line for line in result.err.splitlines() if line.startswith("train_DDP.py: error: ")]
    assert result.code == 1 and len(said) == 1, result.err
    assert said[0].startswith("train_DDP.py: error: rank ") and str(broken) in said[0] and "cannot be read" in said[0]
    assert "train_DDP.py\", line" not in result.err  # no traceback of ours
    assert not (tmp_path / "out/last.pt").exists()
