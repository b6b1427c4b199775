"""The report as JSON: its fields, and what it says of each cause, are those of the pages and of the scripts."""
import json
import re

import markers
import pytest
from conftest import PYTHON, ROOT, run

from verify.__main__ import described

README = (ROOT / "verify/README.md").read_text()
TABLES = {name: json.loads((ROOT / f"verify/{name}.json").read_text()) for name in ("causes", "lost")}
ENTRIES = {f"{name}: {cause}": entry for name, table in TABLES.items() for cause, entry in table.items()}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_every_cause(name):
    table = README.split("\n## The causes\n" if name == "causes" else "\n## Killed and resumed\n")[1].split("\n## ")[0]
    watched = README.split("\n## One run alone\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z-]+)`", table + watched * (name == "causes")))
    assert TABLES[name].keys() <= named, TABLES[name].keys() - named


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_cause_names_a_pitfall_and_a_block_that_exist(entry):
    """tools/markers.py --json prints the block under the same three fields."""
    assert entry["remedy"]
    if entry["pitfall"]:
        assert f"- [{entry['pitfall']} " in (ROOT / "docs/pitfalls/README.md").read_text()
    if entry["copy"]:
        blocks = markers.described(ROOT / entry["copy"]["script"])
        assert any(entry["copy"].items() <= block.items() for block in blocks)


def test_the_fields_are_those_of_the_page(tmp_path):
    section = README.split("\n## The report as JSON\n")[1].split("\n## ")[0]
    documented = {name for cell in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`(\w+)`", cell)}
    for options in ([], ["--watch"], ["--resume", "--fresh", tmp_path / "none"]):
        run(PYTHON, "-m", "verify", "--json", tmp_path / "report.json", *options, "true", *["true"] * (not options))
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["version"] == 1 and report.keys() <= documented, report.keys() - documented


@pytest.mark.parametrize(("rate", "code", "cause"), [
    pytest.param(0.1, 0, None, marks=pytest.mark.nightly),
    pytest.param(0.0, 1, "never-moves", marks=pytest.mark.drill)])
def test_a_watched_run_has_a_report(tmp_path, rate, code, cause):
    """A sound run ends with 0; `cause` is that of the first finding."""
    program, report = tmp_path / "program.py", tmp_path / "report.json"
    program.write_text("import torch\nweight = torch.nn.Parameter(torch.ones(3))\n"
                       f"optimizer = torch.optim.SGD([weight], {rate})\nfor _ in range(4):\n"
                       "    weight.square().sum().backward()\n    optimizer.step()\n")
    done = run(PYTHON, "-m", "verify", "--watch", "--json", report, f"{PYTHON} {program}")
    assert (done.code, json.loads(report.read_text())["cause"]) == (code, cause), done


def test_the_place_is_the_first_one_in_the_message():
    report = {"cause": "random", "message": "drawn in loop.py:12, module drop (torch); then model.py:7"}
    found = described(report, TABLES["causes"])
    assert (found["file"], found["line"]) == ("loop.py", 12)
    assert found["remedy"] == TABLES["causes"]["random"]["remedy"]
    assert described({"cause": None, "message": "44 steps"}, TABLES["causes"])["line"] is None
