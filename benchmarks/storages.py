"""The memory of a process's tensors, and its peak."""
import itertools
import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Follow the storages of all tensors that this thread creates, in backward passes too, and their peak in bytes."""

    def __init__(self):
        super().__init__()
        self.numbers, self.live, self.peak = itertools.count(), {}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the subclass then calls the function again, with its local tensors
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.number(value)
        held = self.sizes()
        if sum(held.values()) > sum(self.peak.values()):
            self.peak = held
        return result

    def number(self, tensor: torch.Tensor) -> int | None:
        """Add a tensor's storage to `live` and return the storage's number; return None for a tensor without data."""
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.device.type == "meta":
            return None
        if not hasattr(storage, "number"):
            storage.number = next(self.numbers)
            self.live[storage.number] = weakref.ref(storage, lambda _, number=storage.number: self.live.pop(number))
        return storage.number

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each live storage; FSDP2 frees weights by resizing their storage to 0."""
        storages = {number: reference() for number, reference in list(self.live.items())}
        return {number: storage.nbytes() for number, storage in storages.items() if storage is not None}
