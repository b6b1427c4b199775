"""All cells of docs/kaggle.ipynb run on a CPU, and a killed report can be continued."""
import json
import os
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT

pytestmark = pytest.mark.nightly  # several minutes, and the first test installs packages
REPORT = ["-m", "tools.gpu_report", "--device", "cpu"]


def test_the_notebook_gets_the_repository_trains_and_reports(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install -r requirements/drill.txt")
    import nbformat

    notebook = nbformat.read(ROOT / "docs/kaggle.ipynb", 4)
    assert nbformat.validate(notebook) is None
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    for old, new in (("URL-OF-THIS-REPOSITORY", str(ROOT)),
                     ('OPTIONS = ""', 'OPTIONS = "--device cpu --only cnn.*bare.step$"')):
        assert first.source.count(old) == 1
        first.source = first.source.replace(old, new)
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}:{os.environ['PATH']}")
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, trained, verified, reported, _ = (
        "".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells
        if cell.cell_type == "code")
    assert "epoch  10/10 " in trained and "same: 20 steps" in verified and "1 passed, 0 failed" in reported
    shown = notebook.cells[-1].outputs[0]["data"]["text/markdown"]
    assert "# none, torch" in shown and "\n| bare step | " in shown
    assert json.loads((ROOT / "docs/kaggle.ipynb").read_text())["cells"][1]["outputs"] == []
