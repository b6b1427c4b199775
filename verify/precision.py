"""Make a program compute in float64: defaults and casts. Random numbers stay those that it draws in float32."""
import sys

import torch

FILLING = ("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "random_", "bernoulli_")


def patches(stepping):
    """Return (replacement, owner, *names) for torch's functions. `stepping` tells whether an optimizer's step runs."""
    def cast(function, tensor, **more):
        """Cast to float64 instead of float32, except in GradScaler; in an optimizer's step, also instead of 16 bits."""
        scaler = sys._getframe(2).f_globals.get("__name__") == "torch.amp.grad_scaler"
        narrow = scaler if function.__name__ == "float" else not stepping()
        return function(tensor, **more) if narrow else tensor.double(**more)

    def widen(function, *args, **more):
        """Call a function with float64 instead of float32; in an optimizer's step, also instead of 16 bits."""
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if function.__name__ == "tensor" and caller.startswith("torch.distributed."):
            return function(*args, **more)  # torch 2.11's pipelines receive it in torch.zeros(..., dtype=float32)
        narrow = (torch.float32, torch.bfloat16, torch.float16)[:3 if stepping() else 1]
        wide = {id(dtype): torch.float64 for dtype in narrow}
        more = {name: wide.get(id(value), value) for name, value in more.items()}
        return function(*[wide.get(id(value), value) for value in args], **more)

    def draw(function, *args, requires_grad=False, **more):
        """Draw in float32, as the program does alone: torch draws other numbers in float64."""
        if more.get("dtype") or more.get("out") is not None or torch.compiler.is_compiling():
            return function(*args, requires_grad=requires_grad, **more)
        return function(*args, dtype=torch.float32, **more).double().requires_grad_(requires_grad)

    def fill(function, tensor, *args, **more):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype != torch.float64 or tensor.is_meta \
                or torch.compiler.is_compiling() or any(isinstance(value, torch.Tensor) for value in args):
            return function(tensor, *args, **more)
        return tensor.copy_(function(torch.empty_like(tensor, dtype=torch.float32, requires_grad=False), *args, **more))

    torch.set_default_dtype(torch.float64)
    return [(cast, torch.Tensor, "float", "bfloat16", "half"), (widen, torch, "tensor"),
            (widen, torch.Tensor, "to", "type"), (widen, torch.nn.functional, "softmax"),
            (draw, torch, "randn", "rand", "randn_like", "rand_like"), (fill, torch.Tensor, *FILLING)]
