"""The wheel of verify runs in an environment that has torch and nothing else, outside this repository."""
import shutil
from importlib import metadata
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT, good, run
from packaging.requirements import Requirement

pytestmark = pytest.mark.drill
PROGRAM = """import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.randn(5, 8, 4):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""


def link_torch(folder):
    """Link torch, and what it requires, from this environment into `folder`."""
    folder.mkdir()
    todo, done = ["torch"], set()
    while todo:
        name = todo.pop()
        done.add(name)
        found = metadata.distribution(name)
        for top in {Path(file).parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
        needs = [each for each in map(Requirement, found.requires or []) if not each.marker or each.marker.evaluate()]
        todo += {each.name for each in needs} - done


def test_the_wheel_runs_beside_torch_alone(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "verify", source / "verify", ignore=shutil.ignore_patterns("__pycache__"))
    build = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    good(run(PYTHON, *build, "--wheel-dir", tmp_path, source))
    [wheel] = tmp_path.glob("verify_training-*.whl")

    good(run(PYTHON, "-m", "venv", "--without-pip", tmp_path / "alone"))
    python = tmp_path / "alone/bin/python"
    [packages] = (tmp_path / "alone/lib").glob("python*/site-packages")
    link_torch(tmp_path / "torch")
    (packages / "torch.pth").write_text(f"{tmp_path / 'torch'}\n")
    good(run(PYTHON, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
             "--disable-pip-version-check", wheel))
    assert run(python, "-c", "import pytest", quiet=False).code == 1

    (tmp_path / "program.py").write_text(PROGRAM)
    result = run(python, "-m", "verify", f"{python} program.py", f"{python} program.py", cwd=tmp_path)
    assert "same: 5 steps, greatest relative difference 0.0e+00" in good(result).out
    [described] = packages.glob("verify_training-*/METADATA")
    assert "# Do two programs train the same model?" in described.read_text()
