"""Compute in float64, with the casts of verify's recorder, but record nothing: conftest.FLOAT64."""
import functools
import gc
import importlib.util
import runpy
import sys
from pathlib import Path

PRECISION = Path(__file__).parents[3] / "verify/precision.py"
gc.set_threshold(10_000)  # as in verify: torch loads faster


class OnTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), widen())
            return spec


def wrap(function, around):
    return functools.wraps(function)(lambda *args, **more: around(function, *args, **more))


def widen():
    for around, owner, *names in runpy.run_path(str(PRECISION))["patches"](lambda: False):
        for name in names:
            setattr(owner, name, wrap(getattr(owner, name), around))


sys.meta_path.insert(0, OnTorch())
