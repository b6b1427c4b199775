"""verify on the scripts, as they are launched."""
import json
import shlex

import pytest
from conftest import SAME, run


@pytest.mark.drill
def test_another_rate_is_named_as_the_cause(tmp_path):
    """The run ends after three steps; run() checks that no process is left."""
    commands = [f"python train.py {shlex.join(SAME)} --output-dir {tmp_path}/one",
                f"torchrun --nproc-per-node=2 train_DDP.py {shlex.join(SAME)} --lr 0.1 --output-dir {tmp_path}/two"]
    result = run("python", "-m", "verify", "--steps", "3", "--json", tmp_path / "report.json", *commands)
    assert result.code == 1, result.out + result.err
    assert result.out.splitlines()[:4] == [f"A: {commands[0]}", "   1 rank(s), 3 steps, float64 precision",
                                           f"B: {commands[1]}", "   2 rank(s), 3 steps, float64 precision"]
    assert "\ncause: learning-rate: " in result.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["verdict"], report["cause"], report["step"], report["ranks"]) == (
        "different", "learning-rate", 1, [1, 2])
