"""A reader's own data, model, loss and metric: only the lines marked `# yours` change, and the scripts stay equal."""
import functools
import re

import pytest
from conftest import FLOAT64, PROGRAMS, PYTHON, ROOT, TORCHRUN, copy_out, distance, epochs, good, load, run

# A regression on tables. mean and std are those of the targets: nobody may scale the inputs by them. The network is in
# a wrapper, and its layers are in containers without forward().
MINE = '''
import torch


class Table(torch.utils.data.Dataset):
    mean, std = 0.25, 0.5

    def __init__(self, count):
        self.inputs = torch.randn(count, 6)
        self.targets = 10 * self.inputs[:, :1] - 10 * self.inputs[:, 1:2].tanh()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.ModuleList([torch.nn.Linear(6, 32), torch.nn.Tanh()])
        self.heads = torch.nn.ModuleDict({"value": torch.nn.Linear(32, 1)})

    def forward(self, inputs):
        for layer in self.hidden:
            inputs = layer(inputs)
        return self.heads["value"](inputs)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = Network()

    def forward(self, inputs):
        if inputs.ndim != 2 or not 0.5 < inputs.std() < 2:
            raise ValueError("these are not the inputs of the dataset")
        return self.network(inputs)
'''
# (mark, line) of each table in docs/scripts.md; + adds the line below its mark, and - deletes it
EDITS = [re.findall(r"^\| ([^|]+) \| `(.+)` \|$", table.split("\n\n")[0], re.M)
         for table in (ROOT / "docs/scripts.md").read_text().split("| mark | line |\n")[1:]]
TASKS = {"regression": (MINE, EDITS[0], ["--epochs", "6", "--batch-size", "40"], "train_TP.py"),
         "segmentation": ((PROGRAMS / "masks.py").read_text(), EDITS[1] + EDITS[2],
                          ["--epochs", "4", "--batch-size", "10", "--lr", "1"], "train_FSDP.py")}


def put_in(text, edits):
    """Return a script's text with the edits: on a line with their mark, or in the paragraph below a mark."""
    lines, left, above = [], [*edits], ""
    for line in text.splitlines():
        code, marked, name = line.partition("# yours: ")
        if not code.strip():  # a mark alone on its line, or a blank line, which ends its paragraph
            above = name
        indent, added = re.match(" *", line)[0], []
        for edit in [edit for edit in left if (name or above).startswith(edit[0])]:
            kind, _, rest = edit[1].partition(" ")
            if kind == "+" and marked:
                added.append(indent + "    " * code.startswith("    for ") + rest)
            elif kind == "-" and code.strip() == rest:
                line = None
            elif kind not in "+-" and code.strip().startswith(re.match(r".*?(?: = |\()", edit[1])[0]):
                line = indent + edit[1]
            else:
                continue
            left.remove(edit)
        lines += [line, *added] if line is not None else added
    assert not left, f"not at a mark: {left}"
    found = "\n".join(lines) + "\n"
    return found.replace("criterion = ", "import mine\n\ncriterion = ", 1) if "mine." in found else found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function from a task and a script to (folder, result), once each, with the edits of the task."""
    @functools.cache
    def get(task, name):
        mine, edits, options, sharded = TASKS[task]
        copy = copy_out(name, tmp_path_factory.mktemp("mine") / "project")
        text = copy.read_text()
        if name == sharded:  # created without data; its layers are in a plan
            edits = [(mark, re.sub(r"^model = (.*)\(\)$", r"model, weights = replay.outline(\1)", line))
                     for mark, line in edits]
            text = text.replace('"hidden.0"', '"network.hidden.0"').replace('"hidden.2"', '"network.heads.value"')
        copy.write_text(put_in(text, edits))
        (copy.parent / "mine.py").write_text(mine)
        start = [PYTHON] if name == "train.py" else [*TORCHRUN, "--nproc-per-node=2"]
        command = [*start, name, "--workers", "1", "--output-dir", "out", *options]
        return copy.parent / "out", good(run(*command, cwd=copy.parent, env=FLOAT64))
    return get


@pytest.mark.nightly
@pytest.mark.parametrize(("task", "script"), [
    ("regression", "train_DDP.py"), ("regression", "train_TP.py"),
    ("segmentation", "train_DDP.py"), ("segmentation", "train_FSDP.py")])
def test_two_processes_train_the_same_model(trained, task, script):
    one, two = trained(task, "train.py")[0], trained(task, script)[0]
    for file in ("best.pt", "last.pt"):
        assert distance(one / file, two / file) < 1e-11


@pytest.mark.nightly
@pytest.mark.parametrize(("task", "units"), [("regression", 3), ("segmentation", 4)])
def test_the_headline_says_into_how_many_units_a_model_in_containers_is_split(trained, task, units):
    assert f" parameters in {units} FSDP units\n" in trained(task, TASKS[task][-1])[1].out


@pytest.mark.drill
def test_the_model_learns_and_the_best_is_the_highest_of_negative_scores(trained):
    folder, result = trained("regression", "train.py")
    lines = epochs(result.out)
    losses, errors = [line["val_loss"] for line in lines], re.findall(r"  mae ([\d.]+)  lr ", result.out)
    assert len(lines) == len(errors) == 6 and "accuracy" not in result.out
    assert losses[-1] < losses[0] / 2 and lines[-1]["lr"] < lines[0]["lr"] == 0.1
    best, last = load(folder / "best.pt"), load(folder / "last.pt")
    assert best["epoch"] == 1 + losses.index(min(losses)) > 1
    assert best["score"] == last["best_score"] == pytest.approx(-min(losses) ** 0.5, abs=1e-3)


@pytest.mark.drill
def test_the_score_is_a_ratio_that_evaluate_shows_without_its_parts(trained):
    folder, result = trained("segmentation", "train.py")
    one, two = [re.findall(r"  val_loss (\S+)  pixels (\S+)  iou (\S+)  lr ", said) for said in (
        result.out, trained("segmentation", "train_DDP.py")[1].out)]
    assert one == two and len(one) == 4 and float(one[-1][1]) > 0.9 and float(one[-1][2]) > 0.8
    last = load(folder / "last.pt")
    assert last["score"] == pytest.approx(float(one[-1][2]), abs=1e-4) and last["best_score"] >= last["score"]
    said = good(run(PYTHON, "train.py", "--evaluate", "--resume", "auto", "--output-dir", "out", "--workers", "0",
                    "--batch-size", "10", cwd=folder.parent, env=FLOAT64)).out
    assert "val_loss {}  pixels {}  iou {}\n".format(*one[-1]) in said and "union" not in said + result.out


@pytest.mark.parametrize("script", [
    pytest.param(name, marks=pytest.mark.nightly) for name in ("train_DCP.py", "train_DDP.py", "train_combined.py")])
def test_all_processes_stop_early_after_the_same_epoch(tmp_path, script):
    """The first epoch has the best score. tests/unit/test_scripts.py stops each script on one process."""
    copy = copy_out(script, tmp_path / "project")
    copy.write_text(put_in(copy.read_text(), [*EDITS[2], ("the score", "score = -epoch")]))
    result = good(run(*TORCHRUN, "--nproc-per-node=2", script, "--epochs", "9", "--output-dir", "out", cwd=copy.parent))
    assert len(epochs(result.out)) == 4
