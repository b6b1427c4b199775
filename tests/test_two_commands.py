"""verify on the scripts, as they are launched."""
import json
import shlex

from conftest import SAME, run


def test_two_scripts_train_the_same_model(tmp_path):
    """The run ends after three steps; run() checks that no process is left."""
    commands = [f"python train.py {shlex.join(SAME)} --output-dir {tmp_path}/one",
                f"torchrun --nproc-per-node=2 train_DDP.py {shlex.join(SAME)} --output-dir {tmp_path}/two"]
    result = run("python", "-m", "verify", "--steps", "3", "--json", tmp_path / "report.json", *commands)
    assert result.code == 0, result.out + result.err
    lines = result.out.splitlines()
    assert lines[:4] == [f"A: {commands[0]}", "   1 rank(s), 3 steps, float64 precision", f"B: {commands[1]}",
                         "   2 rank(s), 3 steps, float64 precision"]
    assert lines[4].startswith("same: 3 steps, greatest relative difference ") and len(lines) == 5
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["verdict"], report["cause"], report["steps"], report["ranks"]) == ("same", None, [3, 3], [1, 2])
    assert report["difference"] < 1e-12 and report["precision"] == "float64"
