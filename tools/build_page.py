"""Build docs/index.html, the page that shows the scripts side by side, from the scripts and the texts.

    python tools/build_page.py            # writes docs/index.html, which git ignores; open it in a browser
    python tools/build_page.py --index    # first writes the titles and links in docs/pitfalls/README.md

The build fails if the texts name a line that no script contains. The environment variable REPOSITORY is where the
links of a published page lead, such as https://github.com/OWNER/NAME/blob/main; without it, they lead to the files
next to the page.
"""
import ast
import dataclasses
import functools
import html
import json
import os
import posixpath
import re
import sys
from pathlib import Path

import diffs
import markers
import search
import texts

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
DOCS = ROOT / "docs"


@dataclasses.dataclass
class Script:
    """A script on the page; `name` is its path from the root, and `docstring_end` is 1-based.

    `blocks` contains the script's own blocks; `marked` also contains those of its ancestors.
    """

    path: Path
    name: str
    lines: list[str]
    parents: list[str]
    blocks: list[markers.Block]
    marked: list[markers.Block]
    docstring_end: int
    summary: str
    commands: list[str]


Scripts = dict[str, Script]


@functools.cache
def read_scripts(root: Path = ROOT) -> Scripts:
    """Return the scripts by name, each parent before its children."""
    found: Scripts = {}
    for path in markers.scripts(root):
        name, *parents = (file.relative_to(root).as_posix() for file in [path, *markers.parents_of(path)])
        text = path.read_text()
        first, *rest = (ast.get_docstring(ast.parse(text)) or "").split("\n")
        commands = [line.strip() for line in rest if re.match(rf"    (pip |.*\b{name})", line)]
        commands.sort(key=lambda command: name not in command)  # noqa: B023, because sort() calls it at once
        found[name] = Script(path, name, text.splitlines(), parents, markers.compare(path), markers.find_blocks(path),
                             ast.parse(text).body[0].end_lineno or 0, first, commands)

    def chain(name: str) -> list[tuple[bool, str]]:  # a child follows the last of its parents, depth first
        return [*max(map(chain, found[name].parents), default=[]), (name.startswith("loader"), name)]

    return {name: found[name] for name in sorted(found, key=chain)}


def ideas_of(block: markers.Block, tags: set[str]) -> list[str]:
    """Return the tags of the ideas that a block belongs to; `tags` are those of its script.

    A reason can begin with more tags (`combined: amp + grad_accum: why`).
    """
    match = re.match(r"([\w-]+(?: \+ [\w-]+)*): ", block.reason)
    named = match[1].split(" + ") if match else []
    if tags.issuperset(named):
        return [block.tag, *named]
    if named[1:]:
        raise markers.BrokenRule(f"# new # {block.tag}: {block.reason}: the script has no block of one of these ideas")
    return [block.tag]


def read_parts(path: Path) -> list[tuple[str, str, list[str]]]:
    """Return [(id, heading, script lines to show it beside)] for the sections of how-it-works.md."""
    sections = re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", path.read_text(), re.M)
    return [(f"how-{texts.slug(heading)}", heading, re.findall(r"<!-- beside: (.+?) -->", section))
            for heading, section in sections]


def read(root: Path = ROOT) -> tuple[Scripts, dict[str, texts.Mutation], dict[str, texts.Trap], list]:
    """Return the scripts, mutations, pitfalls and parts of how-it-works.md; raise TextError if these do not match."""
    scripts, mutations = read_scripts(root), texts.read_mutations(TOOLS / "mutations.txt")
    traps, parts = texts.read_traps(root / "docs/pitfalls", mutations), read_parts(root / "docs/how-it-works.md")
    for mutation in mutations.values():
        if not (root / mutation.file).is_file():
            raise texts.TextError(f"mutations.txt: {mutation.name}: there is no {mutation.file}")
        mutation.put_back((root / mutation.file).read_text())
    text = (root / "docs/pitfalls/README.md").read_text()
    if texts.index(text, traps) != text:
        raise texts.TextError("pitfalls/README.md: not up to date: python tools/build_page.py --index writes it")
    code = {_as_read(line) for script in scripts.values() for line in script.lines}
    named = [("pitfalls", trap.name, trap.beside) for trap in traps.values() if trap.beside]
    named += [("how-it-works.md", heading, line) for _, heading, beside in parts for line in beside]
    for file, what, line in named:
        if line not in code:
            raise texts.TextError(f"{file}: '{what}' names a line that no script has: {line}")
    return scripts, mutations, traps, parts


def build(root: Path = ROOT) -> str:
    """Return the page."""
    docs = root / "docs"
    scripts, mutations, traps, parts = read(root)
    data, ideas, counts = _comparisons(scripts, mutations, traps, parts)
    fill = {
        "css": (TOOLS / "page.css").read_text(), "js": (TOOLS / "page.js").read_text(),
        "data": json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/"),
        "index": json.dumps(_index(root), separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/"),
        "tree": _tree(scripts, counts, None),
        "ideas": "".join(f'<button type="button" class="t t{data["tags"].index(idea) % 8}" data-idea="{idea}" '
                         f'aria-pressed="false">{idea}</button>' for idea in ideas),
        "options": "".join(f"<option>{name}</option>" for name in scripts),
        "contents": "".join(f'<li><a href="#{name}">{texts.inline(heading)}</a></li>'
                            for name, heading, _ in parts),
        "how": _prose("how-it-works.md", (docs / "how-it-works.md").read_text(), docs, set(traps)),
        "pitfalls": _prose("pitfalls/README.md", texts.by_symptom((docs / "pitfalls/README.md").read_text(), traps),
                           docs, set(traps))}
    page = (TOOLS / "page.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], page)


def _comparisons(scripts: Scripts, mutations: dict[str, texts.Mutation], traps: dict[str, texts.Trap],
                 parts: list) -> tuple[dict, list, dict]:
    """Return (the data for page.js, the ideas to choose from, {(left, right): changed lines})."""
    table: dict[str, int] = {}  # the scripts share most lines, so store each line once

    def notes_for(left_lines: list[str], right_lines: list[str]) -> tuple[list[str], list[str]]:
        lines = {_as_read(line) for line in [*left_lines, *right_lines]}
        beside_traps = [trap.name for trap in traps.values()
                        if (trap.beside or mutations[trap.name].right.splitlines()[0].strip()) in lines]
        return beside_traps, [name for name, _, beside in parts if lines & set(beside)]

    names, pairs, counts = list(scripts), {}, {}
    for a, left in enumerate(names):
        for b, right in enumerate(names[a + 1:], a + 1):
            steps, count, changes = diffs.compare(scripts[left], scripts[right], notes_for)
            pairs[f"{a},{b}"] = [count, changes, steps]
            counts[left, right] = count
    ideas = {script.name: [ideas_of(block, {block.tag for block in script.marked}) for block in script.marked]
             for script in scripts.values()}
    listed = [{"name": script.name, "parents": script.parents, "doc": script.docstring_end,
               "blocks": [[block.first - 1, block.last - 1, block.tag, found]
                          for block, found in zip(script.marked, ideas[script.name], strict=True)],
               "lines": [table.setdefault(line, len(table)) for line in texts.color("\n".join(script.lines))]}
              for script in scripts.values()]
    tags = list(dict.fromkeys(block.tag for script in scripts.values() for block in script.marked))
    used = {idea for blocks in ideas.values() for found in blocks for idea in found}
    return {"scripts": listed, "tags": tags, "table": list(table), "pairs": pairs,
            "traps": {trap.name: trap.title for trap in traps.values()},
            "parts": {name: heading for name, heading, _ in parts}}, [tag for tag in tags if tag in used], counts


def _tree(scripts: Scripts, counts: dict, parent: str | None) -> str:
    """Return the scripts whose first parent is `parent` as nested lists."""
    items = []
    for script in scripts.values():
        if [*script.parents, None][0] != parent:
            continue
        size = f"{len(script.lines)} lines" + "".join(
            f', <strong>{counts[name, script.name]} changed</strong> <a href="#{name}...{script.name}"'
            f' aria-label="compare {script.name} with its parent {name}">compare with {name}</a>'
            for name in script.parents)
        target = f"#{parent or script.name}...{script.name}"
        if not parent:
            size += " <span>no parent</span>"
        title = f'<a class="script" href="{target}">{script.name}</a>'
        commands = [texts.command(line) for line in script.commands]
        first, more = "".join(commands[:1]), ""
        if commands[1:]:
            more = (f"<details><summary>{len(commands) - 1} more ways to start it</summary>"
                    f"{''.join(commands[1:])}</details>")
        children = _tree(scripts, counts, script.name)
        items.append(f'<li><article class="card"><h3>{title}</h3><p class="size">{size}</p>'
                     f'<p>{html.escape(script.summary)}</p>{first}{more}</article>{children}</li>')
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _prose(name: str, text: str, docs: Path, traps: set[str]) -> str:
    """Return a text of docs/`name` as HTML, with its pictures inline and its links changed to the page's anchors."""
    how = name == "how-it-works.md"

    def identify(heading: str) -> str:
        trap = texts.TRAP.fullmatch(heading)
        return trap[1] if trap else f"{'how' if how else 'pitfalls'}-{texts.slug(heading)}"

    def link(target: str) -> str:
        file, _, anchor = target.partition("#")
        if target.startswith("http"):
            return target
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), file)) if file else name
        if not (docs / path).exists():
            raise texts.TextError(f"{name}: broken link: {target}")
        return _address(path, anchor)

    def picture(source: str, description: str) -> str:
        drawing = (docs / source).read_text()
        drawing = re.sub(r"<\?xml.*?\?>\s*|<style>.*?</style>\s*", "", drawing, flags=re.S)
        return f'<figure role="img" tabindex="0" aria-label="{html.escape(description)}">{drawing}</figure>'

    rendered = texts.render(re.sub(r"\A# .+\n", "", text), identify, link, picture)
    known = {"pitfalls", "how-it-works", *traps, *(part for part, *_ in read_parts(docs / "how-it-works.md")),
             *map(identify, re.findall(r"^###? (.+)", text, re.M))}
    for anchor in re.findall(r'href="#([^"]+)"', rendered):
        if anchor not in known:
            raise texts.TextError(f"{name}: broken link: #{anchor}")
    return rendered


def _address(path: str, anchor: str) -> str:
    """Return the address of a section, whose page's path is relative to docs/: on this page if it is shown here."""
    if path == "how-it-works.md":
        return f"#how-{anchor or 'it-works'}"
    if path.startswith("pitfalls/") and (trap := re.match(r"[a-z]\d+(?=-)", anchor)):
        return f"#{trap[0].upper()}"
    if path == "pitfalls/README.md":
        return f"#pitfalls-{anchor}" if anchor else "#pitfalls"
    if repository := os.environ.get("REPOSITORY"):
        path = f"{repository}/{posixpath.normpath(f'docs/{path}')}"
    return f"{path}#{anchor}" if anchor else path


def _index(root: Path) -> dict:
    """Return the index of the pages, and how tools/search.py splits a text into terms, for page.js."""
    def address(target: str) -> str:
        page, _, anchor = target.partition("#")
        return _address(posixpath.relpath(page, "docs"), anchor)

    sections = search.read(root)
    return {"split": {"word": search.WORD.pattern, "part": search.PART.pattern, "ending": search.ENDING.pattern,
                      "doubled": search.DOUBLED.pattern, "chinese": search.CHINESE.pattern,
                      "common": sorted(search.COMMON)},
            "sections": [[[(label, address(target)) for label, target in section.targets], section.lines,
                          section.language]
                         for section in sections],
            "weights": {term: [number for pair in found.items() for number in pair]
                        for term, found in search.weigh(sections).items()}}


def _as_read(line: str) -> str:
    """Return a line as the texts quote it: without indentation; for a marker, only the reason."""
    match = markers.MARKER.fullmatch(line)
    return f"# {match[2]}" if match and match[2] else line.strip()


def main() -> None:
    target, index = DOCS / "index.html", DOCS / "pitfalls/README.md"
    try:
        if "--index" in sys.argv[1:]:
            traps = texts.read_traps(index.parent, texts.read_mutations(TOOLS / "mutations.txt"))
            index.write_text(texts.index(index.read_text(), traps))
        page = build()
    except (markers.BrokenRule, texts.TextError) as error:
        sys.exit(f"build_page.py: error: {error}")
    target.write_text(page)
    print(f"{target.name}: {len(page.encode()):,} bytes")


if __name__ == "__main__":
    main()
