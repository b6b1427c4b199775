"""Initial weights without a full model in memory: record how a model draws them, and replay it tensor by tensor.

A model is created on the meta device, where tensors have no data, and each operator that would fill or change a tensor
is recorded. Replayed on the CPU from the same random state, the operators give the weights that one device draws.
"""
import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .reduce import agree, is_main_process

aten = torch.ops.aten
OVERWRITE = {aten.uniform_.default, aten.normal_.default, aten.zero_.default, aten.fill_.Scalar}


def outline(create: Callable[..., nn.Module], *args: Any) -> "tuple[nn.Module, Weights]":
    """Return the model `create(*args)` on the meta device, and its initial weights; all processes must call this.

    If `create` does something that cannot be recorded, such as using NumPy's generator, rank 0 creates the full model.
    """
    state = torch.get_rng_state()
    with torch.device("meta"), Recorder() as recorder, Watch() as watch:
        model = create(*args)
    tensors = dict(named_tensors(model))
    known = recorder.known and watch.known
    known &= all(tensor.device.type == "meta" and _key(tensor) in recorder.seen for tensor in tensors.values())
    if agree((known, recorder.digest())) and known:
        return model, Weights(recorder, state, tensors, {})
    torch.set_rng_state(state)
    whole = create(*args) if is_main_process() else model
    tensors = dict(named_tensors(whole))
    return model.to("meta"), Weights(None, state, {}, tensors)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for a model's parameters and buffers; a tensor with two names is yielded twice."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _tensors(*values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Recorder(TorchDispatchMode):
    """Records the operators on meta tensors, except views. `known` becomes False if an operator uses other data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict[str, Any], Any]] = []
        self.seen: dict[int, Any] = {}  # the storages, kept alive so that no two have the same key
        self.known = True

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given, returned = _tensors(args, kwargs), _tensors(result)
        if not function._schema.is_mutable and {*map(_key, returned)} <= {*map(_key, given)}:
            return result
        call = function, args, kwargs, result
        self.known &= all(tensor.device.type == "meta" for tensor in given + returned) and all(
            _key(tensor) in self.seen or _overwrites(call, _key(tensor)) for tensor in given)
        self.seen.update((_key(tensor), tensor.untyped_storage()) for tensor in returned)
        self.calls.append(call)
        return result

    def digest(self) -> str:
        """Return a string that is equal on two processes if they recorded the same calls."""
        calls = [(str(function), args, kwargs) for function, args, kwargs, _ in self.calls]
        text = repr(tree_map_only(Tensor, lambda each: (each.shape, each.stride(), each.dtype), calls))
        return hashlib.sha256(text.encode()).hexdigest()


class Watch(TorchFunctionMode):
    """`known` becomes False if code reads `Tensor.is_meta`: torch.nn.init may skip meta tensors."""

    known = True

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.known &= function != torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
        return function(*args, **kwargs or {})


class Weights:
    """The initial weights of a model: either recorded operators or, on rank 0, the tensors `whole`."""

    def __init__(self, recorder: Recorder | None, state: Tensor, outlines: dict[str, Tensor],
                 whole: dict[str, Tensor]) -> None:
        self.recorder, self.state, self.outlines, self.whole = recorder, state, outlines, whole

    def draw(self, names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) one at a time, so that each can be freed; all processes must iterate together."""
        if self.recorder:
            yield from self._replay(self.recorder.calls, {*names})
            self.recorder = None
            return
        for name in names:
            outline = self.whole.pop(name)
            whole = outline.to(device) if is_main_process() else torch.empty_like(outline, device=device)
            dist.broadcast(whole, 0)
            yield name, whole
        self.whole.clear()  # drops weights that a file replaces

    def _replay(self, calls: list, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) while repeating the calls on the CPU; keep each storage only until its last use."""
        real: dict[int, Any] = {}  # the storages on the CPU, by the keys of the meta storages
        uses: dict[int, list[int]] = {}
        for number, call in enumerate(calls):
            for key in {*map(_key, _tensors(call))}:
                uses.setdefault(key, []).append(number)
        owners: dict[int, list[str]] = {}
        for name, outline in self.outlines.items():
            owners.setdefault(_key(outline), []).append(name)

        def fill_in(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, Tensor):
                return value
            storage = real.get(_key(value))
            if storage is None:
                storage = real[_key(value)] = torch.UntypedStorage(value.untyped_storage().nbytes())
            return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())

        with torch.no_grad():
            torch.set_rng_state(self.state)
            for function, args, kwargs, result in calls:
                found = function(*tree_map(fill_in, args), **tree_map(fill_in, kwargs))
                real |= {_key(tensor): new.untyped_storage() for tensor, new in zip(_tensors(result), _tensors(found))
                         if _key(tensor) not in real}
                for key in {*map(_key, _tensors(args, kwargs, result))}:
                    uses[key].pop(0)
                    if not uses[key]:
                        yield from ((name, fill_in(self.outlines[name])) for name in owners.get(key, [])
                                    if name in names)
                    if not uses[key] or _overwrites(calls[uses[key][0]], key):
                        del real[key]
                del found


def _overwrites(call: tuple, key: int) -> bool:
    """Return whether a call replaces all values of a storage."""
    function, args, *_ = call
    return function in OVERWRITE and _key(args[0]) == key and args[0].nbytes == args[0].untyped_storage().nbytes()
