"""Every script is a small, marked diff of its parents."""
import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter

import markers
import pytest

SCRIPTS = markers.scripts()
CHILDREN = [path for path in SCRIPTS if len(markers.parents_of(path)) == 1]
compare = functools.cache(markers.compare)  # of the scripts, which do not change meanwhile


@pytest.mark.parametrize("path", CHILDREN, ids=markers.name_of)
def test_a_plain_diff_shows_the_docstring_and_the_own_blocks(path):
    """The diff shows nothing else: at most one hunk per own block."""
    [parent] = markers.parents_of(path)
    shown = subprocess.run(["diff", "--unified=0", parent, path], capture_output=True, text=True).stdout
    hunks = re.findall(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", shown, re.M)
    assert hunks
    blocks = compare(path)
    own = {number for block in blocks for number in range(block.first, block.last + 1)}
    replaced = {number for block in blocks for number in block.removed}
    found = 0
    for old, old_size, new, new_size in hunks:
        added = {number for number, _ in markers.numbered(path, [])} & {*range(int(new), int(new) + int(new_size or 1))}
        gone = {number for number, _ in markers.numbered(parent, [])}
        gone &= {*range(int(old), int(old) + int(old_size or 1))}
        assert added <= own and gone <= replaced, f"{path}:{new}"
        found += bool(added or gone)
    assert found <= len(blocks)


# the most changed lines that an idea may need
BUDGETS = {"train_DP.py": 5, "train_DDP.py": 44, "train_mp.py": 18, "train_amp.py": 16, "train_grad_accum.py": 16,
           "train_elastic.py": 46, "train_FSDP.py": 28, "train_TP.py": 16, "train_PP.py": 44, "train_DCP.py": 26,
           "language/train_DDP.py": 3, "language/train_combined.py": 9, "language/train_FSDP.py": 5,
           "language/train_SFT.py": 30, "language/train_LoRA.py": 30, "language/train_DPO.py": 30,
           "language/train_GRPO.py": 60,
           "language/train_TP.py": 20, "language/train_CP.py": 30, "language/train_EP.py": 41,
           "language/train_4D.py": 40, "detection/train_DDP.py": 4, "detection/train_amp.py": 4,
           "minimal/train_DDP.py": 24, "minimal/train_amp.py": 8, "minimal/train_resume.py": 14,
           "minimal/train_grad_accum.py": 10, "minimal/train_FSDP.py": 16}


@pytest.mark.parametrize("path", SCRIPTS, ids=markers.name_of)
def test_a_script_changes_few_lines_and_marks_them(path):
    assert max(map(len, path.read_text().splitlines())) < 110
    changed, parents = sum(block.changed for block in compare(path)), markers.parents_of(path)
    assert bool(changed) == bool(parents) or len(parents) > 1  # two parents may have every line
    assert changed <= BUDGETS.get(markers.name_of(path), 100)


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

# new # child
import sys


def main():
    # why it counts to three
    for number in range(3):

        # new # child: standard error keeps order
        print(number, file=sys.stderr)

    print(os.sep)
'''
OTHER = PARENT.replace("Parent: none", "Parent: train.py").replace(
    "    print(os", "\n    # new # other\n    print()\n\n    print(os")


@pytest.fixture
def family(tmp_path):
    """Return a function that writes a file beside the parent and two children of it, and compares it."""
    for name, text in [("train.py", PARENT), ("train_child.py", CHILD), ("train_other.py", OTHER)]:
        (tmp_path / name).write_text(text)

    def compare(name, text):
        (tmp_path / name).write_text(text)
        return sum(block.changed for block in markers.compare(tmp_path / name))

    return compare


@pytest.mark.parametrize(("before", "after", "complaint"), [
    ("", "", None),
    ("        # new # child: standard error keeps order\n", "", "not in a block"),
    ("print(number, file=sys.stderr)\n\n", "print(number, file=sys.stderr)\n", "not all of this block is new"),
    ("    print(os.sep)\n", "", "no block replaces"),
    ("# new # child\nimport sys", "# New\nimport sys", "a marker is"),
    ("# new # child\nimport sys", "# new # child import sys", "a marker is"),
    ("# new # child\n", "# new # other\n", "not in a block"),
    ("    # why it counts to three\n", "", "no block replaces"),
    ("range(3):\n", "range(4):\n", "not in a block"),
    ("import sys\n\n\ndef", "import sys\n\ndef", None),  # the blank lines beside an own block are its own
    ("def main():\n", "def main():\n\n", "no block replaces"),
    ("    print(os.sep)\n", "    print(os.sep)\n\n    # new # child\n    # nothing but a comment\n", "is new"),
    ("    print(os.sep)\n", "    print(os.sep)\n\n    # new # child\n    # print(os.sep)\n    print()\n", "commented"),
    ("Parent: train.py", "", "names no parent"),
    ("    print(os.sep)\n", "    # new # child: no separator: nobody reads it\n", None),
])
def test_the_checker_sees_what_breaks_a_rule(family, before, after, complaint):
    text = CHILD.replace(before, after, 1)
    if complaint is None:
        assert family("train_child.py", text) == 2 + ("no separator" in after)
    else:
        with pytest.raises(markers.BrokenRule, match=complaint):
            family("train_child.py", text)


def test_a_grandchild_keeps_its_ancestors_blocks(family):
    grandchild = CHILD.replace(": train.py", ": train_child.py") + "\n    # new # grandchild\n    print(1)\n"
    assert family("train_grandchild.py", grandchild) == 1
    with pytest.raises(markers.BrokenRule, match="not in a block"):
        family("train_grandchild.py", grandchild.replace("# new # child: standard", "# standard"))


def test_a_marker_heads_something(family):
    """A grandchild replaces the line of a child's block: the child's marker goes with it."""
    marker = "        # new # child: standard error keeps order\n"
    grandchild = CHILD.replace(": train.py", ": train_child.py")
    block = "        # new # grandchild\n        print(number, number)\n"
    whole = marker + "        print(number, file=sys.stderr)\n"
    assert family("train_grandchild.py", grandchild.replace(whole, block)) == 1
    with pytest.raises(markers.BrokenRule, match="heads nothing: # new # child"):
        family("train_grandchild.py", grandchild.replace(whole, marker + "\n" + block))


def test_a_block_that_only_removes_lines_is_kept_as_it_is(family):
    removing = CHILD.replace("    print(os.sep)\n", "    # new # child: no separator: nobody reads it\n")
    assert family("train_child.py", removing) == 3
    grandchild = removing.replace(": train.py", ": train_child.py") + "\n    # new # grandchild\n    print(1)\n"
    assert family("train_grandchild.py", grandchild) == 1


def test_what_a_reader_replaces_stands_below_its_mark(family):
    parent = PARENT.replace("    for", "    # yours: the range\n    for")
    child = CHILD.replace("    for", "    # yours: the range\n    for")
    family("train.py", parent)
    assert family("train_child.py", child) == 2
    block = "    # new # child\n    for number in range(4):\n"
    replaced = child.replace("    for number in range(3):\n", block)
    assert family("train_child.py", replaced) == 3
    with pytest.raises(markers.BrokenRule, match="heads nothing: # yours: the range"):
        family("train_child.py", replaced.replace(block, "\n" + block))


WING = """

# new # child
import sys


def main():
    # why it counts to three
    for number in "abc":

        # new # child: standard error keeps order
        print(number, file=sys.stderr)

    print(os.sep)
"""


@pytest.mark.parametrize(("before", "after", "complaint"), [
    ("", "", None),
    ("        # new # child: standard error keeps order\n        print(number, file=sys.stderr)\n",
     "        # new # child: letters are upper case\n        print(number.upper(), file=sys.stderr)\n", None),
    ("\n        # new # child: standard error keeps order\n        print(number, file=sys.stderr)\n\n",
     "        print(number)\n", "in an own block says why the script leaves out: standard error keeps order"),
    ("        # new # child: standard error keeps order\n        print(number, file=sys.stderr)\n\n",
     "        # new # child: no standard error: letters may come in any order\n\n        print(number)\n", None),
    ("keeps order\n", "keeps order\n        print()\n", "not all of this block is new"),
    ('"abc"', '"abcd"', "not in a parent at this place")])
def test_a_wing_takes_the_blocks_of_a_parent_in_another_folder(tmp_path, before, after, complaint):
    """They stay word for word, or are own blocks; a whole block can go if a comment says why."""
    (tmp_path / "wing").mkdir()
    for name, text in [("train.py", PARENT), ("train_child.py", CHILD), ("wing/train.py", PARENT.replace(
            "range(3)", '"abc"'))]:
        (tmp_path / name).write_text(text)
    doc = '"""The wing.\n\nParents: train.py, ../train_child.py\n"""\nimport os'
    assert before in WING
    (tmp_path / "wing/train_child.py").write_text(doc + WING.replace(before, after, 1))
    if complaint is None:
        markers.compare(tmp_path / "wing/train_child.py")
    else:
        with pytest.raises(markers.BrokenRule, match=complaint):
            markers.compare(tmp_path / "wing/train_child.py")


def test_a_parents_comment_does_not_say_why_a_wing_leaves_out_a_block(tmp_path):
    separator = "    print(os.sep)\n", "    # new # child: no separator: nobody reads it\n"
    block = "\n        # new # child: standard error keeps order\n        print(number, file=sys.stderr)\n\n"
    (tmp_path / "wing").mkdir()
    (tmp_path / "train.py").write_text(PARENT)
    (tmp_path / "train_child.py").write_text(CHILD.replace(*separator))
    (tmp_path / "wing/train.py").write_text(PARENT.replace("range(3)", '"abc"'))
    doc = '"""The wing.\n\nParents: train.py, ../train_child.py\n"""\nimport os'
    wing = WING.replace(*separator).replace(block, "        print(number)\n")
    (tmp_path / "wing/train_child.py").write_text(doc + wing)
    with pytest.raises(markers.BrokenRule, match="says why the script leaves out: standard error"):
        markers.compare(tmp_path / "wing/train_child.py")


def test_a_wing_keeps_each_line_of_an_idea_of_another_folder(tmp_path):
    for path in SCRIPTS:
        copy = tmp_path / markers.name_of(path)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    wing, line = tmp_path / "language/train_combined.py", "            scaler.unscale_(optimizer)\n"
    assert line in wing.read_text()
    wing.write_text(wing.read_text().replace(line, ""))
    with pytest.raises(markers.BrokenRule, match="no block replaces what follows this line in train_combined.py"):
        markers.compare(wing)


def test_a_script_of_several_parents_takes_each_line_from_one_of_them(family):
    both = CHILD.replace("Parent: train.py", "Parents: train_child.py, train_other.py").replace(
        "    print(os", "    # new # other\n    print()\n\n    print(os")
    assert family("train_both.py", both) == 0
    assert family("train_both.py", both + "\n    # new # both\n    print(2)\n") == 1
    for lost in ("    print()\n", "import os\n"):
        with pytest.raises(markers.BrokenRule, match="no block replaces what follows this line in train_"):
            family("train_both.py", both.replace(lost, "", 1))
    with pytest.raises(markers.BrokenRule, match="not in a block"):
        family("train_both.py", both + "    print(2)\n")


def test_a_script_without_a_parent_has_no_blocks(family):
    with pytest.raises(markers.BrokenRule, match="not in a block"):
        family("train.py", PARENT + "\n    # new # main\n    print(1)\n")


def run(*arguments):
    command = [sys.executable, "tools/markers.py", *arguments]
    return subprocess.run(command, cwd=markers.ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("path", SCRIPTS, ids=markers.name_of)
def test_a_plain_script_does_the_same_and_keeps_each_line(path):
    plain = markers.plain(path)
    assert ast.dump(ast.parse(plain)) == ast.dump(ast.parse(path.read_text()))
    assert "# new #" not in plain and not re.search(r"\n\n\n(\n|[ ])", plain)
    reasons = map(re.escape, re.findall("^ *# new # .*: (.*)", path.read_text(), re.M))
    assert re.search(".*".join(reasons), plain, re.S)
    kept = iter(plain.splitlines())
    for line in path.read_text().splitlines():
        assert not line or markers.MARKER.fullmatch(line) or line in kept, line
    if not markers.parents_of(path):
        assert plain == path.read_text()


def test_a_plain_script_reads_as_if_written_at_once(family, tmp_path):
    """Only the reasons of blocks stay, without the ideas that they name; blank lines stay where the parent has them."""
    family("train_child.py", CHILD.replace("order", "order: always").replace(
        "    print(os", "    # new # child: child: an empty line\n    print()\n\n    print(os"))
    assert markers.plain(tmp_path / "train_child.py") == '''"""The child.

Parent: train.py
"""
import os
import sys


def main():
    # why it counts to three
    for number in range(3):
        # standard error keeps order: always
        print(number, file=sys.stderr)
    # an empty line
    print()
    print(os.sep)
'''


def test_the_command_prints_a_plain_script():
    result = run("--plain", "train_DDP.py")
    assert (result.returncode, result.stdout) == (0, markers.plain(markers.ROOT / "train_DDP.py"))
    assert "name one of the scripts: detection/train.py" in run("--plain").stderr
    assert run("--plain", "tools/markers.py").returncode == 2


def test_the_blocks_as_json_suffice_to_undo_them():
    """Each script's lines outside its own blocks and the lines that these replace are those of its parent."""
    blocks = json.loads(run("--json").stdout)
    assert {block["script"] for block in blocks} == {markers.name_of(path) for path in SCRIPTS if compare(path)
                                                     or markers.parents_of(path)}
    for path in CHILDREN:
        lines, [parent] = markers.numbered(path, []), markers.parents_of(path)
        here = [block for block in blocks if block["script"] == markers.name_of(path)]
        for block in here:
            marker = markers.MARKER.fullmatch(path.read_text().splitlines()[block["first"] - 1])
            assert (block["tag"], block["reason"]) == (marker[1], marker[2] or "")
        own = {number for block in here if block["own"] for number in range(block["first"], block["last"] + 1)}
        replaced = {number for block in here for number in block["replaces"].get(markers.name_of(parent), [])}
        undone = [line for number, line in lines if number not in own]
        undone += [line for number, line in markers.numbered(parent, []) if number in replaced]
        assert Counter(undone) == Counter(line for _, line in markers.numbered(parent, []))


def test_the_blocks_of_one_script_name_what_they_replace_in_each_parent():
    blocks = json.loads(run("--json", "train_combined.py").stdout)
    assert {block["script"] for block in blocks} == {"train_combined.py"}
    assert {block["tag"] for block in blocks if block["own"]} == {"combined"}
    [rate] = [block for block in blocks if block["reason"].startswith("amp + grad_accum: all")]
    lines = {name: (markers.ROOT / name).read_text().splitlines() for name in rate["replaces"]}
    replaced = {lines[name][number - 1].strip() for name in lines for number in rate["replaces"][name]}
    assert "train_grad_accum.py" in lines and replaced == {"loss.backward()"}
    wing = [block for block in markers.described(markers.ROOT / "language/train_combined.py")
            if block["tag"] == "combined"]
    assert {block["own"] for block in wing} == {True, False}  # ../train_combined.py has the others, too
