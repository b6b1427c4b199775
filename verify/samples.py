"""Watch what a program reads: the samples that its DataLoaders deliver or, without one, the inputs of its models."""
import dataclasses
import weakref

import torch

from .digests import wave


@dataclasses.dataclass
class Loader:
    number: int
    sampler: object
    dataset: object
    iterator: object = None  # weak reference to that of the epoch that has begun
    last: int = 0  # the last index
    descents: int = 0  # how often an index was less than the one before it


class Samples:
    """The samples read since the last optimizer step."""

    def __init__(self, write):
        self.write, self.evaluated = write, False
        self.batches = []  # [(number of the loader, counts, samples)]; with a loader, 0 is the first one
        self.loaders = {}  # ID of a loader's sampler: Loader
        self.pending = weakref.WeakKeyDictionary()  # DataLoader iterator: its batches since the last backward pass
        self.inputs = []  # inputs of the outermost modules since the last backward pass
        self.trained = set()  # IDs of the datasets whose batches were followed by a backward pass

    def deliver(self, function, iterator, native):
        """Return a batch of a DataLoader, in float64 unless `native`. Record its samples if it may be trained on."""
        tensors = []

        def visit(value):
            if isinstance(value, torch.Tensor):
                value = value.double() if value.is_floating_point() and not native else value
                tensors.extend([value] * (value.ndim > 0))
            elif isinstance(getattr(value, "data", None), dict):  # a UserDict, such as transformers' BatchEncoding
                value.data = torch.utils._pytree.tree_map(visit, value.data)
            return value

        try:
            batch = torch.utils._pytree.tree_map(visit, function(iterator))
        except StopIteration:
            self.evaluated |= bool(self.pending.pop(iterator, None))  # batches with no backward pass
            self.end_epoch(self.loader(iterator))
            raise
        except Exception:
            self.write("failed")
            raise
        if not torch.is_grad_enabled():
            self.evaluated = True
            return batch
        if isinstance(batch, (list, tuple)) and batch and all(isinstance(part, (list, tuple)) for part in batch):
            tensors = []  # collate_fn did not stack the samples, so a tensor's length is not the number of samples
        loader = self.loader(iterator)
        if not loader.iterator or loader.iterator() is not iterator:
            self.end_epoch(loader)  # the program has left the last one before its end
            loader.iterator = weakref.ref(iterator)
        self.pending.setdefault(iterator, []).append((loader.number, counts_of(tensors), samples_of(tensors)))
        return batch

    def loader(self, iterator):
        sampler = getattr(iterator, "_index_sampler", iterator._dataset)
        return self.loaders.setdefault(id(sampler), Loader(len(self.loaders), sampler, iterator._dataset))

    def index(self, function, iterator):
        """Count how often a loader's next index is not greater: never in the order of the dataset."""
        indices, loader = function(iterator), self.loader(iterator)
        for index in indices if isinstance(indices, (list, tuple)) else [indices]:
            if isinstance(index, int):
                loader.descents, loader.last = loader.descents + (index < loader.last), index
        return indices

    def end_epoch(self, loader):
        sampler = loader.sampler
        for name in ("batch_sampler", "sampler"):  # accelerate wraps the sampler in another sampler
            sampler = getattr(sampler, name, sampler)
        settable = any(hasattr(item, "set_epoch") for item in (sampler, loader.dataset))
        stream = settable and isinstance(loader.dataset, torch.utils.data.IterableDataset)
        shuffled = getattr(loader.dataset if stream else sampler, "shuffle", stream or loader.descents > 1)
        if loader.iterator and id(loader.dataset) in self.trained and torch.is_grad_enabled():
            self.write("epoch", shuffled=bool(shuffled), loader=loader.number,
                       sampler=type(sampler).__name__ + ", which has set_epoch" * settable)
        loader.iterator, loader.last, loader.descents = None, 0, 0

    def backward(self):
        """Count all batches since the last backward pass as read in this step."""
        for iterator, batches in self.pending.items():
            self.trained.add(id(iterator._dataset))
            self.batches += batches
            batches.clear()
        self.batches += [] if self.trained else [(0, counts_of(item), samples_of(item)) for item in self.inputs]
        self.inputs.clear()


def counts_of(tensors):
    """Return, for each tensor, numbers that a loss may be divided by: elements, labels, tokens or masked values, sum.

    Labels are what is not -100, tokens what is not 0. Without the first token of each row, they count a second time,
    for models that predict the next token.
    """
    found = []
    for item in tensors:
        if item.numel() > 1e6:
            found.append([item.numel()] * 4)  # such as images: too slow to look at
            continue
        for part in (item, item[:, 1:]) if item.ndim == 2 else (item,):
            mask = part.ndim > 1 and (not part.is_floating_point() or bool(((part == 0) | (part == 1)).all()))
            found.append([part.numel(), int((part != -100).sum()),
                          int((part != 0).sum()) if mask else part.numel(), float(part.sum())])
    return found


def samples_of(tensors):
    """Return (digest, digest of label, number of values) per sample. Augmentation changes only the first digest."""
    lengths = [len(tensor) for tensor in tensors]
    rows = max(lengths, key=lengths.count, default=0)
    digest, labels = torch.zeros(2, rows, dtype=torch.float64, device="cpu")
    for n, tensor in enumerate([tensor for tensor in tensors if len(tensor) == rows > 0], 1):
        flat = tensor.detach().cpu().double().reshape(rows, -1)
        flat = flat.masked_fill(flat == -100, 0)  # mask padded labels with 0, which adds nothing to the digest
        factors = wave(flat.shape[1], flat.device)
        digest += flat @ (factors.imag if n % 2 else factors.real) * n
        labels += flat[:, 0] * n if tensor.ndim == 1 and not tensor.is_floating_point() else 0
    size = sum(tensor[0].numel() for tensor in tensors if len(tensor) == rows > 0)
    return [(*pair, size) for pair in zip(digest.tolist(), labels.tolist())]
