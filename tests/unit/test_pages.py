"""The pages on pitfalls, errors and hangs: their links lead somewhere, and what they show of the examples is true."""
import ast
import re
import runpy
import warnings
from pathlib import Path

import pytest
import texts
import torch
import torch.distributed as dist

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["pitfalls.md", "errors.md", "hangs.md", "your-own-loop.md"]
TEN = "D1 P12 D2 P13 D6 E4 D5 S8 E5 E8".split()
EXAMPLES = runpy.run_path(str(DOCS / "examples/errors.py"))
ROWS = [re.split(r" \| ", line.strip("| ")) for line in (DOCS / "errors.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| the terminal")]
NAMED = {name: row[0] for row in ROWS for name in re.findall(r"`(\w+)`", row[2]) if not row[2].startswith("Source")}
PROCESSES = {"shapes", "two_forwards", "peer", "open_files", "shared_memory"}  # tests/drills/test_hangs.py starts them


def anchors(path):
    """Return the anchors that GitHub makes of a page's headings."""
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)", path.read_text(), re.M)}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for file in re.findall(r"`(tests/[\w/]+\.py)`", (DOCS / page).read_text()):
        assert (DOCS.parent / file).exists(), file
    for target in re.findall(r"\]\((?!http)([^)]+)\)", (DOCS / page).read_text()):
        file, _, anchor = target.partition("#")
        assert (DOCS / (file or page)).exists(), target
        assert not anchor or anchor in anchors(DOCS / (file or page)), target


def test_the_pitfalls_are_ranked_and_a_wrong_line_is_code():
    traps = texts.read_traps(DOCS / "pitfalls.md")
    assert list(traps)[:10] == TEN and list(traps)[-4:] == ["S1", "S10", "S12", "E12"]
    assert [name for name, trap in traps.items() if trap.wrong.startswith("#")] == []


def test_the_index_has_every_example_and_a_source_for_every_other_error():
    assert len(ROWS) >= 25 and all(len(row) == 3 for row in ROWS)
    assert NAMED.keys() == {error.__name__ for error in EXAMPLES["ERRORS"]}
    assert all("](https://" in row[2] for row in ROWS if row[2].startswith("Source"))


@pytest.mark.parametrize("error", [error for error in EXAMPLES["ERRORS"] if error.__name__ not in PROCESSES],
                         ids=lambda error: error.__name__)
def test_an_example_produces_the_message(error, capfd, monkeypatch):
    if error.__name__ == "nccl" and (torch.cuda.is_available() or not dist.is_nccl_available()):
        pytest.skip("needs a torch with NCCL on a machine without a GPU")
    monkeypatch.delenv("RANK", raising=False)
    said = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            error()
        except (Exception, SystemExit) as raised:
            said = f"{raised}"
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    said = "\n".join([said, *(str(warning.message) for warning in warned), *capfd.readouterr()])
    messages = [found[1] for found in re.findall(r"(`+)(.+?)\1(?!`)", NAMED[error.__name__])]
    patterns = [".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", message))) for message in messages]
    assert any(re.search(pattern, said, re.S) for pattern in patterns), said


def test_the_stacks_on_hangs_name_lines_of_the_example():
    functions = [node for node in ast.parse((DOCS / "examples/hang.py").read_text()).body
                 if isinstance(node, ast.FunctionDef)]
    shown = set(re.findall(r"^ +(\w+) \(hang\.py:(\d+)\)", (DOCS / "hangs.md").read_text(), re.M))
    assert {name for name, _ in shown} == {"main", "validate", "next_batch"}
    for name, line in shown:
        node, = (node for node in functions if node.name == name)
        assert node.lineno < int(line) <= node.end_lineno, f"{name} (hang.py:{line})"
