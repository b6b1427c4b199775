"""Makes float64 the default type of every script that runs with this folder on PYTHONPATH.

Python imports sitecustomize when it starts. Only the scripts import `common`: launchers and helper processes do not, so
they do not wait for torch here.
"""
import sys


class BeforeCommon:
    """Finds no module; acts once, when the first import of `common` looks for it."""

    def find_spec(self, name, path=None, target=None):
        if name == "common":
            sys.meta_path.remove(self)
            import torch

            torch.set_default_dtype(torch.float64)


sys.meta_path.insert(0, BeforeCommon())
