"""Check that the `# new # TAG` blocks of each script mark exactly where it differs from its parents.

    python tools/markers.py                   # prints scripts, parents and counts of changed lines, or a broken rule
    python tools/markers.py --plain SCRIPT    # prints a script without markers and their blank lines, to carry away
    python tools/markers.py --json [SCRIPT]   # prints all blocks of all scripts or one, and what their own replace

1. A marker is `# new # TAG` or `# new # TAG: why`, alone on its line. TAG is the file name after `_`: amp, DDP.
   The reason can begin with tags of other ideas that the block adapts to: `# new # combined: amp + grad_accum: why`.
2. A block runs to the next blank line, and includes all of any `def` or `class` that begins in it.
3. The module docstring names the parents (`Parent: train.py` or `Parents: train.py, ../train_DDP.py`) and is exempt.
4. Everything else, including ancestors' blocks and blank lines, is in a parent. An own block replaces any missing line.
   From a parent in another folder, a script takes the blocks whose tags its other parents lack, word for word. It may
   leave out whole blocks that its task does not need, if a comment in an own block says why, and adapt others.
5. Each of a script's own blocks changes something and repeats no line that it replaces. No code is commented out.
6. A marker heads code. Only where a script just removes lines, its own block is one comment that says so, which its
   children keep. A comment `# yours: ...` also heads something.
"""
import argparse
import ast
import dataclasses
import difflib
import functools
import json
import re
import signal
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
    replaced: dict[Path, list[int]] = dataclasses.field(default_factory=dict)  # `removed` by parent
    lost: list[str] = dataclasses.field(default_factory=list)  # the code in these lines


def scripts(root: Path = ROOT) -> list[Path]:
    """Return the paths of all scripts."""
    return sorted(path for name in ("train*.py", "loader*.py", "*/train*.py") for path in root.glob(name))


def name_of(path: Path) -> str:
    """Return a script's path from the root, as its parents and the pages name it."""
    return path.relative_to(ROOT).as_posix()


def words(path: Path) -> list[str]:
    """Return the words of a command that name a script: its path or, in a package, its module: `-m language.train`."""
    if (path.parent / "__init__.py").exists():
        return ["-m", f"{path.parent.name}.{path.stem}"]
    return [name_of(path)]


@functools.cache
def parsed(text: str) -> tuple[str, int, dict[int, int]]:
    """Return a script's docstring, the docstring's last line, and {first: last line} of each function and class."""
    tree = ast.parse(text)
    ends = {min(part.lineno for part in [node, *node.decorator_list]): node.end_lineno or 0
            for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return ast.get_docstring(tree) or "", tree.body[0].end_lineno or 0, ends


def parents_of(path: Path) -> list[Path]:
    """Return the paths of a script's parents."""
    found = re.findall(r"^Parents?: (.+)$", parsed(path.read_text())[0], re.M)
    if len(found) != 1:
        raise BrokenRule(f"{path}: the docstring names no parent: write 'Parent: SCRIPT.py' or 'Parent: none'")
    return [] if found[0] == "none" else [(path.parent / name).resolve() for name in found[0].split(", ")]


def find_blocks(path: Path) -> list[Block]:
    """Return all blocks of a script, its ancestors' included."""
    lines, blocks = path.read_text().splitlines(), list[Block]()
    ends = parsed(path.read_text())[2]
    for number, line in enumerate(lines, 1):
        if not re.search(r"#\s*new\b", line, re.I) or blocks and number <= blocks[-1].last:
            continue
        if not (match := MARKER.fullmatch(line)):
            raise BrokenRule(f"{path}:{number}: a marker is '# new # TAG' or '# new # TAG: why' on its own line")
        blocks.append(Block(number, number, match[1], match[2] or ""))
        while blocks[-1].last < len(lines) and lines[blocks[-1].last].strip():
            blocks[-1].last = ends.get(blocks[-1].last + 1, blocks[-1].last + 1)
    return blocks


def text_of(path: Path, block: Block) -> list[str]:
    """Return a block's lines, marker included."""
    return path.read_text().splitlines()[block.first - 1:block.last]


def headless(path: Path) -> dict[str, int]:
    """Return the markers over no code, with their line numbers."""
    lines = path.read_text().splitlines()
    return {lines[block.first - 1]: block.first for block in find_blocks(path)
            if not any(map(CODE.match, lines[block.first:block.last]))}


def numbered(path: Path, without: list[Block]) -> list[tuple[int, str]]:
    """Return a script's non-blank lines with their numbers, without its docstring and the blocks `without`."""
    lines, skip = path.read_text().splitlines(), parsed(path.read_text())[1]
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip() and number > skip
            and not any(block.first <= number <= block.last for block in without)]


def _superseded(path: Path, block: Block, lines: list[str]) -> bool:
    """Return whether a script with these lines replaces what a block of script `path` replaces in its parent."""
    text = text_of(path, block)
    while block.tag != path.stem.partition("_")[2]:
        path = next(parent for parent in parents_of(path) for own in find_blocks(parent) if own.tag == block.tag)
    found = next(own for own in compare(path) if text_of(path, own) == text)
    return bool(found.lost) and not {*found.lost} & {*lines}


def compare(path: Path) -> list[Block]:
    """Return a script's own blocks, with `removed` and `changed` set; raise BrokenRule if it breaks a rule."""
    inherited = [text_of(parent, block) for parent in parents_of(path) for block in find_blocks(parent)]
    own = [block for block in find_blocks(path)
           if block.tag == path.stem.partition("_")[2] and text_of(path, block) not in inherited]
    lines, outside, known, left_out = path.read_text().splitlines(), numbered(path, own), set[int](), list[str]()
    code = {block.first: [line for line in lines[block.first:block.last] if CODE.match(line)] for block in own}
    for parent in parents_of(path):
        foreign, old = parent.parent != path.parent, numbered(parent, [])
        taken = find_blocks(parent)
        if foreign:  # the other lines come from its ancestors: the parents in this folder have adapted them
            near = {block.tag for other in parents_of(path) if other.parent == path.parent
                    for block in find_blocks(other)}
            taken = [block for block in taken if block.tag not in near]
            ours = {number for block in taken for number in range(block.first, block.last + 1)}
            old = [(number, line) for number, line in old if number in ours or line in lines]
        matcher = difflib.SequenceMatcher(None, [line for _, line in old], [line for _, line in outside], False)
        pairs = [(match.a + i, match.b + i) for match in matcher.get_matching_blocks() for i in range(match.size)]
        known |= {outside[b][0] for _, b in pairs}
        for (a, b), (next_a, next_b) in zip([(-1, -1), *pairs], [*pairs, (len(old), len(outside))], strict=True):
            first, last = (outside[i][0] if 0 <= i < len(outside) else i * len(lines) for i in (b, next_b))
            here, gone = [block for block in own if first < block.first < last], old[a + 1:next_a]
            if foreign and not here:
                numbers = {number for number, _ in gone}
                whole = [block for block in taken if {*range(block.first, block.last + 1)} <= numbers]
                left_out += [block.reason or block.tag for block in whole if not _superseded(parent, block, lines)]
                gone = [(number, line) for number, line in gone
                        if any(block.first <= number <= block.last for block in taken if block not in whole)]
            moved = (not foreign and not here and a >= 0 and next_a < len(old)
                     and last - first != old[next_a][0] - old[a][0])
            room = sum(len(code[block.first]) or len(gone) for block in here)  # comments replace any number of lines
            lost = [line for _, line in gone if CODE.match(line)]
            if b + 1 == next_b and (moved or len(lost) > room or gone and not here):
                raise BrokenRule(f"{path}:{first}: no block replaces what follows this line in {parent.name}")
            for block in here:
                size = len(gone) if block is here[-1] else block.last - block.first
                replaced = [line for _, line in gone[:size] if CODE.match(line)]
                block.replaced[parent], gone, body = [at for at, _ in gone[:size]], gone[size:], code[block.first]
                block.removed = block.replaced[parent] or block.removed
                block.lost += replaced
                # of several parents, one often has what takes the place of another's lines
                lines_gone = 0 if body and len(parents_of(path)) > 1 else len(replaced)
                block.changed = max(block.changed, len(body), lines_gone)
                if {*body} & {*replaced}:
                    raise BrokenRule(f"{path}:{block.first}: not all of this block is new")
    for block in own:
        if not code[block.first] and not block.removed:
            raise BrokenRule(f"{path}:{block.first}: not all of this block is new")
    kept = {marker for parent in parents_of(path) for marker in headless(parent)}
    if left_out and not any(number in [block.first for block in own] for number in headless(path).values()):
        raise BrokenRule(f"{path}: no comment in an own block says why the script leaves out: {'; '.join(left_out)}")
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


def reason_of(block: Block, tags: set[str]) -> str:
    """Return a block's reason without the ideas that it begins with; `tags` are those of its script."""
    named, _, why = block.reason.partition(": ")
    return why if why and tags.issuperset(named.split(" + ")) else block.reason


def gaps(path: Path) -> dict[int, int]:
    """Return how many blank lines the plain script has before each non-blank line below its docstring.

    Around a block, it has as many as its plain parent has before the line that the block replaces or precedes.
    An import of another package than that line's follows the other imports.
    """
    lines, top = path.read_text().splitlines(), parsed(path.read_text())[1]
    filled = [number for number, _ in numbered(path, [])]
    above = {number: number - before - 1 for before, number in zip([top, *filled], filled, strict=False)}
    same, near = dict[int, int](), dict[int, int]()
    for parent in parents_of(path):
        old, theirs = numbered(parent, []), gaps(parent)
        matcher = difflib.SequenceMatcher(None, [line for _, line in old], [lines[at - 1] for at in filled], False)
        pairs = {match.b + i: match.a + i for match in matcher.get_matching_blocks() for i in range(match.size)}
        at = 0  # in `old`: what the line is, or what it replaces or precedes
        for i, number in enumerate(filled):
            at = pairs.get(i, at)
            if at < len(old):
                package = re.match(r"(?:# new .*\n)?(?:import|from) (\w*)", "\n".join(lines[number - 1:number + 1]))
                alone = i not in pairs and package and not re.match(rf"\w+ {package[1]}\b", old[at][1])
                most = 0 if alone else 1 if lines[number - 1].startswith(" ") else 2
                (same if i in pairs else near).setdefault(number, min(theirs[old[at][0]], most))
            at += i in pairs
    blocks = find_blocks(path)
    edges = {number for before, number in zip([top, *filled], filled, strict=False)
             for block in blocks if number == block.first or before == block.last}
    return above | {number: size for number, size in (near | same).items() if number in edges}


def plain(path: Path) -> str:
    """Return a script without markers and the blank lines around them; a marker's reason becomes a comment."""
    lines, tags = path.read_text().splitlines(), {block.tag for block in find_blocks(path)}
    kept, above = lines[:parsed(path.read_text())[1]], gaps(path)
    reasons = {block.first: reason_of(block, tags) for block in find_blocks(path)}
    for number, blank in above.items():
        line = lines[number - 1]
        kept += [""] * blank
        if reasons.get(number, line):
            indent = line[:len(line) - len(line.lstrip())]
            kept.append(f"{indent}# {reasons[number]}" if number in reasons else line)
    return "\n".join(kept) + "\n"


def described(path: Path) -> list[dict[str, object]]:
    """Return all blocks of a script for other programs; only own blocks replace lines of a parent."""
    own = {block.first: block.replaced for block in compare(path)}
    return [{"script": name_of(path), "tag": block.tag, "reason": block.reason, "first": block.first,
             "last": block.last, "own": block.first in own,
             "replaces": {name_of(parent): at for parent, at in own.get(block.first, {}).items() if at}}
            for block in find_blocks(path)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", type=Path, help="the only script to print (default: all)")
    parser.add_argument("--plain", action="store_true", help="print the script without markers")
    parser.add_argument("--json", action="store_true", help="print all blocks as JSON")
    args = parser.parse_args()
    if hasattr(signal, "SIGPIPE"):  # not on Windows: `head` may end the output
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    chosen = scripts() if args.script is None else [args.script.resolve()]
    if args.plain and args.script is None or not set(chosen) <= set(scripts()):
        parser.error(f"name one of the scripts: {', '.join(map(name_of, scripts()))}")
    try:
        if args.plain:
            print(plain(chosen[0]), end="")
        elif args.json:
            print(json.dumps([block for path in chosen for block in described(path)], indent=1))
        else:
            for path in chosen:
                names, changed = [name_of(parent) for parent in parents_of(path)], sum(b.changed for b in compare(path))
                print(f"{name_of(path):20} {', '.join(names) or '-':16} {changed:3} changed lines")
    except BrokenRule as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
