"""README.md and docs/scripts.md: their excerpts, line counts and options are those of the scripts."""
import re
import runpy
import shlex
import sys

import markers
import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
EXCERPTS = (ROOT / "docs/scripts.md").read_text()


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def test_the_blocks_stand_in_the_scripts():
    blocks = re.findall(r"<!-- (\S+) -->\n```python\n(.*?)```", EXCERPTS, re.S)
    assert len(blocks) >= 6 and (README + EXCERPTS).count("```python") == len(blocks)
    for script, block in blocks:
        assert block in (ROOT / script).read_text(), f"{script}:\n{block}"


def test_the_results_are_those_that_are_committed():
    from benchmarks import tables

    for page, parts in tables.pages().items():
        marked = (ROOT / page).read_text().split(tables.MARKS[0])[1:]
        assert [text.split(tables.MARKS[1])[0] for text in marked] == parts
        assert all("_DDP.py" in part or "fused" in part for part in parts), page


def test_the_table_has_every_script_its_parent_and_its_number_of_lines():
    rows = re.findall(r"^\| \[`(\S+)`\]\((\S+)\) \| (.+?) \| .*? \| (\d+) \|", README, re.M)
    table = {script: (link, parents.replace("`", ""), int(lines)) for script, link, parents, lines in rows}
    found = {}
    for path in markers.scripts():
        parents = ", ".join(map(name_of, markers.parents_of(path))) or "-"
        found[name_of(path)] = name_of(path), parents, sum(block.changed for block in markers.compare(path))
    assert table == found


def test_every_script_has_a_section_and_a_place_in_the_decision_tree():
    scripts = set(map(name_of, markers.scripts()))
    assert set(re.findall(r"^## (\S+\.py)$", (ROOT / "docs/scripts.md").read_text(), re.M)) == scripts
    assert set(re.findall(r">([\w/]+\.py)<", (ROOT / "docs/figures/which-script.svg").read_text())) == scripts
    assert all(name in README.split("![Decision tree.")[1].split("]")[0] for name in scripts)


@pytest.mark.parametrize("path", [  # .ci/run installs DALI before the drills
    pytest.param(path, marks=[pytest.mark.drill] * (path.name == "loader_DALI.py"), id=name_of(path))
    for path in markers.scripts()])
def test_every_option_in_the_readme_and_the_docstrings_exists(path, monkeypatch, capsys):
    """Those of --help, which also shows that a script starts without a device or data; not in 20 processes."""
    texts = README + EXCERPTS + "".join((path.read_text().split('"""')[1] for path in markers.scripts()))
    texts = re.sub(r"\\\n\s*", "", texts)  # one line for each command
    name = name_of(path)
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
