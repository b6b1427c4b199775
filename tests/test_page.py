"""The page can be built, it loads nothing, and its source texts have the required form."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import build_page
import markers
import pytest
import texts
from conftest import TORCHRUN, good, run

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MUTATIONS = texts.read_mutations(ROOT / "tools/mutations.txt")


def test_the_texts_fit_the_scripts():
    build_page.read()


def test_a_script_follows_all_its_parents():
    scripts = build_page.read_scripts()
    names = [*scripts]
    assert all(names.index(parent) < names.index(name) for name in names for parent in scripts[name].parents)


def test_a_marker_names_the_ideas_that_meet():
    def ideas(tag, reason=""):
        tags = {"DDP", "amp", "grad_accum", "combined"}
        return build_page.ideas_of(markers.Block(1, 2, tag, reason), tags)

    assert ideas("combined", "amp + grad_accum: one scale: why") == ["combined", "amp", "grad_accum"]
    assert ideas("combined", "amp: why") == ["combined", "amp"]
    assert ideas("grad_accum", "no METRICS: why") == ["grad_accum"]
    assert ideas("DDP", "first: why") == ["DDP"]
    with pytest.raises(markers.BrokenRule, match="no block of one"):
        ideas("combined", "amp + grad_acum: why")


@pytest.mark.parametrize("path", [path for path in markers.scripts() if len(markers.parents_of(path)) > 1],
                         ids=lambda path: path.name)
def test_a_merging_script_names_each_idea_whose_lines_it_replaces(path):
    tags = {block.tag for block in markers.find_blocks(path)}
    named = {idea for block in markers.compare(path) for idea in build_page.ideas_of(block, tags)}
    kept = {line.strip() for line in path.read_text().splitlines()}
    for parent in markers.parents_of(path):
        lines = parent.read_text().splitlines()
        for block in markers.compare(parent):
            if not kept.issuperset(line.strip() for line in lines[block.first - 1:block.last]):
                assert not named.isdisjoint(build_page.ideas_of(block, tags)), lines[block.first - 1]


def test_a_mutation_leaves_code():
    for mutation in MUTATIONS.values():
        text = (ROOT / mutation.file).read_text()
        assert mutation.put_back(text) != text
        ast.parse(mutation.put_back(text), mutation.name)


@pytest.mark.drill
def test_a_mutation_names_a_test():
    named = {mutation.test for mutation in MUTATIONS.values() if mutation.test.startswith("tests/")}
    files = sorted({name.split("::")[0] for name in named})
    said = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *files], cwd=ROOT,
                          capture_output=True, text=True)
    found = set(said.stdout.splitlines())
    assert not named - found - {test.split("[")[0] for test in found}


def test_each_pitfall_shows_code_and_has_a_mutation():
    traps = texts.read_traps(DOCS / "pitfalls", MUTATIONS)
    assert {name.split(".")[0] for name in MUTATIONS} == set(traps)
    for trap in traps.values():
        for code in (trap.wrong, trap.right):
            ast.parse(code, trap.name)


@pytest.mark.parametrize("spoil", [
    lambda text: text.replace("**Symptom:**", "**Symptoms:**", 1),
    lambda text: text.replace("**Cause:**", "Cause:", 1),
    lambda text: text.replace("## S2 ", "## S1 ", 1),
    lambda text: text.replace("## E4 ", "## P4 ", 1),
    lambda text: text.replace("## L2 ", "## L4 ", 1).replace("## L4 ", "## L2 "),
    lambda text: text.replace("**Right:**\n\n```python", "**Right:**\n\nsee ```python", 1),
])
def test_a_pitfall_out_of_form_is_refused(tmp_path, spoil):
    for name in texts.LETTERS.values():
        (tmp_path / name).write_text(spoil((DOCS / "pitfalls" / name).read_text()))
    with pytest.raises(texts.TextError):
        texts.read_traps(tmp_path, MUTATIONS)


def test_an_index_that_is_not_up_to_date_is_refused(monkeypatch):
    monkeypatch.setattr(texts, "index", lambda text, _: text + "- another entry\n")
    with pytest.raises(texts.TextError, match="pitfalls/README.md: not up to date"):
        build_page.read()


def test_the_index_lists_each_pitfall_once_with_its_present_title():
    text, traps = (DOCS / "pitfalls/README.md").read_text(), texts.read_traps(DOCS / "pitfalls", MUTATIONS)
    for before, after in [("[S2 Without", "[S2 With"), ("](starting.md#s2", "](data.md#s2")]:
        assert text != text.replace(before, after) and text == texts.index(text.replace(before, after), traps)
    for before, after, names in [("- [D1 ", "- D1 ", "D1"), ("- [D1 ", "- [D99 ", "D1, D99"),
                                 ("- [D1 ", "- [D1 ](twice)\n- [D1 ", "D1")]:
        with pytest.raises(texts.TextError, match=f"list each pitfall once, below its symptom: {names}$"):
            texts.index(text.replace(before, after), traps)


def test_the_page_shows_each_pitfall_below_its_symptom():
    text, traps = (DOCS / "pitfalls/README.md").read_text(), texts.read_traps(DOCS / "pitfalls", MUTATIONS)
    shown = build_page._prose("pitfalls/README.md", texts.by_symptom(text, traps), DOCS, set(traps))
    order = re.findall(r'<(?:article|h3) id="(?:pitfalls-)?(.+?)"', shown)
    assert order == [name or texts.slug(heading) for name, heading in re.findall(
        r"^(?:- \[([A-Z]\d+) .*|###? (.+))$", text, re.M)]
    assert '<a href="#E16">' in build_page._prose("pitfalls/x.md", "[a](saving.md#e16-one)", DOCS, {"E16"})
    assert '<a href="errors.md#a">' in build_page._prose("pitfalls/x.md", "[a](../errors.md#a)", DOCS, set())
    for broken in ("../nowhere.md", "saving.md#e99-what", "README.md#it-does-not-stop"):
        with pytest.raises(texts.TextError, match="pitfalls/x.md: broken link: .+"):
            build_page._prose("pitfalls/x.md", f"[a]({broken})", DOCS, {"E16"})


def test_links_lead_to_this_page_or_to_the_files(monkeypatch):
    monkeypatch.delenv("REPOSITORY", raising=False)
    assert build_page._address("pitfalls/saving.md", "e5-every-key-begins-with-module") == "#E5"
    assert build_page._address("pitfalls/README.md", "it-is-slow") == "#pitfalls-it-is-slow"
    assert build_page._address("pitfalls/sharding.md", "") == "pitfalls/sharding.md"
    assert build_page._address("../README.md", "run") == "../README.md#run"
    monkeypatch.setenv("REPOSITORY", "https://example.org/blob/main")
    assert build_page._address("../README.md", "run") == "https://example.org/blob/main/README.md#run"
    assert build_page._address("errors.md", "") == "https://example.org/blob/main/docs/errors.md"


def test_a_right_line_that_no_file_has_is_refused():
    with pytest.raises(texts.TextError, match="D1"):
        MUTATIONS["D1"].put_back("sampler.set_epochs(epoch)\n")


@pytest.mark.nightly
def test_gloo_mixes_up_gradients_as_the_pitfall_says(tmp_path):
    """If the first gradient is right, torch has fixed pitfall L6."""
    trap, right, found = texts.read_traps(DOCS / "pitfalls", MUTATIONS)["L6"], "[[0.0, 4.0, 8.0], [2.0, 6.0, 10.0]]", []
    for lines in (trap.right.splitlines()[0], trap.right):
        (tmp_path / "gather.py").write_text(trap.wrong.replace(trap.right.splitlines()[0], lines))
        found.append(good(run(*TORCHRUN, "--nproc-per-node=2", tmp_path / "gather.py", quiet=False)).out)
    assert found[1].count(right) == 2 and right not in found[0]  # -u prints the end of a line separately


@pytest.mark.nightly
def test_what_how_it_works_says_can_be_seen():
    text = (DOCS / "how-it-works.md").read_text()
    commands = re.findall(r"```console\n(.*?)\n```", text)
    assert len(commands) == text.count("\n## ") == text.count("![")
    shown = subprocess.run([sys.executable, "docs/examples/see.py"], cwd=ROOT, capture_output=True, text=True,
                           timeout=180)
    assert shown.returncode == 0, shown.stderr[-2000:]
    ideas = [command.split()[-1] for command in commands if "see.py" in command]
    assert all(re.search(rf"^{idea}: ", shown.stdout, re.M) for idea in ideas)
    in_ring = shown.stdout.count("1.50 times its gradients; the sum is right: True")  # 2 (N - 1) / N
    assert in_ring == 4
    difference = float(re.search(r"largest difference (\S+)", shown.stdout)[1])
    assert difference < 1e-6
    counts = re.findall(r"(\w+) no_sync\(\) +all-reduces: (\d)", shown.stdout)
    assert counts == [("without", "4"), ("with", "1")]
    own, all_boxes = (float(error) for error in re.findall(r"relative error (\S+)", shown.stdout))
    assert own > 0.1 and all_boxes < 1e-6
    ddp, zero, fsdp = re.findall(r"weights +(\S+) MB +gradients +(\S+) MB +optimizer +(\S+) MB", shown.stdout)
    assert zero[:2] == ddp[:2] and zero[2] == fsdp[2]
    assert all(float(part) == pytest.approx(float(whole) / 4, abs=0.1) for part, whole in zip(fsdp, ddp, strict=True))
    errors = re.findall(r"from whole layers (\S+)", shown.stdout)
    assert len(errors) == 4 and max(map(float, errors)) < 1e-5
    idle = re.findall(r"idle (\S+), .* = (\S+)", shown.stdout)
    assert len(idle) == 3 and all(measured == formula for measured, formula in idle)
    calls = re.findall(r"^(\w+) +(\d+) x (\S+) +(\S+) kB", shown.stdout, re.M)
    assert [line for line in calls if line[2] != "all-reduce"] == [
        ("data", "1", "all-gather", "65.8"), ("data", "4", "all-gather", "213.5"),
        ("data", "1", "reduce-scatter", "65.8"), ("data", "2", "reduce-scatter", "213.5"),
        ("tensor", "10", "all-gather", "131.1"), ("tensor", "10", "reduce-scatter", "131.1"),
        ("context", "4", "all-gather", "131.1"), ("context", "4", "reduce-scatter", "131.1"),
        ("pipeline", "2", "send", "65.5")]
    assert "reads [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]" in shown.stdout and "without .metadata: Ch" in shown.stdout
