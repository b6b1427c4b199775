"""Check that the `# new # TAG` blocks of each script mark exactly where it differs from its parents.

    python tools/markers.py          # prints scripts, parents and numbers of changed lines, or the first broken rule

1. A marker is `# new # TAG` or `# new # TAG: why`, alone on its line. TAG is the file name after `_`: amp, DDP.
   The reason can begin with tags of other ideas that the block adapts to: `# new # combined: amp + grad_accum: why`.
2. A block runs to the next blank line, and includes all of any `def` or `class` that begins in it.
3. The module docstring names the parents (`Parent: train.py` or `Parents: A.py, B.py`) and is exempt.
4. Everything else, including ancestors' blocks and blank lines, is in a parent. An own block replaces any missing line.
5. Each of a script's own blocks changes something and repeats no line that it replaces. No code is commented out.
6. A marker heads code. Only where a script just removes lines, its own block is one comment that says so, which its
   children keep. A comment `# yours: ...` also heads something.
"""
import ast
import dataclasses
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"\s*[^\s#]")  # neither blank nor a comment
MARKER = re.compile(r"\s*# new # ([\w-]+)(?:: (\S.*))?")
COMMENTED_OUT = re.compile(r"\s*# ?([\w.]+(\[.*\])? [-+*/]?= \S|[\w.]+\(.*\)$|import \w|from \S+ import |return\b)")


class BrokenRule(Exception):
    """A script breaks a rule; the message names the line."""


@dataclasses.dataclass
class Block:
    """The 1-based lines `first` to `last`, marker included, and the parent's lines that they replace."""
    first: int
    last: int
    tag: str
    reason: str
    removed: list[int] = dataclasses.field(default_factory=list)
    changed: int = 0


def scripts(root: Path = ROOT) -> list[Path]:
    """Return the paths of all scripts."""
    return sorted(path for name in ("train*.py", "loader*.py", "minimal/train*.py") for path in root.glob(name))


def name_of(path: Path) -> str:
    """Return a script's path from the root, as its parents and the pages name it."""
    return path.relative_to(ROOT).as_posix()


def parents_of(path: Path) -> list[Path]:
    """Return the paths of a script's parents."""
    found = re.findall(r"^Parents?: (.+)$", ast.get_docstring(ast.parse(path.read_text())) or "", re.M)
    if len(found) != 1:
        raise BrokenRule(f"{path}: the docstring names no parent: write 'Parent: SCRIPT.py' or 'Parent: none'")
    return [] if found[0] == "none" else [path.with_name(name) for name in found[0].split(", ")]


def find_blocks(path: Path) -> list[Block]:
    """Return all blocks of a script, its ancestors' included."""
    lines, blocks = path.read_text().splitlines(), list[Block]()
    ends = {min(part.lineno for part in [node, *node.decorator_list]): node.end_lineno or 0
            for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for number, line in enumerate(lines, 1):
        if not re.search(r"#\s*new\b", line, re.I) or blocks and number <= blocks[-1].last:
            continue
        if not (match := MARKER.fullmatch(line)):
            raise BrokenRule(f"{path}:{number}: a marker is '# new # TAG' or '# new # TAG: why' on its own line")
        blocks.append(Block(number, number, match[1], match[2] or ""))
        while blocks[-1].last < len(lines) and lines[blocks[-1].last].strip():
            blocks[-1].last = ends.get(blocks[-1].last + 1, blocks[-1].last + 1)
    return blocks


def headless(path: Path) -> dict[str, int]:
    """Return the markers over no code, with their line numbers."""
    lines = path.read_text().splitlines()
    return {lines[block.first - 1]: block.first for block in find_blocks(path)
            if not any(map(CODE.match, lines[block.first:block.last]))}


def numbered(path: Path, without: list[Block]) -> list[tuple[int, str]]:
    """Return a script's non-blank lines with their numbers, without its docstring and the blocks `without`."""
    lines, skip = path.read_text().splitlines(), ast.parse(path.read_text()).body[0].end_lineno or 0
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip() and number > skip
            and not any(block.first <= number <= block.last for block in without)]


def compare(path: Path) -> list[Block]:
    """Return a script's own blocks, with `removed` and `changed` set; raise BrokenRule if it breaks a rule."""
    own = [block for block in find_blocks(path) if block.tag == path.stem.partition("_")[2]]
    lines, outside, known = path.read_text().splitlines(), numbered(path, own), set[int]()
    code = {block.first: [line for line in lines[block.first:block.last] if CODE.match(line)] for block in own}
    for parent in parents_of(path):
        old = numbered(parent, [])
        matcher = difflib.SequenceMatcher(None, [line for _, line in old], [line for _, line in outside], False)
        pairs = [(match.a + i, match.b + i) for match in matcher.get_matching_blocks() for i in range(match.size)]
        known |= {outside[b][0] for _, b in pairs}
        for (a, b), (next_a, next_b) in zip([(-1, -1), *pairs], [*pairs, (len(old), len(outside))], strict=True):
            first, last = (outside[i][0] if 0 <= i < len(outside) else i * len(lines) for i in (b, next_b))
            here, gone = [block for block in own if first < block.first < last], old[a + 1:next_a]
            moved = not here and a >= 0 and next_a < len(old) and last - first != old[next_a][0] - old[a][0]
            room = sum(len(code[block.first]) or len(gone) for block in here)  # comments replace any number of lines
            lost = [line for _, line in gone if CODE.match(line)]
            if b + 1 == next_b and (moved or len(lost) > room or gone and not here):
                raise BrokenRule(f"{path}:{first}: no block replaces what follows this line in {parent.name}")
            for block in here:
                size = len(gone) if block is here[-1] else block.last - block.first
                block.removed, gone, body = [at for at, _ in gone[:size]], gone[size:], code[block.first]
                replaced = [line for at, line in old if at in block.removed and CODE.match(line)]
                block.changed = max(block.changed, len(body), len(replaced))
                if not body and not block.removed or {*body} & {*replaced}:
                    raise BrokenRule(f"{path}:{block.first}: not all of this block is new")
    kept = {marker for parent in parents_of(path) for marker in headless(parent)}
    for marker, number in headless(path).items():
        if marker not in kept and number not in [block.first for block in own]:
            raise BrokenRule(f"{path}:{number}: this marker heads nothing: {marker.strip()}")
    for number, line in numbered(path, []):
        if line.lstrip().startswith("# yours:") and not lines[number].strip():
            raise BrokenRule(f"{path}:{number}: this comment heads nothing: {line.strip()}")
        if (number, line) in outside and number not in known and (parents_of(path) or MARKER.fullmatch(line)):
            raise BrokenRule(f"{path}:{number}: not in a parent at this place, and not in a block: {line.strip()}")
        if COMMENTED_OUT.match(line):
            raise BrokenRule(f"{path}:{number}: commented-out code: {line.strip()}")
    return own


def main() -> None:
    try:
        for path in scripts():
            name, *parents = map(name_of, [path, *parents_of(path)])
            print(f"{name:20} {', '.join(parents) or '-':16} {sum(b.changed for b in compare(path)):3} changed lines")
    except BrokenRule as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
