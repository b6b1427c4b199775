"""Align two scripts for the page: which lines correspond, and what changed inside a line.

A comparison is a list of steps that walk down both scripts:

    n                   n lines that are equal on both sides
    "a3"                three lines that only the right script has; "l3": three lines that only the left one has
    "A1", "L1", "B1"    a line that does not count (blank, a marker without a reason) on the right, the left or both
    ["r", [0, 4], []]   a replaced line, and the ranges of characters that differ on the left and on the right
    ["g", reason, ...]  a change begins; what `notes_for` returns follows the reason
"""
import collections
import difflib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import markers

if TYPE_CHECKING:
    from build_page import Script

DIFFERENT = 0.5  # two lines less similar than this count as completely different
Pair = tuple[int | None, int | None]
BARE = re.compile(r"\s*(# new # [\w-]+)?")


def compare(left: "Script", right: "Script",
            notes_for: Callable[[list[str], list[str]], tuple]) -> tuple[list, int, int]:
    """Return (steps, changed lines, changes) from script `left` to `right`, which must not be an ancestor of `left`.

    `notes_for(left_lines, right_lines)` returns the notes to show beside a change; if `left` is the only parent,
    it receives only the child's lines. For a child, the changed lines are those of its blocks. For any other pair,
    each stretch that differs adds the number of code lines on the longer side.
    """
    child = right.parents == [left.name]
    steps = _docstrings(left, right)
    count, changes = 0, 0
    done_left, done_right = left.docstring_end, right.docstring_end
    for anchor_left, anchor_right in [*_anchors(left, right), (len(left.lines) + 1, len(right.lines) + 1)]:
        old = left.lines[done_left:anchor_left - 1]
        new = right.lines[done_right:anchor_right - 1]
        first = done_right + 1
        for change in _changes(old, new, child):
            matters = [_counts(_at(old, a), _at(new, b), child) for a, b in change]
            begin = matters.index(True) if any(matters) else len(change)
            for number, (a, b) in enumerate(change):
                if number == begin:
                    here = [b for _, b in change if b is not None]
                    gone = [old[a] for a, _ in change if a is not None and not child]
                    steps.append(["g", _reason(right, [first + b for b in here]),
                                  *notes_for(gone, [new[b] for b in here])])
                    changes += 1
                steps.append(_step(_at(old, a), _at(new, b), child))
        count += max(sum(map(is_code, old)), sum(map(is_code, new)))
        if anchor_left <= len(left.lines):
            steps.append(1)
        done_left, done_right = anchor_left, anchor_right
    if child:
        count = sum(block.changed for block in right.blocks)
    return _joined(steps), count, changes


def _at(lines: list[str], index: int | None) -> str | None:
    return None if index is None else lines[index]


def is_code(line: str) -> bool:
    """Return whether a line is neither blank nor a comment."""
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _counts(old: str | None, new: str | None, child: bool) -> bool:
    """Return whether a row shows a change; in a child, a marker without a reason counts, too."""
    if child and new and new.strip():
        return True
    return any(line and not BARE.fullmatch(line) for line in (old, new))


def _anchors(left: "Script", right: "Script") -> list[tuple[int, int]]:
    """Return the pairs of line numbers, after the docstrings, where the two scripts have the same line."""
    old, new = markers.numbered(left.path, []), markers.numbered(right.path, [])
    if right.parents == [left.name]:
        removed = {number for block in right.blocks for number in block.removed}
        kept = [number for number, _ in old if number not in removed]
        return list(zip(kept, [number for number, _ in markers.numbered(right.path, right.blocks)], strict=True))
    matcher = difflib.SequenceMatcher(None, [line for _, line in old], [line for _, line in new], False)
    blocks = matcher.get_matching_blocks()
    return [(old[a + k][0], new[b + k][0]) for a, b, size in blocks for k in range(size)]


def _kind(line: str) -> str:
    return "code" if is_code(line) else "comment" if line.strip() else "blank"


def _pair_up(old: list[str], new: list[str], kind: Callable[[str], str] | None = None) -> list[Pair]:
    """Align similar lines; return the pairs of their indices in order, with None for a missing counterpart."""
    sides = [[(line, (kind or _kind)(line)) for line in side] for side in (old, new)]
    worth = [[_worth(*one, *other) for other in sides[1]] for one in sides[0]]
    best = [[0.0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for a in range(len(old) - 1, -1, -1):
        for b in range(len(new) - 1, -1, -1):
            best[a][b] = max(best[a + 1][b], best[a][b + 1], worth[a][b] + best[a + 1][b + 1])
    pairs: list[Pair] = []
    a = b = 0
    while a < len(old) and b < len(new):
        if worth[a][b] and best[a][b] == worth[a][b] + best[a + 1][b + 1]:
            pairs.append((a, b))
            a, b = a + 1, b + 1
        elif best[a][b] == best[a][b + 1]:  # put the new line first: a marker precedes what it marks
            pairs.append((None, b))
            b += 1
        else:
            pairs.append((a, None))
            a += 1
    return pairs + [(i, None) for i in range(a, len(old))] + [(None, i) for i in range(b, len(new))]


def _worth(old: str, kind: str, new: str, other: str) -> float:
    """Return the score for aligning two lines; code aligns with code even if the lines have little in common."""
    if kind != other:
        return 0.0
    if kind == "blank":
        return 0.01
    if old == new:
        return 3.0
    likeness = _likeness(old, new)
    return 0.1 + likeness if kind == "code" else likeness if likeness > DIFFERENT else 0.0


@functools.lru_cache(maxsize=None)
def _words(line: str) -> collections.Counter[str]:
    return collections.Counter(re.findall(r"\w+|[^\w\s]", line))


def _likeness(old: str, new: str) -> float:
    left, right = _words(old), _words(new)
    return 2 * (left & right).total() / ((left.total() + right.total()) or 1)


def _docstrings(left: "Script", right: "Script") -> list:
    old, new = left.lines[:left.docstring_end], right.lines[:right.docstring_end]
    if old == new:
        return [len(old)]
    pairs = _pair_up(old, new, lambda line: "code" if line.strip() else "blank")
    return [_step(_at(old, a), _at(new, b)) for a, b in pairs]


def _changes(old: list[str], new: list[str], child: bool) -> Iterator[list[Pair]]:
    """Split one stretch that differs into changes and pair their lines; a child's marker starts a new change."""
    change: list[Pair] = []
    begun = False
    for a, b in _pair_up(old, new):
        if child and begun and b is not None and markers.MARKER.fullmatch(new[b]):
            yield change
            change, begun = [], False
        change.append((a, b))
        begun = begun or _counts(_at(old, a), _at(new, b), child)
    if change:
        yield change


def _reason(script: "Script", numbers: list[int]) -> str:
    return next((block.reason for block in script.blocks for number in numbers
                 if block.first <= number <= block.last), "")


def _step(old: str | None, new: str | None, child: bool = False) -> str | list:
    if old is not None and new is not None:
        return "B1" if old == new or not (old.strip() or new.strip()) else ["r", *_parts(old, new)]
    letter = "a" if old is None else "l"
    return f"{letter if _counts(old, new, child) else letter.upper()}1"


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


def _joined(steps: list) -> list:
    """Join neighboring steps of the same kind."""
    joined: list = []
    for kind, same in itertools.groupby(steps, lambda step: step[:1] if isinstance(step, str) else type(step)):
        found = list(same)
        if kind is int:
            joined.append(sum(found))
        else:
            joined += found if kind is list else [f"{kind}{sum(int(step[1:]) for step in found)}"]
    return [step for step in joined if step != 0]
