"""The action for pull requests: its step, as a runner starts it."""
import os

import pytest
import yaml
from conftest import PYTHON, ROOT, run

ACTION = yaml.safe_load((ROOT / "verify/action.yml").read_text())
PROGRAM = """import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1, dtype=torch.bfloat16 if sys.argv[2:] else None)
optimizer = torch.optim.SGD(model.parameters(), float(sys.argv[1]))
for batch in torch.randn(5, 8, 4, dtype=model.weight.dtype):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("a", "b", "code", "said"), [
    pytest.param("0.1", "0.2", 1, "::error title=verify%3A different learning-rate::", marks=pytest.mark.drill),
    *(pytest.param(*row, marks=pytest.mark.nightly) for row in (
        ("0.1", "0.1", 0, ""),
        ("0.1", "none", 2, "::error title=verify%3A not comparable::command B failed: exit code 1%0A"),
        ("0.1", "0.1 16", 0, "::warning title=verify%3A alike::5 steps, within ")))])
def test_the_step_annotates_what_differs(tmp_path, a, b, code, said):
    (tmp_path / "program.py").write_text(PROGRAM)
    [step] = ACTION["runs"]["steps"]
    given = {"inputs.a": f"{PYTHON} program.py {a}", "inputs.b": f"{PYTHON} program.py {b}",
             "inputs.options": ACTION["inputs"]["options"]["default"], "github.action_path": str(ROOT / "verify")}
    env = dict(step["env"])
    for name, value in given.items():
        env = {key: text.replace("${{ " + name + " }}", value) for key, text in env.items()}
    path = os.pathsep.join([os.path.dirname(PYTHON), os.environ["PATH"]])
    result = run("bash", "-e", "-c", step["run"], cwd=tmp_path, env=env | {"RUNNER_TEMP": str(tmp_path), "PATH": path})
    assert result.code == code and said in result.out and ("::" in result.out) == bool(said), result
