"""All pages: links work, and excerpts, counts and messages match the scripts and the examples."""
import re
import runpy
import warnings
from collections import Counter

import markers
import pytest
import texts
import torch
import torch.distributed as dist
from conftest import ROOT

DOCS = ROOT / "docs"
PAGES = [path.relative_to(ROOT).as_posix() for pages in ("*.md", "[a-z]*/*.md", "docs/*/*.md")
         for path in ROOT.glob(pages)]
EXAMPLES = runpy.run_path(str(DOCS / "examples/errors.py"))
ROWS = [re.split(r" \| ", line.strip("| ")) for line in (DOCS / "errors.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| the terminal")]
NAMED = {name: row[0] for row in ROWS for name in re.findall(r"`(\w+)`", row[2]) if not row[2].startswith("Source")}
# tests/drills/test_hangs.py starts these
PROCESSES = {"shapes", "two_forwards", "peer", "sizes", "open_files", "shared_memory", "worker_exits", "worker_raises"}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    text = (ROOT / page).read_text()
    for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / file).exists(), file
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / file if file else ROOT / page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.+)", linked.read_text(), re.M) if anchor else []
        assert not anchor or anchor in map(texts.slug, headings), target


@pytest.mark.parametrize("page", PAGES)
def test_no_paragraph_is_joined_to_the_one_before(page):
    """Its first line would begin with one space, as when a paragraph is wrapped again."""
    assert not re.findall(r"^ \S.*", (ROOT / page).read_text(), re.M)


@pytest.mark.parametrize("page", PAGES)
def test_every_excerpt_stands_in_its_file(page):
    """A page with excerpts names the file of each of its blocks of Python."""
    text = (ROOT / page).read_text()
    excerpts = re.findall(r"<!-- (\S+\.py) -->\n```python\n(.*?)```", text, re.S)
    assert len(excerpts) in (0, text.count("```python"))
    for file, lines in excerpts:
        assert lines in (ROOT / file).read_text(), f"{file}:\n{lines}"


def test_the_page_shows_every_edit_of_the_minimal_pair():
    """As diffs, and nothing else; comments on their own lines are left out."""
    one, two = ([line.strip() for line in (ROOT / name).read_text().split("import argparse")[1].splitlines()
                 if re.match(markers.CODE, line)] for name in ("minimal/train.py", "minimal/train_DDP.py"))
    shown = "".join(re.findall(r"```diff\n(.*?)```", (DOCS / "your-own-loop.md").read_text(), re.S))
    for sign, lines, others in (("-", one, two), ("+", two, one)):
        assert Counter(re.findall(rf"^ +\{sign} *(.+)", shown, re.M)) == Counter(lines) - Counter(others)


def test_every_example_of_a_loop_is_in_the_page():
    """errors.py, hang.py and see.py are for other pages."""
    examples = {path.name for path in (DOCS / "examples").glob("*.py")} - {"errors.py", "hang.py", "see.py"}
    shown = re.findall(r"`verify` on \[`(\w+\.py)`\]\(examples/\1\)", (DOCS / "your-own-loop.md").read_text())
    assert examples == set(shown)


def test_the_index_has_every_example_and_a_source_for_every_other_error():
    assert all(len(row) == 3 for row in ROWS)
    assert NAMED.keys() == {error.__name__ for error in EXAMPLES["ERRORS"]}
    assert all("](https://" in row[2] for row in ROWS if row[2].startswith("Source"))


@pytest.mark.parametrize("error", [error for error in EXAMPLES["ERRORS"] if error.__name__ not in PROCESSES],
                         ids=lambda error: error.__name__)
def test_an_example_produces_the_message(error, capfd, alone, request):
    torch.set_warn_always(True)  # else, torch's C++ does not repeat what it warned of in an earlier test
    request.addfinalizer(lambda: torch.set_warn_always(False))
    if error.__name__ == "nccl" and (torch.cuda.is_available() or not dist.is_nccl_available()):
        pytest.skip("needs a torch with NCCL on a machine without a GPU")
    said = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            error()
        except (Exception, SystemExit) as raised:
            said = f"{type(raised).__name__}: {raised}"
    said = "\n".join([said, *(str(warning.message) for warning in warned), *capfd.readouterr()])
    messages = [found[1] for found in re.findall(r"(`+)(.+?)\1(?!`)", NAMED[error.__name__])]
    patterns = [".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", message))) for message in messages]
    assert any(re.search(pattern, said, re.S) for pattern in patterns), said
