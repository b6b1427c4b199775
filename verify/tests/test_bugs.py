"""verify on programs in the styles of others: it finds each bug, names its cause, and raises no false alarm."""
import importlib.util
import json

import pytest

from verify.bugs import __main__ as bugs

FOUND = bugs.programs()
ROWS = [row for row in json.loads(bugs.RESULT.read_text())["rows"] if row["program"] in FOUND]
# verify/README.md names these. When verify learns one, `python -m verify.bugs` measures again
NOT_AS_EXPECTED = {row["bug"] or row["program"] for row in ROWS if not all(bugs.right(row, FOUND[row["program"]]))}
CASES = [pytest.param(program, bug, id=name, marks=pytest.mark.xfail(
    name in NOT_AS_EXPECTED, reason="not as expected: verify/README.md", raises=AssertionError, strict=True))
         for program in FOUND.values()
         for name, bug in [(program.name, None), *program.bugs.items()]]


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "bug"), CASES)
def test_verify_gives_the_expected_answer(program, bug):
    for package in program.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}: pip install -r requirements/bench.txt")
    row = bugs.judge(program, bug)
    assert all(bugs.right(row, program)), row


def test_only_the_expected_answer_is_right():
    program = FOUND["megatron"]
    bug = "DeepSpeed-1801"  # clip
    for name, verdict, cause, expected in (
            (None, "same", None, (True, True)), (None, "different", "clip", (False, False)),
            (bug, "same", None, (False, False)), (bug, "same", "metric", (False, False)),
            (bug, "different", "scale", (True, False)), (bug, "different", "clip", (True, True))):
        assert bugs.right({"bug": name, "verdict": verdict, "cause": cause}, program) == expected


def test_the_page_has_the_committed_results():
    assert bugs.table(ROWS, FOUND) in bugs.PAGE.read_text()


def test_each_bug_changes_its_program():
    for program in FOUND.values():
        text = program.path.read_text()
        for bug in program.bugs.values():
            assert bug.options or bugs.wrong_form(text, bug) != text, bug.name
