"""tools/versions.py: its table, and that it knows every script and the oldest version."""
import re

import markers
import pytest
from conftest import ROOT

from tools import versions


def test_every_script_is_run():
    assert {*versions.SCRIPTS} == {markers.name_of(path) for path in markers.scripts()} | {"check.py"}
    page = (ROOT / "docs/versions.md").read_text()
    assert re.findall(r"^\| `(\S+\.py)`", page, re.M) == [*versions.SCRIPTS]


def test_the_page_begins_with_the_oldest_version_and_no_script_fails_there():
    oldest = re.search(r"^torch>=([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M)[1]
    page = (ROOT / "docs/versions.md").read_text()
    command = re.search(r"python -m tools.versions (\S+) .*?  #", page)[0].partition("  #")[0].strip()
    assert re.search(r"tools.versions (\S+)", command)[1] == oldest and f"| script | {oldest}." in page
    assert "fails" not in page and "not installed" not in page
    assert command in (ROOT / ".github/workflows/versions.yml").read_text()


@pytest.mark.parametrize(("results", "said"), [
    ({"train": "", "--resume": "", "warnings": ""}, "ok"),
    ({"train": "", "--compile": "exit codes [2]: train_lm_TP.py: error: --compile: torch 2.11.0 cannot compile it; use "
                                "torch 2.14 or newer"}, "--compile: needs torch 2.14 or newer"),
    ({"start": "exit codes [2]: loader_DALI.py: error: no DALI: pip install -r requirements-dali.txt"},
     "start: needs requirements-dali.txt"),
    ({"train": "", "--resume": "{} instead of loss 1.0", "warnings": "UserWarning: x"},
     "--resume: **fails**; warnings: **fails**"),
    ({"train": "exit codes [1]: RuntimeError: use torch 2.14 or newer"}, "train: **fails**")])
def test_a_cell_tells_what_failed_from_what_is_refused(results, said):
    assert versions.cell(results) == said
