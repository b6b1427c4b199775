"""Watch the random numbers: whether a program draws any and, in one step, where, by which library, and their sums."""
import ctypes
import importlib.util
import os
import random
import sys
import zlib

import torch

from .digests import real

LIBRARIES = ("torch", "numpy", "random", "mtrand", __package__)


class Draws:
    """Whether random numbers are drawn in a step and, after show(), the sums of all numbers drawn at each site."""

    def __init__(self):
        self.state = None  # None until the program has created its model
        self.sites, self.inside = [], []  # `inside`: names of the modules now in forward()
        self.installed = self.showing = False

    def states(self):
        """Return the states of the random generators, which change if the model draws numbers, as dropout does."""
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
        return [ctypes.string_at(state.data_ptr(), state.numel()) for state in states]  # numpy may be missing

    def checksums(self):
        """Return {library: checksum} of the states of the global generators."""
        states = dict(zip(("torch", "torch.cuda"), self.states())) | {"random": repr(random.getstate()).encode()}
        if numpy := sys.modules.get("numpy.random"):
            states["numpy"] = repr([part if isinstance(part, (str, int, float)) else part.tolist()
                                    for part in numpy.get_state()]).encode()
        return {name: zlib.crc32(state) for name, state in states.items()}

    def note(self):
        self.state = self.states()

    def drawn(self):
        return self.state is not None and self.state != self.states()

    def add(self, library, drawn):
        """Note numbers drawn by the program, but not by an initialization, torch's samplers, an import or backward().

        Also note whether they are drawn for a DataLoader, before the first batch, or are integers, such as indices.
        """
        frame, site, loader = sys._getframe(1), None, False
        while frame:
            name = frame.f_globals.get("__name__", "")
            if not site and name.partition(".")[0] not in LIBRARIES:
                site = frame
            if name == "importlib._bootstrap" or not site and (
                    frame.f_code.co_name in ("reset_parameters", "__init__") or name.startswith("torch.utils.data")):
                return
            loader |= name.startswith("torch.utils.data")
            frame = frame.f_back
        program = site and site.f_globals.get("__name__", "").partition(".")[0] not in sys.stdlib_module_names
        if program and torch._C._current_graph_task_id() < 0:
            where = [f"{os.path.basename(site.f_code.co_filename)}:{site.f_lineno}", *filter(None, self.inside[-1:])]
            with torch.no_grad(), torch._C.DisableTorchFunction():
                numbers = real(torch.as_tensor(drawn).detach())
                early = ", before the first forward pass" if self.state is None else ""
                kind = ", loader" if loader else early if numbers.is_floating_point() else ", integers"
                numbers = numbers.double()
                self.sites.append([f"{', module '.join(where)} ({library}{kind})", numbers.numel(),
                                   float(numbers.sum()), float(numbers.square().sum())])

    def show(self):
        """In this step, note where torch, numpy and random draw numbers, generators of the program included."""
        self.showing = True
        if self.installed:
            return
        draws, self.installed = self, True

        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if not draws.showing:
                    return function(*args, **(kwargs or {}))
                before, result = draws.states(), function(*args, **(kwargs or {}))
                own = (kwargs or {}).get("generator") is not None
                if isinstance(result, torch.Tensor) and (own or before != draws.states()):
                    draws.add(f"torch.{function.__name__}" if result.requires_grad else "torch", result)
                return result

        def noted(library, function):
            def draw(*args, **more):
                result = function(*args, **more)
                if not draws.showing:
                    return result
                try:
                    draws.add(library, args[-1] if result is None else result)
                except (TypeError, ValueError, RuntimeError):  # such as a choice among words
                    draws.add(library, 0.0)
                return result
            return draw

        self.mode = Mode()
        self.mode.__enter__()
        for name in ("random", "getrandbits"):
            setattr(random.Random, name, noted("random", getattr(random.Random, name)))
            setattr(random, name, getattr(random._inst, name))
        if importlib.util.find_spec("numpy"):
            numbers = importlib.import_module("numpy.random")
            for name, function in [*vars(numbers).items()]:
                if getattr(function, "__self__", None) is numbers.mtrand._rand and "state" not in name:
                    setattr(numbers, name, noted("numpy", function))
            for name in ("Generator", "RandomState"):
                kind = getattr(numbers, name)
                own = {key: noted("numpy", value) for key, value in vars(kind).items()
                       if callable(value) and not key.startswith(("_", "get_", "set_", "spawn", "seed"))}
                setattr(numbers, name, type(name, (kind,), own))
            make = numbers.default_rng
            numbers.default_rng = lambda seed=None: numbers.Generator(make(seed).bit_generator)
