"""Read the pitfalls, and render Markdown as HTML with syntax highlighting."""
import dataclasses
import html
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pygments.lexers
import pygments.token
from markdown_it import MarkdownIt
from markdown_it.token import Token
from search import slug

CLASSES = [  # for the colors in page.css; the first match wins
    (pygments.token.Comment, "co"), (pygments.token.String.Interpol, ""), (pygments.token.String, "st"),
    (pygments.token.Number, "nu"), (pygments.token.Keyword, "ke"), (pygments.token.Operator.Word, "ke"),
    (pygments.token.Name.Function, "fu"), (pygments.token.Name.Class, "fu"),
    (pygments.token.Name.Decorator, "fu"), (pygments.token.Name.Builtin, "bu"),
    (pygments.token.Name.Exception, "bu")]
LETTERS = {"S": "starting.md", "D": "data.md", "P": "step.md", "E": "saving.md", "Y": "detection.md",
           "F": "sharding.md", "L": "language.md"}  # the files of docs/pitfalls/
TRAP = re.compile(r"([SDPEYFL]\d+) (.+)")
CODE = r"```python\n(?P<{}>(?s:.+?))\n```"
TEXT = r"(?s:(?:(?!\n\*\*).)+)"  # up to the next field
FORM = re.compile(rf"## (?P<name>[SDPEYFL]\d+) (?P<title>.+)\n\n\*\*Symptom:\*\* {TEXT}\n"
                  rf"\*\*Cause:\*\* {TEXT}\n\*\*Wrong:\*\*\n\n{CODE.format('wrong')}\n\n"
                  rf"\*\*Right:\*\*\n\n{CODE.format('right')}"
                  rf"(?:\n\n\*\*Script:\*\* `(?P<beside>.+)`)?(?:\n\n\*\*Read:\*\* {TEXT})?")
ENTRY = re.compile(r"^- \[([SDPEYFL]\d+)\b.*\n", re.M)  # in the index, docs/pitfalls/README.md


class TextError(Exception):
    """A text does not have the required form; the message names the file and the place."""


@dataclasses.dataclass
class Trap:
    """One pitfall, as the page shows it, next to the line `beside` of a script; `text` is its section."""

    text: str
    name: str
    title: str
    wrong: str
    right: str
    beside: str


@dataclasses.dataclass
class Mutation:
    """A change that puts a pitfall back: `wrong` replaces the lines `right` of `file`, and `test` must fail."""

    name: str
    file: str
    test: str
    right: str
    wrong: str

    def put_back(self, text: str) -> str:
        """Return a file's text with the wrong lines; raise TextError unless it has the right lines exactly once."""
        first, *rest = map(re.escape, self.right.splitlines())
        pattern = "\n".join([f"^( *){first}", *(rf"\1{line}" if line else "" for line in rest)]) + "\n"
        found = list(re.finditer(pattern, text, re.M))
        if len(found) != 1:
            raise TextError(f"mutations.txt: {self.name}: {self.file} has its right lines {len(found)} times")
        wrong = textwrap.indent(self.wrong, found[0][1]) + "\n" * bool(self.wrong)
        return text[:found[0].start()] + wrong + text[found[0].end():]


def read_mutations(path: Path) -> dict[str, Mutation]:
    """Return the mutations of a file by name; raise TextError if one does not have the required form."""
    found: dict[str, Mutation] = {}
    for part in re.split(r"\n\n+(?=[A-Z]\d)", path.read_text().rstrip())[1:]:
        form = r"([A-Z]\d+(?:\.\d)?) (\S+)\n(none: .+|tests/.+)\n((?:-.*\n)+)((?:\+.*\n)+)"
        match = re.fullmatch(form, part + "\n")
        if not match or match[1] in found:
            raise TextError(f"{path.name}: not of the required form: {part}")
        right, wrong = ("\n".join(line[1:] for line in lines.splitlines()) for lines in (match[4], match[5]))
        found[match[1]] = Mutation(match[1], match[2], match[3], right, wrong)
    return found


def read_traps(folder: Path, mutations: dict[str, Mutation]) -> dict[str, Trap]:
    """Return the pitfalls of docs/pitfalls/ by name; raise TextError if one does not have the required form."""
    traps: dict[str, Trap] = {}
    for letter, file in LETTERS.items():
        numbers = []
        for section in re.split(r"^(?=## )", (folder / file).read_text(), flags=re.M)[1:]:
            match = FORM.fullmatch(section.rstrip())
            if not match or match["name"] not in mutations:
                raise TextError(f"{file}: not a name of mutations.txt, or not of the form: {section}")
            traps[match["name"]] = Trap(section, **match.groupdict(""))
            numbers += [int(match["name"][1:])] if match["name"][0] == letter else [-1]
        if numbers != sorted({*numbers, 0})[1:]:
            raise TextError(f"{file}: not {letter} and a new number each, in ascending order")
    return traps


def index(text: str, traps: dict[str, Trap]) -> str:
    """Return the index of the pitfalls with their present titles; raise TextError if it does not list each one once."""
    listed = ENTRY.findall(text)
    if differs := sorted(name for name in {*listed, *traps} if listed.count(name) != (name in traps)):
        raise TextError(f"README.md: list each pitfall once, below its symptom: {', '.join(differs)}")

    def entry(match: re.Match) -> str:
        heading = f"{match[1]} {traps[match[1]].title}"
        return f"- [{heading}]({LETTERS[match[1][0]]}#{slug(heading)})\n"

    return ENTRY.sub(entry, text)


def by_symptom(text: str, traps: dict[str, Trap]) -> str:
    """Return the index with each pitfall's section, one level lower, in place of the link to it."""
    return ENTRY.sub(lambda match: f"#{traps[match[1]].text.rstrip()}\n\n", text)


def color(text: str) -> list[str]:
    """Return the lines of a Python program as HTML with syntax highlighting."""
    lines = [""]
    for kind, value in pygments.lexers.PythonLexer(stripnl=False, ensurenl=False).get_tokens(text):
        css = next((name for token, name in CLASSES if kind in token), "")
        for number, part in enumerate(value.split("\n")):
            if number:
                lines.append("")
            if part:
                escaped = html.escape(part, quote=False)
                lines[-1] += f'<span class="{css}">{escaped}</span>' if css and part.strip() else escaped
    return lines


def inline(text: str) -> str:
    """Return one line of Markdown as HTML, without a paragraph around it."""
    return MarkdownIt("commonmark").renderInline(text)


def render(text: str, identify: Callable[[str], str], link: Callable[[str], str],
           picture: Callable[[str, str], str]) -> str:
    """Return Markdown as HTML.

    `identify(heading)` returns a heading's id, `link(target)` a link's target on the page, and
    `picture(source, description)` the HTML of a picture. Headings are one level lower on the page. A section of level
    3 becomes an article with its id. A `console` block becomes commands. The result omits HTML comments and the
    field Script.
    """
    def fence(renderer: object, tokens: list[Token], at: int, *_: object) -> str:
        content = tokens[at].content.rstrip("\n")
        if tokens[at].info == "console":
            return "".join(map(command, content.split("\n")))
        lines = "\n".join(color(content)) if tokens[at].info == "python" else html.escape(content)
        return f'<pre tabindex="0"><code>{lines}</code></pre>\n'

    def image(renderer: object, tokens: list[Token], at: int, *_: object) -> str:
        return picture(str(tokens[at].attrs["src"]), tokens[at].content)

    def link_open(renderer: object, tokens: list[Token], at: int, *_: object) -> str:
        return f'<a href="{html.escape(link(str(tokens[at].attrs["href"])))}">'

    markdown = MarkdownIt("commonmark").enable("table")
    for rule in (fence, image, link_open):
        markdown.add_render_rule(rule.__name__, rule)
    # only the comparison uses these
    text = re.sub(r"^(<!--.*-->|\*\*Script:\*\* .*)\n", "", text, flags=re.M)
    first, *sections = re.split(r"^(?=###? )", text, flags=re.M)
    parts = [markdown.render(first)]
    for section in sections:
        heading, body = section.split("\n", 1)
        title, content = heading.lstrip("# "), markdown.render(body)
        name, shown = identify(title), inline(title)
        here = f' <a class="here" href="#{name}" aria-label="link to {name}">#</a>'
        of_article = f'<article id="{name}"><h4>{shown}{here}</h4>{content}</article>'
        of_part = f'<h3 id="{name}">{shown}</h3>{content}'
        parts.append(of_article if heading.startswith("### ") else of_part)
    whole = re.sub(r"<p>(<figure.*?</figure>)</p>", r"\1", "".join(parts), flags=re.S)
    return re.sub(r"(<p><strong>(Wrong|Right):</strong></p>\n<pre)",
                  lambda match: f'{match[1]} class="{match[2].lower()}"', whole)


def command(line: str) -> str:
    """Return a command with a copy button."""
    line = html.escape(line)
    return (f'<div class="command"><code tabindex="0">{line}</code><button type="button" class="copy" '
            f'data-copy="{line}" aria-label="copy the command">copy</button></div>')
