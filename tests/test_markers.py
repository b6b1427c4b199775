"""Every script is the smallest honest diff from its parent, and its markers say so."""
import markers
import pytest

# the most lines that a script may change, neither blank nor comment
BUDGET = {"train_DP.py": 5, "train_amp.py": 13, "train_grad_accum.py": 15, "train_mp.py": 18, "train_DDP.py": 44,
          "train_elastic.py": 44}


@pytest.mark.parametrize("path", markers.scripts(), ids=lambda path: path.name)
def test_every_difference_from_the_parent_is_marked(path):
    changed = markers.changed_lines(path)
    if markers.parent_of(path) is None:
        assert changed == 0
    else:
        assert 0 < changed <= BUDGET.get(path.name, changed)


def test_the_scripts_are_the_ones_that_have_a_budget():
    assert BUDGET.keys() <= {path.name for path in markers.scripts()}


def test_the_baseline_is_short_and_lines_are_narrow():
    for path in markers.scripts():
        lines = path.read_text().splitlines()
        assert max(map(len, lines)) < 110, path.name
        if path.name == "train.py":
            assert len(lines) <= 170


PARENT = '''"""The parent.

Parent: none
"""
import os


def main():
    # why it counts to three
    for number in range(3):
        print(number)
    print(os.sep)
'''
CHILD = '''"""The child.

Parent: train.py
"""
import os

# new #
import sys


def main():
    # why it counts to three
    for number in range(3):

        # new # standard error keeps order
        print(number, file=sys.stderr)

    print(os.sep)
'''


@pytest.mark.parametrize(("before", "after", "complaint"), [
    ("", "", None),
    ("        # new # standard error keeps order\n", "", "not in a block"),
    ("print(number, file=sys.stderr)\n\n", "print(number, file=sys.stderr)\n", "as in the parent"),
    ("    print(os.sep)\n", "", "no block says why"),
    ("# new #\nimport sys", "# New\nimport sys", "a marker is"),
    ("# new #\nimport sys", "# new #import sys", "a marker is"),
    ("    # why it counts to three\n", "", "no block says why"),
    ("range(3):\n", "range(4):\n", "not in a block"),
    ("    print(os.sep)\n", "    print(os.sep)\n\n    # new #\n    # nothing but a comment\n", "nothing is new"),
    ("    print(os.sep)\n", "    print(os.sep)\n\n    # new #\n    # print(os.sep)\n    print(1)\n", "commented out"),
    ("Parent: train.py", "", "names no parent"),
    ("    print(os.sep)\n", "    # new # no separator: nobody reads it\n", None),
])
def test_the_checker_sees_what_breaks_a_rule(tmp_path, before, after, complaint):
    (tmp_path / "train.py").write_text(PARENT)
    child = tmp_path / "train_child.py"
    child.write_text(CHILD.replace(before, after, 1))
    if complaint is None:
        assert markers.changed_lines(child) == 2 + ("no separator" in after)
    else:
        with pytest.raises(markers.BrokenRule, match=complaint):
            markers.compare(child)


def test_a_grandchild_has_its_parents_reason_as_a_plain_comment(tmp_path):
    (tmp_path / "train.py").write_text(PARENT)
    (tmp_path / "train_child.py").write_text(CHILD)
    grandchild = CHILD.replace("Parent: train.py", "Parent: train_child.py").replace("# new # st", "# st")
    path = tmp_path / "train_grandchild.py"
    path.write_text(grandchild.replace("# new #\n", "") + "\n    # new #\n    print(1)\n")
    assert markers.changed_lines(path) == 1
    path.write_text(grandchild + "\n    # new #\n    print(1)\n")
    with pytest.raises(markers.BrokenRule, match="as in the parent"):
        markers.compare(path)
