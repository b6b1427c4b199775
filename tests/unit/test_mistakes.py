"""A mistake in a command gives one line that names it, and exit code 2; these tests run without a launch."""
import argparse
import pickle
import runpy
import sys
import zipfile

import pytest
import torch
from conftest import ROOT
from PIL import Image

from common import cli, models

# command: what its one line names; {tmp} is a folder with an empty folder, one without images, and a plain file
MISTAKES = {
    # these show before any data is read
    "train.py --dataset nope": ["--dataset", "'nope'", "fashion-mnist"],
    "train.py --epochs -1": ["--epochs", "'-1'", "above 0"],
    "train.py --lr nan": ["--lr", "'nan'"],
    "train.py --lrf 1.5": ["--lrf", "'1.5'", "0 to 1"],
    "train.py --batch-size 12.5": ["--batch-size", "'12.5'"],
    "train.py --epoch 3": ["--epoch"],
    "train.py --seed -1": ["--seed", "'-1'", "0 to 2**64 - 1"],
    "train.py --seed 18446744073709551616": ["--seed", "'18446744073709551616'", "0 to 2**64 - 1"],
    "train.py --device warp": ["--device warp"],
    "train.py --output-dir caf\udce9": ["'caf\\udce9'", "not UTF-8", "rename"],  # a byte of Latin-1
    "train_grad_accum.py --accum-steps 0": ["--accum-steps", "'0'"],
    "train_DDP.py --sync-bn False": ["False"],
    "train_DDP.py --backend smoke": ["--backend smoke", "gloo"],
    "train_DDP.py --backend nccl --device cpu": ["--backend nccl", "cpu", "gloo"],
    "train_mp.py --port 70000": ["--port", "'70000'"],
    "train_mp.py --nnodes 2 --ip 127.0.0.1": ["--nnodes 2", "--port"],
    "train_mp.py --nnodes 2 --node-rank 1": ["--nnodes 2", "--port"],
    "train_mp.py --nnodes 2 --node-rank 2 --port 29400": ["--node-rank 2", "0 to 1"],
    "loader.py --data-source {tmp}/missing --device cpu": ["--data-source {tmp}/missing", "no folder"],
    # these when the data or the model is there
    "train.py --batch-size 1439": ["--batch-size 1439", "1438"],
    "train.py --evaluate": ["--evaluate", "--weights", "--resume"],
    "train.py --evaluate --resume auto": ["--evaluate", "--resume"],
    "train.py --weights mistyped.pt": ["--weights mistyped.pt", "No such file"],
    "train.py --resume mistyped.pt": ["--resume mistyped.pt", "No such file"],
    "train.py --dataset folder --data-path {tmp}/missing": ["{tmp}/missing", "no such folder"],
    "train.py --dataset folder --data-path {tmp}/empty": ["{tmp}/empty", "no subfolders"],
    "train.py --dataset folder --data-path {tmp}/hollow": ["{tmp}/hollow", "'ash'", "no images"],
    "train.py --dataset cifar10 --data-path {tmp}/file": ["{tmp}/file"],
    "train.py --output-dir {tmp}/file": ["--output-dir {tmp}/file"],
    "train_DDP.py --sync-bn --device cpu": ["--sync-bn", "cpu"],
    "train_grad_accum.py --accum-steps 65": ["--accum-steps 65", "64"],
    "train_FSDP.py --replicas 3": ["--replicas 3: does not divide the 1 processes"],
    "train_PP.py --model resnet18": ["--model: a pipeline needs a chain of layers: cnn, vit"],
    "train_TP.py --model resnet18": ["--model: its layers are in no tensor plan; "],
    # and these when a checkpoint is read
    "train.py --resume {tmp}/resnet.pt": ["--resume {tmp}/resnet.pt", "model", "--model"],
    "train.py --weights {tmp}/resnet.pt": ["--weights {tmp}/resnet.pt", "no tensor in it matches"],
    "train.py --resume {tmp}/weights.pt": ["--resume {tmp}/weights.pt", "no 'optimizer'", "--weights"],
    "train.py --resume {tmp}/torn.pt": ["--resume {tmp}/torn.pt", "incomplete"],
    "train.py --resume {tmp}/void.pt": ["--resume {tmp}/void.pt", "incomplete"],
    "train.py --resume {tmp}/newer.pt": ["--resume {tmp}/newer.pt", "a newer torch"],
    "train.py --resume {tmp}/shapes.pt": ["--resume {tmp}/shapes.pt", "model", "--dataset"],
    "train.py --resume {tmp}/birds.pt --dataset folder --data-path {tmp}/trees --batch-size 4":
        ["--resume {tmp}/birds.pt", "'owl'", "'ash'", "--weights"],
    "train.py --weights {tmp}/text.pt": ["--weights {tmp}/text.pt", "not"],
    "train.py --resume {tmp}/code.pt": ["--resume {tmp}/code.pt", "rejected"],
    "train.py --weights {tmp}/zipped-code.pt": ["--weights {tmp}/zipped-code.pt", "rejected"]}


class Code:
    """An object whose pickle creates a file when it is loaded without restrictions."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "empty").mkdir()
    for name in ("ash", "oak"):
        (folder / "hollow" / name).mkdir(parents=True)
    (folder / "file").write_text("a file, not a folder\n")
    resnet = {"model": {"conv1.weight": torch.zeros(64, 1, 3, 3)}, "optimizer": {}, "scheduler": {}, "epoch": 1,
              "score": 0.5, "best_score": 0.5}
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
    torch.save(resnet | {"model": shapes, "classes": ["owl", "tit"]}, folder / "birds.pt")
    for n in range(10):
        path = folder / "trees" / ("ash", "oak")[n % 2] / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    (folder / "code.pt").write_bytes(pickle.dumps(Code(folder / "ran"), protocol=2))
    torch.save({"model": Code(folder / "ran")}, folder / "zipped-code.pt")
    return folder


@pytest.fixture
def here(alone, tmp_path, monkeypatch):
    """Drop the exit handlers that a script registers; `alone` undoes what it sets in this process."""
    monkeypatch.setattr("atexit.register", lambda *_: None)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_named_in_one_line(here, folder, tmp_path, monkeypatch, capsys, command):
    script, *arguments = command.format(tmp=folder).split()
    # one epoch: a mistake that is not noticed would train
    monkeypatch.setattr(sys, "argv", [script, "--epochs", "1", *arguments])
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    out, err = capsys.readouterr()
    line, = err.splitlines()
    assert line.startswith(f"{script}: error: ") and "epoch" not in out
    assert all(part.format(tmp=folder) in line for part in MISTAKES[command]), line
    assert not (tmp_path / "runs/class_indices.json").exists()  # which would replace an earlier run's
    assert not (folder / "ran").exists()  # no code in a checkpoint was run


@pytest.mark.parametrize(("kind", "taken", "refused"), [
    (cli.positive_int, ["1", "10"], ["0", "-1", "1.5", "one"]),
    (cli.count, ["0", str(2**63)], ["-1", "0.5", str(2**64)]),
    (cli.positive, ["1e-30", "2"], ["0", "-1", "nan", "inf"]), (cli.not_negative, ["0", "0.1"], ["-0.1", "nan", "inf"]),
    (cli.fraction, ["0", "0.5", "1"], ["-0.01", "1.01", "nan"]), (cli.port_number, ["1", "65535"], ["0", "65536"])])
def test_a_number_out_of_its_range_is_refused(kind, taken, refused):
    assert [kind(text) for text in taken] == [float(text) for text in taken]
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is not a"):
            kind(text)


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    """A shell expands only one that begins a word."""
    monkeypatch.setenv("USERPROFILE" if sys.platform == "win32" else "HOME", str(tmp_path))
    parser = cli.ArgumentParser("")
    for option in ("--output-dir", "--data-path", "--weights", "--resume"):
        parser.add_argument(option, type=str.upper if option == "--weights" else str)  # before a type converts it
    args = parser.parse_args(["--output-dir=~/runs=1", "--data-path", "~", "--weights=~/a", "--resume=a~b"])
    assert vars(args) == {"output_dir": f"{tmp_path}/runs=1", "data_path": str(tmp_path),
                          "weights": f"{tmp_path}/a".upper(), "resume": "a~b"}
