"""A search for what a terminal prints, or for what people ask, finds the answer, at most two pages from README."""
import re

import pytest
import texts
from conftest import ROOT

LINES = (ROOT / "tests/unit/symptoms.txt").read_text().splitlines()
SYMPTOMS = [line.split(" -> ") for line in LINES if line and not line.startswith("#")]
TARGET = re.compile(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)")


def shown(text):
    """Return a page's text as a browser searches it: without Markdown, in one line, in lower case."""
    text = re.sub(r"\]\([^)\s]+\)|\*\*|[`\[]", "", text)
    return " ".join(text.lower().split())


def links(page):
    """Return [(line, page, anchor)] for each link to a page of the repository."""
    for line in (ROOT / page).read_text().splitlines():
        for file, anchor in TARGET.findall(line):
            path = ((ROOT / page).parent / file).resolve() if file else ROOT / page
            if path.suffix == ".md" and path.is_relative_to(ROOT):
                yield line, path.relative_to(ROOT).as_posix(), anchor


def section(page, anchor):
    """Return a heading and the text up to the next one; without an anchor, the whole page."""
    text = (ROOT / page).read_text()
    parts = re.split(r"^(##+ .+)$", text, flags=re.M)
    found = [heading + body for heading, body in zip(parts[1::2], parts[2::2])
             if texts.slug(heading.lstrip("# ")) == anchor]
    return "".join(found) if anchor else text


def within_two_pages(readme):
    """Return the pages that README links to, and those that these link to; README in another language leads nowhere."""
    first = {page for _, page, _ in links(readme) if not page.startswith("README")}
    return first | {page for one in first for _, page, _ in links(one)}


@pytest.fixture(scope="module")
def near():
    return {readme: within_two_pages(readme) for readme in ("README.md", "README.zh-CN.md")}


def test_there_are_many_symptoms_and_none_twice():
    assert all(len(symptom) == 2 for symptom in SYMPTOMS)
    assert len(SYMPTOMS) >= 80 and len({tuple(symptom) for symptom in SYMPTOMS}) == len(SYMPTOMS)


@pytest.mark.parametrize("target", sorted({target for _, target in SYMPTOMS}))
def test_a_search_finds_the_answers_of_a_section(target, near):
    page, _, anchor = target.partition("#")
    answer = shown(section(page, anchor))
    assert answer, "no such section"
    rows = [shown(line) for index in ("README.zh-CN.md", "docs/symptoms.zh-CN.md") for line, *linked in links(index)
            if linked == [page, anchor]]
    lacking = []
    for text in (text for text, other in SYMPTOMS if other == target):
        readme, places = ("README.md", [answer]) if text.isascii() else ("README.zh-CN.md", rows)
        if page not in near[readme] or not any(shown(text) in place for place in places):
            lacking.append(text)
    assert not lacking
