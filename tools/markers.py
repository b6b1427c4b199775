"""How a script differs from its parent, and whether its `# new #` blocks say so: the rules of the marker.

    python tools/markers.py          # every script: its parent, its changed lines, and what breaks a rule

1. A marker is `# new #`, alone on its line or followed by one clause that says why.
2. A block runs from its marker to the next blank line; a `def` or `class` that begins in it is covered whole.
3. The module docstring is exempt and names the parent. A parent's `# new # why` is a plain `# why` in the child.
4. Every line outside the blocks stands in the parent, in the same order; what the parent has besides was replaced or
   removed where a block stands.
5. Every block changes something, and no statement in it stands in the parent at that place.
6. No code is commented out.
"""
import ast
import dataclasses
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(r"\s*# new #( \S.*)?")


class BrokenRule(Exception):
    """A script breaks a rule of the marker; the message names the line."""


@dataclasses.dataclass
class Block:
    """One stretch of a script that its parent has not: 1-based lines `first` to `last`, the marker included.

    `removed` are the 1-based lines of the parent that it replaces, `changed` the number of lines that differ, neither
    blank nor comment, and `reason` the marker's clause.
    """

    first: int
    last: int
    reason: str
    removed: list
    changed: int = 0


def scripts(root=ROOT):
    """Return the paths of all scripts that the rules hold for."""
    return sorted([*root.glob("train*.py"), *root.glob("loader*.py")])


def parent_of(path):
    """Return the path of a script's parent, as its docstring names it; None for "none"."""
    found = re.findall(r"^Parent: (\S+)$", ast.get_docstring(ast.parse(path.read_text())) or "", re.M)
    if len(found) != 1:
        raise BrokenRule(f"{path.name}: the docstring names no parent (a line 'Parent: SCRIPT.py')")
    return None if found[0] == "none" else path.with_name(found[0])


def find_blocks(path):
    """Return the blocks of a script as its markers bound them, before a comparison with the parent."""
    text = path.read_text()
    lines = text.splitlines()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    blocks = []
    for number, line in enumerate(lines, 1):
        if not re.search(r"#\s*new\b\s*#?", line, re.I) or (blocks and number <= blocks[-1].last):
            continue
        match = MARKER.fullmatch(line)
        if not match:
            raise BrokenRule(f"{path.name}:{number}: a marker is '# new #' alone on its line, or with a reason")
        last = number
        while last < len(lines) and lines[last].strip():
            last += 1
            begun = [node for node in nodes
                     if min([node.lineno, *(item.lineno for item in node.decorator_list)]) == last]
            if begun:
                last = begun[0].end_lineno
        blocks.append(Block(number, last, (match[1] or "").strip(), []))
    return blocks


def docstring_lines(text):
    """Return how many lines the module docstring takes."""
    return ast.parse(text).body[0].end_lineno


def compare(path):
    """Return the blocks of a script, each with what it replaces and changes; BrokenRule where a rule is broken."""
    parent = parent_of(path)
    blocks = find_blocks(path)
    _check_comments(path)
    if parent is None:
        if blocks:
            raise BrokenRule(f"{path.name}:{blocks[0].first}: a marker in a script without a parent")
        return []
    text = path.read_text()
    lines, skip = text.splitlines(), docstring_lines(text)
    old = as_the_child_has_it(parent)
    covered = {number for block in blocks for number in range(block.first, block.last + 1)}
    outside = [(number, line) for number, line in enumerate(lines, 1)
               if line.strip() and number > skip and number not in covered]

    matcher = difflib.SequenceMatcher(None, [line for _, line in old], [line for _, line in outside], autojunk=False)
    for kind, old_first, old_last, first, _ in matcher.get_opcodes():
        if kind in ("insert", "replace"):
            number, line = outside[first]
            raise BrokenRule(f"{path.name}:{number}: not in {parent.name} at this place, and not in a block: {line}")
        if kind == "delete":
            before = outside[first - 1][0] if first else 0
            after = outside[first][0] if first < len(outside) else len(lines) + 1
            here = [block for block in blocks if before < block.first and block.last < after]
            rest = _share_out(old[old_first:old_last], here, lines)
            if rest:
                raise BrokenRule(f"{path.name}:{before}: {parent.name} goes on here, and no block says why this does "
                                 f"not: {rest[0][1].strip()}")

    old_lines = dict(old)
    for block in blocks:
        _check_block(path, block, lines, [old_lines[number] for number in block.removed])
    return blocks


def changed_lines(path):
    """Return how many lines of a script differ from its parent, neither blank nor comment."""
    return sum(block.changed for block in compare(path))


def _share_out(removed, blocks, lines):
    """Give each block as many of the parent's lines as it has lines of its own, a comment alone all that are left."""
    for block in blocks:
        body = lines[block.first:block.last]
        takes = len(body) if any(map(_is_code, body)) else len(removed)
        block.removed = [number for number, _ in removed[:takes]]
        removed = removed[takes:]
    return removed


def as_the_child_has_it(parent):
    """Return the lines of a parent as its child may repeat them, as (number, line): no docstring, blank or marker."""
    text = parent.read_text()
    skip = docstring_lines(text)
    kept = []
    for number, line in enumerate(text.splitlines(), 1):
        if number <= skip or not line.strip():
            continue
        match = MARKER.fullmatch(line)
        if match:
            if not match[1]:
                continue
            line = line.replace("# new # ", "# ", 1)
        kept.append((number, line))
    return kept


def _is_code(line):
    return bool(line.strip()) and not line.strip().startswith("#")


def _check_block(path, block, lines, removed):
    body = lines[block.first:block.last]
    code, gone = [line for line in body if _is_code(line)], [line for line in removed if _is_code(line)]
    block.changed = max(len(code), len(gone))
    if not code and not removed:
        raise BrokenRule(f"{path.name}:{block.first}: a block in which nothing is new")
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.stmt) or not block.first < node.lineno <= node.end_lineno <= block.last:
            continue
        statement = lines[node.lineno - 1:node.end_lineno]
        if any(removed[start:start + len(statement)] == statement for start in range(len(removed))):
            raise BrokenRule(f"{path.name}:{node.lineno}: in a block, and yet as in the parent: {statement[0].strip()}")


def _check_comments(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        comment = line.strip().removeprefix("#").strip() if line.strip().startswith("#") else ""
        try:
            nodes = list(ast.walk(ast.parse(comment)))
        except SyntaxError:
            continue
        if any(isinstance(node, (ast.Assign, ast.AugAssign, ast.Call, ast.Import, ast.ImportFrom)) for node in nodes):
            raise BrokenRule(f"{path.name}:{number}: code that is commented out: {comment}")


def main():
    failed = False
    for path in scripts():
        try:
            parent = parent_of(path)
            print(f"{path.name:22} {parent.name if parent else '-':14} {changed_lines(path):3} changed lines")
        except BrokenRule as error:
            failed = True
            print(f"{path.name:22} {error}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
