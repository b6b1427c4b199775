"""Make a program compute in float64: defaults and casts."""
import itertools
import sys

import torch


def widened(tensor):
    """Return a tensor in float64 or complex128 if it is floating-point or complex."""
    return tensor.double() if tensor.is_floating_point() else tensor.cdouble() if tensor.is_complex() else tensor


def widened_inputs(args, more, parameters=()):
    """Return a call's arguments with float32 tensors, such as those from numpy, in float64 if other tensors are so."""
    def narrow(value):
        return isinstance(value, torch.Tensor) and value.dtype == torch.float32

    leaves = torch.utils._pytree.tree_leaves((args, more))
    if any(map(narrow, leaves)) and any(getattr(item, "dtype", None) == torch.float64
                                        for item in itertools.chain(leaves, parameters)):
        return torch.utils._pytree.tree_map(lambda value: value.double() if narrow(value) else value, (args, more))
    return args, more


def caller():
    """Return the name of the module that has called a replacement; draws.py may call this again."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"].startswith(f"{__package__}."):
        frame = frame.f_back
    return frame.f_globals["__name__"]


def patches(stepping):
    """Return (replacement, owner, *names) for torch's functions. `stepping` tells whether an optimizer's step runs."""
    def cast(function, tensor, **more):
        """Cast to float64 instead of float32, except in GradScaler; in an optimizer's step, also instead of 16 bits."""
        narrow = caller() == "torch.amp.grad_scaler" if function.__name__ == "float" else not stepping()
        return function(tensor, **more) if narrow else tensor.double(**more)

    def widen(function, *args, **more):
        """Call a function with float64 instead of float32; in an optimizer's step, also instead of 16 bits."""
        if function.__name__ == "tensor" and caller().startswith("torch.distributed."):
            return function(*args, **more)  # torch 2.11's pipelines receive it in torch.zeros(..., dtype=float32)
        narrow = (torch.float32, torch.bfloat16, torch.float16)[:3 if stepping() else 1]
        wide = {id(dtype): torch.float64 for dtype in narrow} | {id(torch.complex64): torch.complex128}
        more = {name: wide.get(id(value), value) for name, value in more.items()}
        return function(*[wide.get(id(value), value) for value in args], **more)

    def create(function, *args, **more):
        """Create a parameter or a buffer in float64 instead of float32, which a module may have as an argument."""
        def wide(value):
            single = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.complex64)
            return widened(value) if single else value

        return function(*map(wide, args), **{name: wide(value) for name, value in more.items()})

    torch.set_default_dtype(torch.float64)
    return [(cast, torch.Tensor, "float", "bfloat16", "half"), (widen, torch, "tensor"),
            (widen, torch.Tensor, "to", "type"), (widen, torch.nn.functional, "softmax"),
            (create, torch.nn.Parameter, "__new__"), (create, torch.nn.Module, "register_buffer")]
