"""Search the pages in your own words, or for the line that your terminal shows.

    python -m tools.search multi-GPU training is slower than one GPU
    python -m tools.search "Watchdog caught collective operation timeout"

It prints the five best sections or rows of tables: links, then the row or the sentence that matches best. Exit code 1:
nothing matches; 2: no words. The page that tools/build_page.py writes has the same index; tools/page.js only adds up
its weights.
"""
import collections
import dataclasses
import io
import itertools
import math
import posixpath
import re
import signal
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README*.md", "docs/*.md", "docs/pitfalls/*.md", *(f"{wing}/README.md" for wing in
                                                            ("verify", "language", "detection"))]
INDEX = {"docs/symptoms.md": "en", "README.md": "en", "docs/symptoms.zh-CN.md": "zh",
         "README.zh-CN.md": "zh"}  # a row leads to its links
NOT_SEARCHED = {"docs/CHANGELOG.md", "docs/speed.md", "docs/versions.md"}  # history and measurements, not answers
# the page's JavaScript uses these patterns, too
CHINESE = re.compile(r"[\u3400-\u9fff]")
WORD = re.compile(r"[\u3400-\u9fff]+|[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*|(?<!\w)-\d+", re.ASCII)
PART = re.compile(r"^-\d+|\d+|[A-Z]+s?(?![a-z])|[A-Z]?[a-z]+", re.ASCII)  # `DistributedSampler` has two
ENDING = re.compile(r"(?<=...)(?:ing|ed|(?:i?e)?(?<!s)s|ly|e|y)$")
DOUBLED = re.compile(r"(?<=..)([bgmnpt])\1$")  # `stopping` becomes `stopp`, then `stop`
COMMON = frozenset("a an the of in on at to for with and or is are was were be been do does did i my we you it its s t "
                   "this that these there as by from than when while if how what why can could should would will vs"
                   .split())
# blocks of code, comments, and the heads of tables
NO_PROSE = re.compile(r"^( *```).*?^\1$|^<!--[^\n]*-->$|^\|[^\n]+\n(?:\|[-: ]+)+\|$", re.M | re.S)
LINK = re.compile(r"!?\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]*)\)")
MARKS = re.compile(r"\*\*|`|\\(?=\|)")
ITEM = re.compile(r"\n+(?=- |\d+\. )|\n\n(?! )")  # an indented paragraph belongs to the item above it
LONG, SHORT = 100, 25  # terms: a longer section is divided into parts, and a shorter part is joined to the next
SENTENCE = re.compile(r"(?<=[.:;])\s+(?=[A-Z])|(?<=。)|\n\n+|\n(?=- |\d+\. )")


@dataclasses.dataclass
class Section:
    """A section, a part of a long one, or a row of a table.

    `targets` are (text, page#anchor), and `lines` what can be shown of it.
    """

    targets: list[tuple[str, str]]
    lines: list[str]
    terms: collections.Counter[str]
    language: str = ""  # of a page that exists in two languages: "zh" or "en"


Weights = dict[str, dict[int, int]]


def slug(heading: str) -> str:
    """Return GitHub's anchor for a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def terms(text: str) -> list[str]:
    """Return words without endings, identifiers whole and in parts, and Chinese characters in pairs."""
    found = []
    for word in WORD.findall(text):
        if word[0] >= "\u3400":
            found += [word[at:at + 2] for at in range(max(len(word) - 1, 1))]
            continue
        parts = PART.findall(word)
        if len(parts) > 1:
            found.append(word.lower())
        found += [DOUBLED.sub(r"\1", ENDING.sub("", part.lower())) for part in parts]
    return [term for term in found if term not in COMMON]


def pages(root: Path = ROOT) -> list[str]:
    """Return the paths of the pages that are searched."""
    paths = {path.relative_to(root).as_posix() for pattern in PAGES for path in root.glob(pattern)}
    return sorted(paths - NOT_SEARCHED)


def read(root: Path = ROOT) -> list[Section]:
    """Return the sections and the rows of tables of all pages."""
    return [section for page in pages(root)
            for section in _sections(page, (root / page).read_text(encoding="utf-8"))]  # on Windows, too


def weigh(sections: list[Section]) -> Weights:
    """Return {term: {number of a section: weight}}: ten times Okapi BM25, with k1 = 1.2 and b = 0.5.

    The usual b = 0.75 ranks long rows of symptoms too low.
    """
    lengths = [section.terms.total() for section in sections]
    mean = sum(lengths) / len(lengths)
    having = collections.Counter(term for section in sections for term in section.terms)
    found: Weights = collections.defaultdict(dict)
    for number, section in enumerate(sections):
        for term, count in section.terms.items():
            rarity = math.log(1 + (len(sections) - having[term] + .5) / (having[term] + .5))
            saturation = count * 2.2 / (count + 1.2 * (.5 + .5 * lengths[number] / mean))
            found[term][number] = round(10 * rarity * saturation)
    return found


def search(sections: list[Section], weights: Weights, text: str, most: int = 5) -> list[Section]:
    """Return the sections with the greatest sums of weights, without the pages of the other language."""
    scores: collections.Counter[int] = collections.Counter()
    for term in set(terms(text)):
        scores.update(weights.get(term, {}))
    other = "en" if CHINESE.search(text) else "zh"
    found = (sections[number] for number in sorted(scores, key=lambda number: (-scores[number], number)))
    return [*itertools.islice((section for section in found if section.language != other), most)]


def best_line(section: Section, text: str) -> str:
    """Return the first of the lines that have the most terms of the text."""
    wanted = set(terms(text))
    return max(section.lines, key=lambda line: len(wanted.intersection(terms(line))))


def _sections(page: str, text: str) -> list[Section]:
    found, path, language = [], list[str](), INDEX.get(page, "")
    for part in re.split(r"^(?=#+ )", NO_PROSE.sub("", text), flags=re.M):
        heading, _, body = part.partition("\n")
        level, _, title = heading.partition(" ")
        path = [*path[:len(level) - 1], _plain(title)]
        here = [(" > ".join(path), f"{page}#{slug(title)}" if path[1:] else page)]
        headings = set(terms(" ".join(path[1:] or path)))
        for prose in _parts(_plain(re.sub(r"^\|.*\n?", "", body, flags=re.M)).strip()):
            lines = [" ".join(line.split()) for line in SENTENCE.split(prose) if line]
            found.append(Section(here, lines, collections.Counter([*terms(prose), *headings]), language))
        for row in re.findall(r"^\|(.+)\|$", body, re.M):
            if sum(map(str.isalpha, row)) < len(row.replace(" ", "")) / 2:
                continue  # measurements
            first, *others = (_plain(cell).strip() for cell in re.split(r"(?<!\\)\|", row))
            counted = collections.Counter([*terms(first) * 3, *terms(" ".join(others)), *headings])
            links = [(text, posixpath.normpath(posixpath.join(posixpath.dirname(page), target)))
                     for text, target in LINK.findall(row)]
            if language and links:
                found.append(Section(links, [first], counted, language))
            else:
                found.append(Section(here, [" | ".join([first, *others])], counted, language))
    return found


def _parts(prose: str) -> list[str]:
    """Return the items and paragraphs of a long text, or the text: BM25 finds little in a text about many things."""
    if len(terms(prose)) <= LONG:
        return [prose] * bool(prose)
    found: list[str] = []
    for part in ITEM.split(prose):
        if found and len(terms(found[-1])) < SHORT:
            found[-1] += f"\n\n{part}"
        else:
            found.append(part)
    return found


def _plain(text: str) -> str:
    return MARKS.sub("", LINK.sub(r"\1", text))


def main() -> None:
    text = " ".join(sys.argv[1:])
    if not text.strip():
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Chinese
    if hasattr(signal, "SIGPIPE"):  # not on Windows: `head` may end the output
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sections = read()
    results = search(sections, weigh(sections), text)
    if not results:
        sys.exit(f"search.py: no page has any of these words: {text}")
    found = []
    for number, section in enumerate(results, 1):
        found.append(f"{number}. " + "; ".join(f"{label}: {target}" for label, target in section.targets))
        found.append(textwrap.indent(textwrap.fill(textwrap.shorten(best_line(section, text), 500), 116), "   "))
    print("\n".join(found))


if __name__ == "__main__":
    main()
