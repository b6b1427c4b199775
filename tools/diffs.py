"""Align two scripts for the page: which lines correspond, and what changed inside a line.

A comparison is a list of steps that walk down both scripts:

    n                   n lines that are equal on both sides
    "a", "l"            a line that only the right script has, or only the left one
    "A", "L", "B"       a line on the right, the left or both that does not count: blank, a marker without reason
    ["r", [0, 4], []]   a replaced line, and the ranges of characters that differ on the left and on the right
    ["g", reason, ...]  a change begins; what `notes_for` returns follows the reason
"""
import collections
import difflib
import functools
import itertools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import markers

if TYPE_CHECKING:
    from build_page import Script

DIFFERENT = 0.5  # two lines less similar than this count as completely different
Row = tuple[str | None, str | None]  # a line of the left script and one of the right script
BARE = re.compile(r"\s*(# new # [\w-]+)?")


def compare(left: "Script", right: "Script",
            notes_for: Callable[[list[str], list[str]], tuple]) -> tuple[list, int, int]:
    """Return (steps, changed lines, changes) from script `left` to `right`, which must not be an ancestor of `left`.

    `notes_for(left_lines, right_lines)` returns the notes to show beside a change; if `left` is the only parent,
    it receives only the child's lines. For a child, the changed lines are those of its blocks. For any other pair,
    each stretch that differs adds the number of code lines on the longer side.
    """
    child = right.parents == [left.name]
    old, new = left.lines[:left.docstring_end], right.lines[:right.docstring_end]
    steps: list = [len(old)] if old == new else [_step(row, False) for row in _pair_up(old, new)]
    count, changes = 0, 0
    done_left, done_right = left.docstring_end, right.docstring_end
    for anchor_left, anchor_right in [*_anchors(left, right), (len(left.lines) + 1, len(right.lines) + 1)]:
        old, new = left.lines[done_left:anchor_left - 1], right.lines[done_right:anchor_right - 1]
        rows, starts = _pair_up(old, new), list[int]()  # the rows at which changes begin: in a child, its markers
        for number, row in enumerate(rows):
            marked = child and markers.MARKER.fullmatch(row[1] or "")
            if _counts(row, child) and (marked or not starts):
                starts.append(number)
        steps += [_step(row, child) for row in rows[:starts[0] if starts else len(rows)]]
        for begin, end in itertools.pairwise([*starts, len(rows)]):
            here = [line for _, line in rows[begin:end] if line is not None]
            gone = [line for line, _ in rows[begin:end] if line is not None and not child]
            reasons = [match[2] for match in map(markers.MARKER.fullmatch, here) if match and match[2]]
            steps.append(["g", "".join(reasons[:1]), *notes_for(gone, here)])
            steps += [_step(row, child) for row in rows[begin:end]]
        changes += len(starts)
        count += max(sum(bool(markers.CODE.match(line)) for line in side) for side in (old, new))
        if anchor_left <= len(left.lines) and isinstance(steps[-1], int):
            steps[-1] += 1
        elif anchor_left <= len(left.lines):
            steps.append(1)
        done_left, done_right = anchor_left, anchor_right
    return steps, sum(block.changed for block in right.blocks) if child else count, changes


def _counts(row: Row, child: bool) -> bool:
    """Return whether a row shows a change; in a child, a marker without a reason counts, too."""
    if child and row[1] and row[1].strip():
        return True
    return any(line and not BARE.fullmatch(line) for line in row)


_numbered = functools.cache(lambda path: markers.numbered(path, []))


def _anchors(left: "Script", right: "Script") -> list[tuple[int, int]]:
    """Return the pairs of line numbers, after the docstrings, where the two scripts have the same line."""
    old, new = _numbered(left.path), _numbered(right.path)
    if right.parents == [left.name]:
        removed = {number for block in right.blocks for number in block.removed}
        kept = [number for number, _ in old if number not in removed]
        return list(zip(kept, [number for number, _ in markers.numbered(right.path, right.blocks)], strict=True))
    matcher = difflib.SequenceMatcher(None, [line for _, line in old], [line for _, line in new], False)
    blocks = matcher.get_matching_blocks()
    return [(old[a + k][0], new[b + k][0]) for a, b, size in blocks for k in range(size)]


def _kind(line: str) -> str:
    return "code" if markers.CODE.match(line) else "comment" if line.strip() else "blank"


def _pair_up(old: list[str], new: list[str]) -> list[Row]:
    """Align similar lines; return them in order, with None for a missing counterpart."""
    worth = [[_worth(one, other) for other in new] for one in old]
    best = [[0.0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for a in range(len(old) - 1, -1, -1):
        for b in range(len(new) - 1, -1, -1):
            best[a][b] = max(best[a + 1][b], best[a][b + 1], worth[a][b] + best[a + 1][b + 1])
    rows: list[Row] = []
    a = b = 0
    while a < len(old) and b < len(new):
        if worth[a][b] and best[a][b] == worth[a][b] + best[a + 1][b + 1]:
            rows.append((old[a], new[b]))
            a, b = a + 1, b + 1
        elif best[a][b] == best[a][b + 1]:  # put the new line first: a marker precedes what it marks
            rows.append((None, new[b]))
            b += 1
        else:
            rows.append((old[a], None))
            a += 1
    return rows + [(line, None) for line in old[a:]] + [(None, line) for line in new[b:]]


@functools.lru_cache(maxsize=None)
def _words(line: str) -> collections.Counter[str]:
    return collections.Counter(re.findall(r"\w+|[^\w\s]", line))


@functools.lru_cache(maxsize=None)
def _worth(old: str, new: str) -> float:
    """Return the score for aligning two lines; code aligns with code even if the lines have little in common."""
    kind = _kind(old)
    if kind != _kind(new):
        return 0.0
    if kind == "blank":
        return 0.01
    if old == new:
        return 3.0
    left, right = _words(old), _words(new)
    likeness = 2 * (left & right).total() / (left.total() + right.total())
    return 0.1 + likeness if kind == "code" else likeness if likeness > DIFFERENT else 0.0


def _step(row: Row, child: bool) -> str | list:
    old, new = row
    if old is not None and new is not None:
        return "B" if old == new or not (old.strip() or new.strip()) else ["r", *_parts(old, new)]
    letter = "a" if old is None else "l"
    return letter if _counts(row, child) else letter.upper()


def _parts(old: str, new: str) -> tuple[list[int], list[int]]:
    """Return the character ranges that differ between two versions of a line; none if the versions differ too much."""
    names = [collections.Counter(re.findall(r"[^\W_]+", line)) for line in (old, new)]
    if 2 * (names[0] & names[1]).total() < DIFFERENT * (names[0] + names[1]).total():
        return [], []
    a, b = (re.findall(r"\w+|.", line) for line in (old, new))
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    ends_a, ends_b = ([0, *itertools.accumulate(map(len, side))] for side in (a, b))
    old_parts: list[int] = []
    new_parts: list[int] = []
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind != "equal":
            for parts, ends, first, last in ((old_parts, ends_a, i, i_end), (new_parts, ends_b, j, j_end)):
                if first == last:
                    continue
                if parts and ends[first] - parts[-1] <= 1:  # a single unchanged character does not split a range
                    parts[-1] = ends[last]
                else:
                    parts += [ends[first], ends[last]]
    return old_parts, new_parts
