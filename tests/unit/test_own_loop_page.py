"""docs/your-own-loop.md shows lines of the programs that it names, and names every program."""
import re

import markers
from conftest import ROOT

PAGE = (ROOT / "docs/your-own-loop.md").read_text()


def test_the_excerpts_stand_in_the_programs():
    excerpts = re.findall(r"<!-- (\S+) -->\n```python\n(.*?)```", PAGE, re.S)
    assert len(excerpts) >= 10 and PAGE.count("```python") == len(excerpts)
    for file, lines in excerpts:
        assert lines in (ROOT / file).read_text(), f"{file}:\n{lines}"


def test_every_example_of_a_loop_is_in_the_page():
    """errors.py, hang.py and see.py are for other pages."""
    examples = {path.name for path in (ROOT / "docs/examples").glob("*.py")} - {"errors.py", "hang.py", "see.py"}
    assert len(examples) == 5
    assert examples == set(re.findall(r"`verify\.py` on \[`(\w+\.py)`\]\(examples/\1\)", PAGE))


def test_the_number_of_changed_lines_is_that_of_the_pair():
    changed = sum(block.changed for block in markers.compare(ROOT / "minimal/train_DDP.py"))
    assert set(re.findall(r"(\d+) lines", PAGE)) == {str(changed)}
