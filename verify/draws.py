"""Watch the random generators: whether the model draws random numbers and, in one step, where."""
import os
import sys

import torch

LIBRARIES = ("torch", "numpy", "random", __package__)


class Draws:
    """Whether random numbers are drawn in a step and, if `shown`, their sites: file, line and module."""

    def __init__(self):
        self.state = None  # None until the program has created its model
        self.sites, self.inside, self.mode = [], [], None  # `inside`: names of the modules now in forward()

    def states(self):
        """Return the states of the random generators, which change if the model draws numbers, as dropout does."""
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
        return [bytes(state.tolist()) for state in states]

    def note(self):
        self.state = self.states()

    def drawn(self):
        return self.state is not None and self.state != self.states()

    def show(self):
        """From now on, record where torch functions draw random numbers, except in the backward pass."""
        draws = self

        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                before, result, frame = draws.states(), function(*args, **(kwargs or {})), sys._getframe(1)
                while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
                    frame = frame.f_back
                if before != draws.states() and not torch._C._current_graph_task_id() >= 0:
                    where = [f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}",
                             *filter(None, draws.inside[-1:])]
                    draws.sites.append(", module ".join(where))
                return result

        if not self.mode:
            self.mode = Mode()
            self.mode.__enter__()
