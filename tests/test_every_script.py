"""README's promise: pytest launches every script, on two processes if it has a group, and the script trains and saves.

The list of scripts is that of the folder. Other tests need these runs, too, so this file adds few launches.
"""
# ruff: noqa: F401  # pytest finds fixtures by their names in this file
import math
import re

import markers
import pytest
from conftest import epochs
from test_detection import trained as detectors
from test_language import STARTS
from test_language import trained as language
from test_loaders import DALI
from test_loaders import launched as loaders
from test_minimal import environment
from test_minimal import launched as minimal
from test_precision import bf16, few_digits
from test_training import stopped

ALONE = ["train.py", "train_DP.py", "language/train.py", "detection/train.py"]  # they have no group
SCRIPTS = [pytest.param(name, marks=DALI if name == "loader_DALI.py" else [], id=name)
           for name in map(markers.name_of, markers.scripts())]


def find_run(script):
    """Return the fixture that launches a script, and the name by which it knows this launch."""
    if script.startswith("minimal/"):
        return "minimal", script.removeprefix("minimal/")
    if script.startswith("loader"):
        return "loaders", script.removesuffix(".py")
    if script.startswith("language/"):
        start = script.removeprefix("language/"), 1 if script in ALONE else 2
        return "language", next(name for name, command in STARTS.items() if command[:2] == start)
    if script.startswith("detection/"):
        return "detectors", script.removeprefix("detection/")
    return "stopped" if script == "train_DCP.py" else "runs", script


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_launch_trains_and_saves(request, script):
    if script == "train_amp.py":
        folder, result = request.getfixturevalue("bf16")
    else:
        fixture, name = find_run(script)
        folder, result = request.getfixturevalue(fixture)(name)
    if script.startswith("loader"):
        assert re.search(r"epoch   3/3  \d+ pairs", result.out) and list(folder.glob("out/pairs.png"))
        return
    assert epochs(result.out)[-1]["loss"] and [*folder.glob("*.pt"), *folder.glob("step-*/.metadata")]
    if not script.startswith("minimal/"):  # others print a product, such as "2 process" or "1 group(s) of 2 process"
        product = re.search(r"batch \d+ = (.*?) process", result.out)[1]
        assert math.prod(map(int, re.findall(r"\d+", product))) == (1 if script in ALONE else 2)
