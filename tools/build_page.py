"""Build docs/index.html, the page that shows the scripts side by side, from the scripts and the texts.

    python tools/build_page.py             # writes docs/index.html
    python tools/build_page.py --check     # exit code 1 if docs/index.html is not up to date
    python tools/build_page.py --picture   # also writes docs/figures/page.png, with Chromium and requirements-drill.txt

The build fails if the texts name a line that no script contains.
"""
import ast
import dataclasses
import html
import json
import re
import shutil
import sys
from pathlib import Path

import diffs
import markers
import texts

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
DOCS = ROOT / "docs"


@dataclasses.dataclass
class Script:
    """A script on the page; `name` is its path from the root, and `docstring_end` is 1-based.

    `blocks` are its own; `marked` includes its ancestors'.
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

    @property
    def parent(self) -> str | None:
        """The first parent: the tree lists the script below it."""
        return self.parents[0] if self.parents else None


Scripts = dict[str, Script]


def read_scripts(root: Path = ROOT) -> Scripts:
    """Return the scripts by name, each parent before its children."""
    found = {}
    for path in markers.scripts(root):
        name, *parents = (file.relative_to(root).as_posix() for file in [path, *markers.parents_of(path)])
        text = path.read_text()
        first, *rest = (ast.get_docstring(ast.parse(text)) or "").split("\n")
        commands = [line.strip() for line in rest if re.match(rf"    (pip |.*\b{name})", line)]
        commands.sort(key=lambda command: name not in command)  # noqa: B023, because sort() calls it at once
        found[name] = Script(path, name, text.splitlines(), parents, markers.compare(path), markers.find_blocks(path),
                             ast.parse(text).body[0].end_lineno or 0, first, commands)
    ordered: dict[str, Script] = {}

    def add(parent: str | None) -> None:
        children = [script for script in found.values() if script.parent == parent]
        for script in sorted(children, key=lambda child: (child.name.startswith("loader"), child.name)):
            ordered[script.name] = script
            add(script.name)

    add(None)
    if len(ordered) != len(found):
        lost = ", ".join(sorted(set(found) - set(ordered)))
        raise markers.BrokenRule(f"no way from a script without a parent to {lost}")
    placed: Scripts = {}
    while ordered:  # after the last of its parents, not the first
        name = next(name for name, script in ordered.items() if placed.keys() >= set(script.parents))
        placed[name] = ordered.pop(name)
    return placed


def ideas_of(block: markers.Block, tags: set[str]) -> list[str]:
    """Return the tags of the ideas that a block of a script with these tags belongs to.

    A tag can consist of two (`yolov3_DDP`). A reason can begin with others (`combined: amp + grad_accum: why`).
    """
    parts = block.tag.split("_")
    own = parts if tags.issuperset(parts) else [block.tag]
    match = re.match(r"([\w-]+(?: \+ [\w-]+)*): ", block.reason)
    named = match[1].split(" + ") if match else []
    if tags.issuperset(named):
        return own + named
    if named[1:]:
        raise markers.BrokenRule(f"# new # {block.tag}: {block.reason}: the script has no block of one of these ideas")
    return own


def read_uses(path: Path) -> dict[str, tuple[str, str]]:
    """Return {script: (when to use it, when not)} from the table of scripts in README.md."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    head = next(row for row in rows if "when not" in row)
    linked = [(re.match(r"\[`(\S+)`\]", row[0]), row) for row in rows if len(row) == len(head)]
    when, when_not = head.index("when"), head.index("when not")
    return {match[1]: (row[when], row[when_not]) for match, row in linked if match}


def read_parts(path: Path) -> list[tuple[str, str, list[str]]]:
    """Return [(id, heading, script lines to show it beside)] for the sections of how-it-works.md."""
    parts = []
    for section in re.split(r"^(?=## )", path.read_text(), flags=re.M)[1:]:
        heading = section.split("\n", 1)[0].removeprefix("## ")
        beside = re.findall(r"<!-- beside: (.+?) -->", section)
        parts.append((f"how-{_slug(heading)}", heading, beside))
    return parts


def build(root: Path = ROOT) -> str:
    """Return the page."""
    docs = root / "docs"
    scripts = read_scripts(root)
    traps = texts.read_traps(docs / "pitfalls.md")
    parts = read_parts(docs / "how-it-works.md")
    uses = read_uses(root / "README.md")
    _check(root, scripts, traps, parts)

    data, ideas, counts = _comparisons(scripts, traps, parts)
    fill = {
        "css": (TOOLS / "page.css").read_text(),
        "js": (TOOLS / "page.js").read_text(),
        "data": json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/"),
        "tree": _tree(scripts, counts, uses, None),
        "ideas": "".join(f'<button type="button" class="t t{data["tags"].index(idea) % 8}" data-idea="{idea}" '
                         f'aria-pressed="false">{idea}</button>' for idea in ideas),
        "options": "".join(f"<option>{name}</option>" for name in scripts),
        "contents": "".join(f'<li><a href="#{name}">{texts.inline(heading)}</a></li>'
                            for name, heading, _ in parts),
        "how": _prose(docs / "how-it-works.md", docs),
        "pitfalls": _prose(docs / "pitfalls.md", docs),
    }
    page = (TOOLS / "page.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], page)


def _comparisons(scripts: Scripts, traps: dict[str, texts.Trap], parts: list) -> tuple[dict, list, dict]:
    """Return (the data for page.js, the ideas to choose from, {(left, right): changed lines})."""
    table: list[str] = []
    places: dict[str, int] = {}  # the scripts share most lines, so store each line once

    def place(line: str) -> int:
        if line not in places:
            places[line] = len(table)
            table.append(line)
        return places[line]

    def notes_for(left_lines: list[str], right_lines: list[str]) -> tuple[list[str], list[str]]:
        lines = {_as_read(line) for line in [*left_lines, *right_lines]}
        beside_traps = [trap.name for trap in traps.values()
                        if (trap.beside or trap.right.splitlines()[0].strip()) in lines]
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
               "lines": [place(line) for line in texts.color("\n".join(script.lines))]}
              for script in scripts.values()]
    tags = list(dict.fromkeys(block.tag for script in scripts.values() for block in script.marked))
    used = {idea for blocks in ideas.values() for found in blocks for idea in found}
    return {"scripts": listed, "tags": tags, "table": table, "pairs": pairs,
            "traps": {trap.name: trap.title for trap in traps.values()},
            "parts": {name: heading for name, heading, _ in parts}}, [tag for tag in tags if tag in used], counts


def _tree(scripts: Scripts, counts: dict, uses: dict[str, tuple[str, str]], parent: str | None) -> str:
    """Return the scripts that descend from `parent` as nested lists."""
    items = []
    for script in scripts.values():
        if script.parent != parent:
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
        first, more, when = "".join(commands[:1]), "", ""
        if commands[1:]:
            more = (f"<details><summary>{len(commands) - 1} more ways to start it</summary>"
                    f"{''.join(commands[1:])}</details>")
        if script.name in uses:
            use, avoid = map(texts.inline, uses[script.name])
            when = f"<dl><dt>When</dt><dd>{use}</dd><dt>When not</dt><dd>{avoid}</dd></dl>"
        children = _tree(scripts, counts, uses, script.name)
        items.append(f'<li><article class="card"><h3>{title}</h3><p class="size">{size}</p>'
                     f'<p>{html.escape(script.summary)}</p>{first}{more}{when}</article>{children}</li>')
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _prose(path: Path, docs: Path) -> str:
    """Return one of the texts as HTML, with its pictures inline and its links changed to the page's own anchors."""
    how = path.name == "how-it-works.md"

    def identify(heading: str) -> str:
        trap = texts.TRAP.fullmatch(heading)
        return trap[1] if trap else f"{'how' if how else 'pitfalls'}-{_slug(heading)}"

    def link(target: str) -> str:
        file, _, anchor = target.partition("#")
        if target.startswith("http"):
            return target
        file = file or path.name
        if file == "pitfalls.md" and anchor:
            return "#" + anchor.split("-")[0].upper()
        if file == "how-it-works.md" and anchor:
            return f"#how-{anchor}"
        if file in ("pitfalls.md", "how-it-works.md"):
            return "#" + path.stem
        if not (docs / file).exists():
            raise texts.TextError(f"{path.name}: broken link: {target}")
        return target

    def picture(source: str, description: str) -> str:
        drawing = (docs / source).read_text()
        drawing = re.sub(r"<\?xml.*?\?>\s*|<style>.*?</style>\s*", "", drawing, flags=re.S)
        return f'<figure role="img" tabindex="0" aria-label="{html.escape(description)}">{drawing}</figure>'

    text = path.read_text()
    rendered = texts.render(re.sub(r"\A# .+\n", "", text), identify, link, picture)
    known = {"pitfalls", "how-it-works", *(name for name, *_ in read_parts(docs / "how-it-works.md")),
             *texts.read_traps(docs / "pitfalls.md")}
    for anchor in re.findall(r'href="#([^"]+)"', rendered):
        if anchor not in known:
            raise texts.TextError(f"{path.name}: broken link: #{anchor}")
    return rendered


def _slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def _as_read(line: str) -> str:
    """Return a line as the texts quote it: without indentation; for a marker, only the reason."""
    match = markers.MARKER.fullmatch(line)
    return f"# {match[2]}" if match and match[2] else line.strip()


def _check(root: Path, scripts: Scripts, traps: dict[str, texts.Trap], parts: list) -> None:
    """Raise TextError if the texts name a file or a line that does not exist."""
    code = {_as_read(line) for script in scripts.values() for line in script.lines}
    for trap in traps.values():
        if not (root / trap.file).is_file():
            raise texts.TextError(f"pitfalls.md: {trap.name}: there is no {trap.file}")
        trap.put_back((root / trap.file).read_text())
    named = [("pitfalls.md", trap.name, trap.beside) for trap in traps.values() if trap.beside]
    named += [("how-it-works.md", heading, line) for _, heading, beside in parts for line in beside]
    for file, what, line in named:
        if line not in code:
            raise texts.TextError(f"{file}: '{what}' names a line that no script has: {line}")


def main() -> None:
    target = DOCS / "index.html"
    try:
        page = build()
    except (markers.BrokenRule, texts.TextError) as error:
        sys.exit(f"build_page.py: error: {error}")
    if "--check" in sys.argv[1:]:
        if not target.exists() or target.read_text() != page:
            sys.exit("docs/index.html is not up to date: run python tools/build_page.py")
        return
    target.write_text(page)
    print(f"{target.name}: {len(page.encode()):,} bytes")
    if "--picture" in sys.argv[1:]:
        _take_picture(target)


def _take_picture(page: Path) -> None:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for name in ("headless=new", "no-sandbox", "hide-scrollbars", "disable-background-networking"):
        options.add_argument(f"--{name}")
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as browser:
        size = {"width": 1280, "height": 760, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(f"{page.as_uri()}#train_DDP.py...train_grad_accum.py")
        browser.execute_script("document.getElementById('change-4').scrollIntoView({block: 'center'})")
        browser.save_screenshot(str(DOCS / "figures/page.png"))


if __name__ == "__main__":
    main()
