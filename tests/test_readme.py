"""README.md and docs/scripts.md name every script, and the scripts have the options that these pages use."""
import re
import runpy
import shlex
import sys

import markers
import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
EXCERPTS = (ROOT / "docs/scripts.md").read_text()


def test_the_results_are_those_that_are_committed():
    from benchmarks import tables

    for page, parts in tables.pages().items():
        marked = (ROOT / page).read_text().split(tables.MARKS[0])[1:]
        assert [text.split(tables.MARKS[1])[0] for text in marked] == parts
        assert all("_DDP.py" in part or "fused" in part or "nanoGPT" in part for part in parts), page


def test_every_script_is_named_in_both_languages_and_has_a_section():
    scripts = sorted(map(markers.name_of, markers.scripts()))
    for page in ("README.md", "README.zh-CN.md"):
        assert sorted(re.findall(r"\[`(\S+\.py)`\]\(\1\)(?: \||: |：)", (ROOT / page).read_text())) == scripts, page
    assert sorted(re.findall(r"^## (\S+\.py)$", EXCERPTS, re.M)) == scripts


@pytest.mark.parametrize("path", [  # .ci/run installs DALI before the drills
    pytest.param(path, marks=[pytest.mark.drill] * (path.name == "loader_DALI.py"), id=markers.name_of(path))
    for path in markers.scripts()])
def test_every_option_in_the_readme_and_the_docstrings_exists(path, monkeypatch, capsys):
    """--help lists them, and shows that a script starts without a device or data. All scripts run in one process."""
    texts = README + EXCERPTS + "".join((path.read_text().split('"""')[1] for path in markers.scripts()))
    texts = re.sub(r"\\\n\s*", "", texts)  # one line for each command
    name = markers.name_of(path)
    if name == "loader_DALI.py":
        pytest.importorskip("nvidia.dali", reason="no DALI: pip install -r requirements-dali.txt")
    commands = [line for line in texts.splitlines() if f" {name} " in f"{line} " and "|" not in line
                and re.match(r"\s*(python|torchrun|srun|pip|CUDA)", line)]
    assert commands, f"no command shows {name}"
    used = {word for line in commands for word in shlex.split(line.split(name, 1)[1], comments=True)
            if word.startswith("--")}
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out.split("options:", 1)[-1]))
    assert used <= known, f"{name}: {used - known}"
