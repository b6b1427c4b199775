"""Compute in float64, with the casts of verify's recorder, but record nothing: conftest.FLOAT64."""
import functools
import gc
import runpy
from pathlib import Path

PRECISION = Path(__file__).parents[3] / "verify/precision.py"
gc.set_threshold(10_000)  # as in verify: torch loads faster


def wrap(function, around):
    return functools.wraps(function)(lambda *args, **more: around(function, *args, **more))


for around, owner, *names in runpy.run_path(str(PRECISION))["patches"](lambda: False):
    for name in names:
        setattr(owner, name, wrap(getattr(owner, name), around))
