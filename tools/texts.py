"""The texts of the page: the part of Markdown that they are written in, and the fixed form of a pitfall."""
import dataclasses
import html
import re
import textwrap

import pygments.lexers
import pygments.token

CLASSES = [  # of the colours in page.css, the first that fits
    (pygments.token.Comment, "co"), (pygments.token.String.Interpol, ""), (pygments.token.String, "st"),
    (pygments.token.Number, "nu"), (pygments.token.Keyword, "ke"), (pygments.token.Operator.Word, "ke"),
    (pygments.token.Name.Function, "fu"), (pygments.token.Name.Class, "fu"),
    (pygments.token.Name.Decorator, "fu"), (pygments.token.Name.Builtin, "bu"),
    (pygments.token.Name.Exception, "bu"),
]
TRAP = re.compile(r"([SDPE]\d+) (.+)")
FIELDS = ["Symptom", "Cause", "Wrong", "Right", "Beside", "Test", "Read"]
OPTIONAL = {"Beside", "Read"}


class TextError(Exception):
    """A text is not in the form that the page is built from; the message names the file and the place."""


@dataclasses.dataclass
class Trap:
    """One pitfall: `wrong` is what others have in the place of the lines `right` of `file`.

    `beside` is the line of a script that it is shown beside, where that is not the first of `right`.
    """

    name: str
    title: str
    symptom: str
    cause: str
    wrong: str
    file: str
    right: str
    beside: str
    test: str

    def put_back(self, text):
        """Return a file's text with the wrong lines put back; TextError unless the right ones stand once."""
        lines, right = text.splitlines(), self.right.splitlines()
        found = [start for start in range(len(lines) - len(right) + 1)
                 if textwrap.dedent("\n".join(lines[start:start + len(right)])) == self.right]
        if len(found) != 1:
            raise TextError(f"pitfalls.md: {self.name}: its right lines stand {len(found)} times, not once, "
                            f"in {self.file}: {right[0]}")
        indent = re.match(r"\s*", lines[found[0]])[0].removesuffix(re.match(r"\s*", right[0])[0])
        lines[found[0]:found[0] + len(right)] = textwrap.indent(self.wrong, indent).splitlines()
        return "\n".join(lines) + "\n"


def read_traps(path):
    """Return the pitfalls of a file by name; TextError where one is not in the fixed form."""
    traps = {}
    for section in re.split(r"^(?=### )", path.read_text(), flags=re.M)[1:]:
        heading, body = section.split("\n", 1)
        match = TRAP.fullmatch(heading.removeprefix("### "))
        if not match or match[1] in traps:
            raise TextError(f"{path.name}: '{heading}' is no '### NAME title' with a name of its own")
        body = re.split(r"^## ", body, flags=re.M)[0]
        parts = re.split(r"^\*\*(\w+):\*\*\s*", body, flags=re.M)
        names, values = parts[1::2], [value.strip() for value in parts[2::2]]
        if parts[0].strip() or [name for name in FIELDS if name in names or name not in OPTIONAL] != names:
            raise TextError(f"{path.name}: {match[1]} has the fields {names}, not {FIELDS}, "
                            f"of which {OPTIONAL} may be left out")
        fields = dict(zip(names, values, strict=True))
        wrong = re.fullmatch(r"```python\n(.*?)\n```", fields["Wrong"], re.S)
        right = re.fullmatch(r"`([\w./]+)`\n\n```python\n(.*?)\n```", fields["Right"], re.S)
        test = re.fullmatch(r"\(pending\)|none: .+|`[\w./]+(::\w+)+(\[[^`]+\])?`", fields["Test"])
        beside = re.fullmatch(r"`(.+)`", fields.get("Beside", "`-`"))
        if not (wrong and right and test and beside):
            raise TextError(f"{path.name}: {match[1]}: Wrong, Right, Beside or Test is not in its form")
        prose = fields["Symptom"], fields["Cause"]
        traps[match[1]] = Trap(*match.groups(), *prose, wrong[1], *right.groups(),
                               beside[1].removeprefix("-"), fields["Test"].strip("`"))
    return traps


def colour(text, lexer="python"):
    """Return the lines of a program as HTML, coloured."""
    lexer = pygments.lexers.get_lexer_by_name(lexer, stripnl=False, ensurenl=False)
    lines = [""]
    for kind, value in lexer.get_tokens(text):
        css = next((name for token, name in CLASSES if kind in token), "")
        for number, part in enumerate(value.split("\n")):
            if number:
                lines.append("")
            if part:
                escaped = html.escape(part, quote=False)
                lines[-1] += f'<span class="{css}">{escaped}</span>' if css and part.strip() else escaped
    return lines


def inline(text, link=lambda target: target):
    """Return one paragraph's Markdown as HTML: code, strong, emphasis and links."""
    kept = []

    def keep(rendered):
        kept.append(rendered)
        return f"\0{len(kept) - 1}\0"

    def anchor(match):
        target = link(match[2])
        rel = ' rel="noreferrer"' if target.startswith("http") else ""
        return keep(f'<a href="{html.escape(target)}"{rel}>') + match[1] + keep("</a>")

    def code(match):
        return keep(f"<code>{html.escape(match[2].strip(), quote=False)}</code>")

    text = re.sub(r"(`+)(.+?)\1(?!`)", code, text)
    text = re.sub(r"\[([^]]+)\]\(([^)\s]+)\)", anchor, text)
    text = html.escape(text, quote=False)
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"(?<!\w)\*(\S.*?)\*(?!\w)", r"<em>\1</em>", text)
    while "\0" in text:
        text = re.sub("\0(\\d+)\0", lambda match: kept[int(match[1])], text)
    return text


def render(text, identify, link, picture):
    """Return Markdown as HTML: headings, paragraphs, lists, fenced code and pictures that stand alone.

    `identify(level, heading)` gives a heading's id, `link(target)` what a link of the text is on the page,
    and `picture(source, description)` the HTML of a picture. Headings are one level lower on the page. A
    section of level 3 is wrapped as an article with its id. Comments are left out.
    """
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.S)
    parts, article = [], False
    for block in re.findall(r"```.*?^```|(?:(?!```)[^\n]+\n?)+", text, flags=re.S | re.M):
        block = block.rstrip("\n")
        heading = re.fullmatch(r"(#+) (.+)", block)
        image = re.fullmatch(r"!\[([^]]*)\]\(([^)]+)\)", block)
        if heading:
            level, name = len(heading[1]), identify(len(heading[1]), heading[2])
            if article and level <= 3:
                parts.append("</article>")
                article = False
            title = inline(heading[2], link)
            if level == 3:
                parts.append(f'<article id="{name}"><h4>{title} <a class="here" href="#{name}" '
                             f'aria-label="link to {name}">#</a></h4>')
                article = True
            else:
                parts.append(f'<h{level + 1} id="{name}">{title}</h{level + 1}>')
        elif image:
            parts.append(picture(image[2], image[1]))
        elif block.startswith("```"):
            language, code = block.removesuffix("```")[3:].rstrip("\n").split("\n", 1)
            if language == "console":
                parts += map(command, code.split("\n"))
                continue
            about = re.fullmatch(r"<p><strong>(\w+):</strong>.*", parts[-1])
            css = f' class="{about[1].lower()}"' if about else ""
            lines = "\n".join(colour(code, language))
            parts.append(f'<pre{css} tabindex="0"><code>{lines}</code></pre>')
        elif block.startswith("- "):
            items = (inline(_one_line(item[2:]), link) for item in re.split(r"\n(?=- )", block))
            parts.append("<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>")
        elif block.startswith("**Beside:**"):  # for the comparison, not for the reader
            continue
        else:
            parts.append(f"<p>{inline(_one_line(block), link)}</p>")
    return "\n".join(parts + ["</article>"] * article)


def command(line):
    """Return a command with a button that copies it."""
    line = html.escape(line)
    return (f'<div class="command"><code tabindex="0">{line}</code><button type="button" class="copy" '
            f'data-copy="{line}" aria-label="copy the command">copy</button></div>')


def _one_line(text):
    return " ".join(text.split())
