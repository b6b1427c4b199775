"""A reader's own data, model, loss and metric: only the lines marked `# yours` change, and the scripts stay equal."""
import functools
import re

import pytest
from conftest import FLOAT64, LAUNCH, PROGRAMS, PYTHON, ROOT, copy_out, distance, epochs, good, load, run

# A regression on tables. mean and std are those of the targets: nobody may scale the inputs by them.
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


class MLP(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def forward(self, inputs):
        if inputs.ndim != 2 or not 0.5 < inputs.std() < 2:
            raise ValueError("these are not the inputs of the dataset")
        return super().forward(inputs)
'''
# (mark, start of the line): the line that replaces it, from each table in docs/scripts.md
EDITS = [{(mark, re.match(r".*?(?: = |\()", line)[0]): line for mark, line in
          re.findall(r"^\| (the [^|]+) \| `(.+)` \|$", table.split("\n\n")[0], re.M)}
         for table in (ROOT / "docs/scripts.md").read_text().split("| mark | line |\n")[1:]]
TASKS = {"regression": (MINE, EDITS[0], ["--epochs", "6", "--batch-size", "40"]),
         "segmentation": ((PROGRAMS / "masks.py").read_text(), EDITS[1],
                          ["--epochs", "4", "--batch-size", "10", "--lr", "1"])}


def put_in(text, edits):
    """Return a script's text with the edits: on a line with their mark, or in the paragraph below a mark."""
    lines, left, mark = text.splitlines(), dict(edits), ""
    for number, line in enumerate(lines):
        code, _, name = line.partition("# yours: ")
        if not code.strip():  # a mark alone on its line, or a blank line, which ends its paragraph
            mark = name
        for here, start in [*left]:
            if (name or mark).startswith(here) and code.strip().startswith(start):
                lines[number] = code[:len(code) - len(code.lstrip())] + left.pop((here, start))
    assert not left, f"not at a mark: {left}"
    return "\n".join(lines).replace("criterion = ", "import mine\n\ncriterion = ", 1) + "\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a task once, with its edits: [(folder, result)] of train.py and of train_DDP.py."""
    @functools.cache
    def get(task):
        mine, edits, options = TASKS[task]
        found = []
        for name, start in [("train.py", [PYTHON]), ("train_DDP.py", [*LAUNCH, "--nproc_per_node=2"])]:
            copy = copy_out(name, tmp_path_factory.mktemp("mine") / "project")
            copy.write_text(put_in(copy.read_text(), edits))
            (copy.parent / "mine.py").write_text(mine)
            command = [*start, name, "--workers", "1", "--output-dir", "out", *options]
            found.append((copy.parent / "out", good(run(*command, cwd=copy.parent, env=FLOAT64))))
        return found
    return get


@pytest.mark.parametrize("task", ["regression", pytest.param("segmentation", marks=pytest.mark.drill)])
def test_one_and_two_processes_train_the_same_model(trained, task):
    (one, _), (two, _) = trained(task)
    for file in ("best.pt", "last.pt"):
        assert distance(one / file, two / file) < 1e-11


def test_the_model_learns_and_the_best_is_the_highest_of_negative_scores(trained):
    for folder, result in trained("regression"):
        lines = epochs(result.out)
        losses, errors = [line["val_loss"] for line in lines], re.findall(r"  mae ([\d.]+)  lr ", result.out)
        assert len(lines) == len(errors) == 6 and "accuracy" not in result.out
        assert losses[-1] < losses[0] / 2 and lines[-1]["lr"] < lines[0]["lr"] == 0.1
        best, last = load(folder / "best.pt"), load(folder / "last.pt")
        assert best["epoch"] == 1 + losses.index(min(losses)) > 1
        assert best["score"] == last["best_score"] == pytest.approx(-min(losses) ** 0.5, abs=1e-3)


@pytest.mark.drill
def test_the_score_is_the_ratio_of_two_metrics(trained):
    one, two = [re.findall(r"  pixels (\S+)  intersection (\S+)  union (\S+)  iou (\S+)  lr ", result.out)
                for _, result in trained("segmentation")]
    assert one == two and len(one) == 4
    pixels, intersection, union, iou = map(float, one[-1])
    assert pixels > 0.9 and iou > 0.8 and iou == pytest.approx(intersection / union, abs=1e-3)
    last = load(trained("segmentation")[0][0] / "last.pt")
    assert last["score"] == pytest.approx(iou, abs=1e-4) and last["best_score"] >= last["score"]


def test_an_edit_that_is_not_at_a_mark_is_noticed():
    assert [len(edits) for edits in EDITS] == [9, 4]
    text = (ROOT / "train.py").read_text()
    for mark in ("  # yours: the loss", "    # yours: the data"):
        with pytest.raises(AssertionError, match="not at a mark"):
            put_in(re.sub(f"{mark}.*", "", text), EDITS[0])
