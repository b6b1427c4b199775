"""tools/versions.py: what it notices in a script, its table, and that it knows every script and the oldest version."""
import json
import re
import shutil

import markers
import pytest
from conftest import PYTHON, ROOT, command, good, run

from tools import versions

HONEST = '''"""A script that trains nothing.

    python train.py
"""
import sys
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--output-dir") + 1])
folder.mkdir(exist_ok=True)
start = 2 if "--resume" in sys.argv else 1
trained = 5 if "--freeze-layers" in sys.argv else 10
loss = 2.0 if "--compile" in sys.argv else 2.01
if "--evaluate" in sys.argv:
    print("val_loss 2.0100")
    sys.exit()
print(f"cpu: {trained} of 10 parameters")
for epoch in range(start, 3):
    (folder / f"epoch-{epoch:03}.pt").touch()
    print(f"epoch   {epoch}/2  loss 1.0000  val_loss {loss:.4f}  lr 0.1")
'''
LIES = {  # name of the script: (the line that is wrong, what takes its place, the steps that must fail)
    "train.py": ("", "", []), "train_resume.py": ("start = 2", "start = 1", ["--resume"]),
    "train_evaluate.py": ("2.0100", "2.0200", ["--evaluate"]), "train_freeze.py": ("= 5", "= 9", ["--freeze-layers"]),
    "train_compile.py": ("= 2.0 if", "= 2.2 if", ["--compile"]), "train_stop.py": ("range(start, 3)", "[1]", ["train"]),
    "train_warn.py": ("import sys", "import sys; print('UserWarning: new', file=sys.stderr)", ["warnings"]),
    "train_fail.py": ("start = 2", "start = 2 / 0", ["--resume", "--evaluate"])}


@pytest.mark.nightly
def test_each_wrong_script_is_noticed(tmp_path):
    for folder in ("tools", "benchmarks", "common"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name, (right, wrong, _) in LIES.items():
        assert right in HONEST
        (tmp_path / name).write_text(HONEST.replace(right, wrong, 1) if right else HONEST)
    said = good(run(PYTHON, "-m", "tools.versions", "--here", cwd=tmp_path, quiet=False))
    found = {name: [step for step, text in results.items() if text]
             for name, results in json.loads(said.out)["scripts"].items()}
    assert found == {name: steps for name, (_, _, steps) in LIES.items()}
    said = good(run(PYTHON, "-m", "tools.versions", "--here", "--steps", "evaluate", "--only", "fail",
                    cwd=tmp_path))
    assert {*json.loads(said.out)["scripts"]["train_fail.py"]} == {"train", "--evaluate", "warnings"}


def test_every_script_is_run():
    assert {*versions.SCRIPTS} == {markers.name_of(path) for path in markers.scripts()} | {"check.py"}
    page = (ROOT / "docs/versions.md").read_text()
    assert {*re.findall(r"^\| `(\S+\.py)`", page, re.M)} <= {*versions.SCRIPTS}  # a new one comes with the next table


def test_every_script_is_run_as_its_docstring_says_on_a_task_that_is_small_enough(tmp_path):
    trials = {name: versions.Trial(path, tmp_path, {}) for name, path in versions.SCRIPTS.items()}
    launched = {name for name in trials if any(word.startswith("torch.distributed.") for word in command(name))}
    either = {name for name in trials if name.startswith("loader")}  # one process or several
    assert {name for name, trial in trials.items() if trial.processes == 2} == launched | either
    for wing, option in (("language/", "--windows"), ("detection/", "--image-size")):
        assert all(option in trial.small for name, trial in trials.items() if name.startswith(wing))
    assert [trials[name].small[1] for name in ("train_amp.py", "train.py")] == ["480", "96"]


def test_the_page_begins_with_the_oldest_version_and_no_script_fails_there():
    oldest = re.search(r"^torch>=([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M)[1]
    page = (ROOT / "docs/versions.md").read_text()
    command = re.search(r"python -m tools.versions (\S+) .*?  #", page)[0].partition("  #")[0].strip()
    assert re.search(r"tools.versions (\S+)", command)[1] == oldest and f"| script | {oldest}." in page
    assert "fails" not in page and "not installed" not in page
    assert command in (ROOT / ".github/workflows/versions.yml").read_text()


@pytest.mark.parametrize(("results", "said"), [
    ({"train": "", "--resume": "", "warnings": ""}, "ok"),
    ({"train": "", "--compile": "exit codes [2]: train_TP.py: error: --compile: torch 2.11.0 cannot compile it; use "
                                "torch 2.14 or newer"}, "--compile: needs torch 2.14 or newer"),
    ({"start": "exit codes [2]: loader_DALI.py: error: no DALI: pip install -r requirements/dali.txt"},
     "start: needs requirements/dali.txt"),
    ({"train": "", "--resume": "{} instead of loss 1.0", "warnings": "UserWarning: x"},
     "--resume: **fails**; warnings: **fails**"),
    ({"train": "exit codes [1]: RuntimeError: use torch 2.14 or newer"}, "train: **fails**")])
def test_a_cell_tells_what_failed_from_what_is_refused(results, said):
    assert versions.cell(results) == said
