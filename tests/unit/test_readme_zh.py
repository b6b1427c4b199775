"""README.zh-CN.md has the commands, the tables, the code and the links of README.md."""
import re
from collections import Counter

import pytest
from conftest import ROOT

ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
FENCE = r"^```(\w*)\n(.*?)^```"


def blocks(text):
    """Return the fenced blocks without the comments of their commands, which are translated."""
    return [(language, re.sub(r" +# .*", "", code)) for language, code in re.findall(FENCE, text, re.M | re.S)]


def rows(text):
    """Return each row's first two columns, its numbers and its commands."""
    found = []
    for line in re.findall(r"^\| \[.*", text, re.M):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        found.append((cells[0], cells[1], cells[3], cells[4]))
    return found


def inline_code(text):
    return Counter(re.findall(r"`([^`\n]+)`", re.sub(FENCE, "", text, flags=re.M | re.S)))


def links(text):
    return Counter(target for target in re.findall(r"\]\(([^)\s]+)\)", text)
                   if not target.startswith(("#", "README")))


@pytest.mark.parametrize("part", [blocks, rows, inline_code, links])
def test_both_languages_have_the_same(part):
    assert part(CHINESE) == part(ENGLISH)
    assert len(part(ENGLISH)) > 3


@pytest.mark.parametrize("text", [ENGLISH, CHINESE])
def test_a_link_within_the_page_leads_to_a_heading(text):
    headings = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                for heading in re.findall(r"^## (.+)", text, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def test_each_language_links_the_other():
    assert "(README.zh-CN.md)" in ENGLISH.split("##")[0] and "(README.md)" in CHINESE.split("##")[0]
