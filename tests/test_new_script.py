"""A new script needs only the script, a line in each README and a section of docs/scripts.md."""
import shutil
import sys

import pytest
from conftest import ROOT, good, run

TESTS = ["tests/test_readme.py", "tests/test_markers.py", "tests/test_page.py", "tests/unit/test_pages.py",
         "tests/unit/test_scripts.py"]
NEEDED = "train_new or not (train or loader or message)"  # not what tests another script alone, or an error message


@pytest.mark.nightly
def test_a_new_script_needs_no_edit_elsewhere(tmp_path):
    shutil.copytree(ROOT, tmp_path, ignore=shutil.ignore_patterns(".*_cache", ".git", ".venv", "data", "runs"),
                    dirs_exist_ok=True)
    text = (ROOT / "train.py").read_text()
    text = text.replace("python train.py", "python train_new.py").replace("Parent: none", "Parent: train.py")
    step = "            loss.backward()\n"
    text = text.replace(step, "\n            # new # new: half the loss\n" + step.replace("loss", "(loss / 2)") + "\n")
    (tmp_path / "train_new.py").write_text(text)
    for page, line in (("README.md", "   - [`train_new.py`](train_new.py): half the loss.\n"),
                       ("README.zh-CN.md", "   - [`train_new.py`](train_new.py)：一半的 loss。\n")):
        before, after = (tmp_path / page).read_text().split("   - [`train_DP.py`]")
        (tmp_path / page).write_text(f"{before}{line}   - [`train_DP.py`]{after}")
    with (tmp_path / "docs/scripts.md").open("a") as file:
        file.write("\n## train_new.py\n\nThis script halves the loss: `python train_new.py`.\n")
    good(run(sys.executable, "tools/build_page.py", cwd=tmp_path))
    good(run(sys.executable, "-m", "pytest", "-q", "-k", NEEDED, *TESTS, cwd=tmp_path))
