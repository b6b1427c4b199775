"""README.md, docs/scripts.md and the wings' pages name every script, and the scripts have the options shown there."""
import re
import runpy
import shlex
import sys

import markers
import pytest
from conftest import ROOT, good, run

README = (ROOT / "README.md").read_text()
WINGS = {name: (ROOT / name / "README.md").read_text() for name in ("detection", "language")}
EXCERPTS = (ROOT / "docs/scripts.md").read_text()


def test_the_results_are_those_that_are_committed():
    from benchmarks import tables

    for page, parts in tables.pages().items():
        marked = (ROOT / page).read_text().split(tables.MARKS[0])[1:]
        assert [text.split(tables.MARKS[1])[0] for text in marked] == parts
        assert all("_DDP.py" in part or "fused" in part or "nanoGPT" in part for part in parts), page


def test_every_script_is_named_in_both_languages_and_has_a_section():
    """The scripts of a wing are named in the wing's README.md, and the others in both languages."""
    scripts = sorted(markers.name_of(path) for path in markers.scripts() if path.parent.name not in WINGS)
    for page in ("README.md", "README.zh-CN.md"):
        text = (ROOT / page).read_text()
        assert sorted(re.findall(r"\[`(\S+\.py)`\]\(\1\)(?: \||: |：)", text)) == scripts, page
        assert all(f"[`{wing}/`]({wing}/README.md)" in text for wing in WINGS), page
    assert sorted(re.findall(r"^## (\S+\.py)$", EXCERPTS, re.M)) == scripts
    for wing, text in WINGS.items():
        scripts = sorted(path.name for path in (ROOT / wing).glob("train*.py"))
        assert sorted(re.findall(r"\[`(\S+\.py)`\]\(\1\) \|", text)) == scripts, wing
        assert sorted(re.findall(r"^## (\S+\.py)$", text, re.M)) == scripts, wing


@pytest.mark.parametrize("path", [  # .ci/run installs DALI before the drills
    pytest.param(path, marks=[pytest.mark.drill] * (path.name == "loader_DALI.py"), id=markers.name_of(path))
    for path in markers.scripts()])
def test_every_option_in_the_readme_and_the_docstrings_exists(path, monkeypatch, capsys):
    """--help lists them, and shows that a script starts without a device or data. All scripts run in one process."""
    docstrings = [script.read_text().split('"""')[1] for script in markers.scripts()]
    texts = "".join([README, EXCERPTS, *WINGS.values(), *docstrings])
    texts = re.sub(r"\\\n\s*", "", texts)  # one line for each command
    name = markers.name_of(path)
    if name == "loader_DALI.py":
        pytest.importorskip("nvidia.dali", reason="no DALI: pip install -r requirements/dali.txt")
    words = " ".join(markers.words(path))
    commands = [line for line in texts.splitlines() if f" {words} " in f"{line} " and "|" not in line
                and re.match(r"\s*(python|torchrun|srun|pip|CUDA)", line)]
    assert commands, f"no command shows {name}"
    used = {word for line in commands for word in shlex.split(line.split(words, 1)[1], comments=True)
            if word.startswith("--")}
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(name, run_name="__main__") if words == name else runpy.run_module(words[3:], run_name="__main__")
    assert not ended.value.code
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out.split("options:", 1)[-1]))
    assert used <= known, f"{name}: {used - known}"


AGENTS = (ROOT / "AGENTS.md").read_text()


def test_the_page_for_assistants_is_short_and_names_scripts_that_exist():
    assert len(AGENTS.splitlines()) <= 60
    named = set(re.findall(r"`((?:minimal/)?(?:train|loader)\w*\.py)`", AGENTS))
    assert len(named) >= 8 and all((ROOT / name).exists() or (ROOT / "minimal" / name).exists() for name in named)


@pytest.mark.parametrize("number, said", [
    pytest.param(0, '"script": "minimal/train_DDP.py"', marks=pytest.mark.drill),
    pytest.param(1, "same: 40 steps", marks=pytest.mark.drill), pytest.param(2, "same: ", marks=pytest.mark.nightly)])
def test_the_commands_for_assistants_run(tmp_path, number, said):
    commands = [text.replace("\\\n", "") for text in re.findall(r"```sh\n(.*?)```", AGENTS, re.S)]
    assert len(commands) == 3
    for folder in ("minimal", "tools", "verify"):
        (tmp_path / folder).symlink_to(ROOT / folder)  # the scripts write into the current folder
    result = good(run(*shlex.split(commands[number]), cwd=tmp_path))
    assert said in result.out
