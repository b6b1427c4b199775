"""README.zh-CN.md has the commands and the links of README.md."""
import re
from collections import Counter

import pytest
from conftest import ROOT

ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))


def blocks(text):
    return re.findall(r"^```\w*\n.*?^```", text, re.M | re.S)


def links(text):
    return Counter(target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith(("#", "README")))


@pytest.mark.parametrize("part", [blocks, links])
def test_both_languages_have_the_same(part):
    assert part(CHINESE) == part(ENGLISH)
