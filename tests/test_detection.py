"""The detectors, when launched: every variant trains the model of detection/train.py and measures the same mAP."""
import re
import subprocess

import pytest
from conftest import FLOAT64, ROOT, STRICT, command, copy_out, distance, epochs, good, load, run, same

from common.images import decode

OPTIONS = ["--dataset", "lines", "--epochs", "2", "--batch-size", "12", "--seed", "3", "--save-every", "1", "--workers",
           "0", "--multi-scale"]
STARTS = {"train.py": ("detection/train.py", 1), "train_DDP.py": ("detection/train_DDP.py", 2),
          "on 3": ("detection/train_DDP.py", 3), "train_amp.py": ("detection/train_amp.py", 2)}


@pytest.fixture(scope="module")
def trained(scenes, once):
    """Return a function that runs a detector once, in float64: name to (folder, result)."""
    def get(name):
        return once(f"detector {name}", lambda folder: run(
            *command(*STARTS[name]), *OPTIONS, "--data-path", scenes, "--output-dir", folder,
            env=STRICT | ({} if "amp" in name else FLOAT64)))

    return get


@pytest.mark.parametrize("name", ["train_DDP.py", pytest.param("on 3", marks=pytest.mark.nightly)])
def test_trains_the_model_of_one_process(trained, name):
    """A third of the images has no box, so the processes have different numbers of boxes in each step."""
    (one, said), (several, said_too) = trained("train.py"), trained(name)
    assert load(one / "last.pt")["classes"] == load(several / "last.pt")["classes"] == [*"0123456789"]
    assert distance(one / "epoch-001.pt", one / "last.pt") > 1e-3
    assert distance(one / "last.pt", several / "last.pt") < 1e-12
    for file in ("epoch-001.pt", "last.pt"):
        assert load(one / file)["score"] == load(several / file)["score"]
    without_speed = [re.sub(r"lr.*", "", line) for line in said.out.splitlines()[1:]]
    assert without_speed == [re.sub(r"lr.*", "", line) for line in said_too.out.splitlines()[1:]]


def test_mixed_precision_trains_nearly_the_same_model(trained):
    one, amp = (epochs(trained(name)[1].out) for name in ("train.py", "train_amp.py"))
    for left, right in zip(one, amp, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=0.1)
        assert right["val_loss"] == pytest.approx(left["val_loss"], rel=0.1)
    assert distance(trained("train.py")[0] / "last.pt", trained("train_amp.py")[0] / "last.pt") > 1e-6


def merged(child, folder):
    """Merge detection/train_DDP.py with a child of train_DDP.py as detection/README.md does; return the script."""
    script = copy_out("detection/train_DDP.py", folder)
    pattern = r"^(git merge-file .*?) > (detection/train_\w+\.py)"
    line, name = re.search(pattern, (ROOT / "detection/README.md").read_text(), re.M).groups()
    words = line.replace("train_mp.py", child).split()
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    path = folder / name.replace("train_mp.py", child)
    path.write_text(said.stdout)
    conflicts = subprocess.run([word for word in words if word != "--ours"], cwd=ROOT, capture_output=True, text=True)
    assert "<<<<<<<" in conflicts.stdout and "<<<<<<<" not in conflicts.stdout.split('"""')[-1]  # only in the docstring
    assert path.parent == script.parent
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("child", ["train_mp.py", "train_elastic.py"])
def test_a_merge_with_another_idea_is_a_script(trained, scenes, child, tmp_path):
    """Its weights are bit-identical to those of detection/train_DDP.py."""
    merged(child, tmp_path / "merged")
    words = [word for part in command(child) for word in
             (["-m", f"detection.{child.removesuffix('.py')}"] if part == child else [part])]
    good(run(*words, *OPTIONS, "--data-path", scenes, "--output-dir", tmp_path / "out", cwd=tmp_path / "merged",
             env=FLOAT64))
    assert same(load(trained("train_DDP.py")[0] / "last.pt"), load(tmp_path / "out/last.pt"))


@pytest.mark.drill
def test_evaluation_does_not_depend_on_processes_or_batches(trained, scenes, tmp_path):
    """It also shows that one script loads another's checkpoint: this one was saved by two processes."""
    folder, _ = trained("train_DDP.py")
    said = good(run(*command("detection/train.py"), *OPTIONS, "--data-path", scenes, "--batch-size", "5",
                    "--output-dir", tmp_path, "--evaluate", "--resume", folder / "last.pt", env=FLOAT64)).out
    line = trained("train_DDP.py")[1].out.splitlines()[-1]
    assert re.search(r"val_loss .*mAP [\d.]+", said)[0] == re.search(r"val_loss .*mAP [\d.]+", line)[0]


@pytest.mark.nightly
def test_a_resumed_run_ends_as_the_whole_run_bit_for_bit(trained, scenes, tmp_path):
    folder, _ = trained("train_DDP.py")
    good(run(*command("detection/train_DDP.py"), *OPTIONS, "--data-path", scenes, "--output-dir", tmp_path, "--workers",
             "1", "--resume", folder / "epoch-001.pt", env=FLOAT64))
    assert same(load(folder / "last.pt"), load(tmp_path / "last.pt"))


@pytest.mark.nightly
def test_pictures_show_the_boxes(trained, scenes, tmp_path):
    folder, _ = trained("train.py")
    assert decode(folder / "detections.png").shape[0] == 3
    good(run(*command("detection/train.py"), *OPTIONS, "--data-path", scenes, "--output-dir", tmp_path, "--preview"))
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["preview.png"]
