"""Watch what a program reads: the samples that its DataLoaders deliver or, without one, the inputs of its models."""
import collections
import dataclasses
import functools
import math
import numbers
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .digests import NOT_FINITE, SMALL, real, wave, waves
from .precision import widened
from .records import INPUTS, LEAVES


@dataclasses.dataclass
class Loader:
    number: int
    sampler: object
    dataset: object
    iterator: object = None  # weak reference to that of the epoch that has begun
    last: int = 0  # the last index
    descents: int = 0  # how often an index was less than the one before it


@dataclasses.dataclass
class Call:
    """A call of an outermost module: its inputs, and whether a backward pass has reached its outputs."""

    inputs: list
    reached: bool

    def reach(self, grad):
        self.reached = True


class Samples:
    """The samples read since the last optimizer step."""

    def __init__(self, write):
        self.write, self.evaluated = write, False
        self.batches = []  # as described()
        self.loaders = {}  # ID of a loader's sampler: (this sampler, Loader)
        self.pending = weakref.WeakKeyDictionary()  # DataLoader iterator: its batches since the last backward pass
        self.drawn = weakref.WeakKeyDictionary()  # DataLoader iterator: {number of a batch to come: its indices}
        self.calls = []  # since the last optimizer step, except those that settle() has counted
        self.carried = []  # references to the outputs of the last such call
        self.called = False  # whether such a call followed the last backward pass
        self.trained = set()  # IDs of the datasets whose batches were followed by a backward pass

    def deliver(self, function, iterator, native):
        """Return a batch of a DataLoader, in float64 unless `native`. Record its samples if it may be trained on."""
        def visit(value):
            if isinstance(value, torch.Tensor):
                return value if native else widened(value)
            if isinstance(getattr(value, "data", None), dict):  # a UserDict, such as transformers' BatchEncoding
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
        indices = self.drawn.get(iterator, {}).pop(getattr(iterator, "_rcvd_idx", 1) - 1, None)
        parts = by_sample(batch, None if indices is None else len(indices))
        loader = self.loader(iterator)
        if not loader.iterator or loader.iterator() is not iterator:
            self.end_epoch(loader)  # the program has left the last one before its end
            loader.iterator = weakref.ref(iterator)
        self.pending.setdefault(iterator, []).append(described(loader.number, parts, indices or []))
        return batch

    def loader(self, iterator):
        """Return the Loader of an iterator. A program may create a DataLoader of a dataset anew in each epoch."""
        sampler = getattr(iterator, "_index_sampler", iterator._dataset)
        if id(sampler) not in self.loaders:
            known = {loader.number: loader for _, loader in self.loaders.values()}
            idle = [loader for loader in known.values() if loader.dataset is iterator._dataset
                    and not (loader.iterator and loader.iterator())]
            loader = idle[0] if idle else Loader(len(known), sampler, iterator._dataset)
            loader.sampler = sampler
            self.loaders[id(sampler)] = sampler, loader
        return self.loaders[id(sampler)][1]

    def index(self, function, iterator):
        """Count a batch's indices, and how often the next one is not greater: never in the order of the dataset."""
        indices, loader = function(iterator), self.loader(iterator)
        if isinstance(indices, (list, tuple)) and None not in indices:  # an iterable dataset has no indices
            self.drawn.setdefault(iterator, {})[getattr(iterator, "_send_idx", 0)] = indices
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
        self.called = False

    def follow(self, inputs, outputs):
        """Count the inputs of a model as read once a backward pass reaches its outputs, if these can be seen.

        An input that was an output of the call before, such as the state of an RNN, is not read.
        """
        inputs = [item for item in inputs if not self.carries(item)]
        outputs = [item for item in outputs if item.requires_grad and not item.is_leaf]
        call = Call(inputs, reached=not outputs)
        self.calls.append(call)
        for item in outputs:
            item.register_hook(call.reach)

    def carries(self, item):
        """Return whether a tensor has the values of an output of the last call."""
        return StorageWeakRef(item.untyped_storage()).cdata in {ref.cdata for ref in self.carried}

    def carry(self, outputs):
        """Note the outputs of a call."""
        self.carried = [StorageWeakRef(item.untyped_storage()) for item in outputs]

    def settle(self):
        """Count the inputs whose outputs a backward pass has reached: not those of a teacher or of a first trial."""
        reached = [call for call in self.calls if call.reached]
        self.calls = [call for call in self.calls if not call.reached]
        for call in reached if not self.trained else ():
            kind = LEAVES if any(item.requires_grad for item in call.inputs) else INPUTS
            self.batches.append(described(kind, by_sample(call.inputs, None)))


def by_sample(batch, count):
    """Return the parts of a batch that have a row for each sample: tensors, or lists of what each sample has.

    That is a tensor or, for example, {"boxes": a tensor, "labels": a tensor}. What has no tensor but scalars, such as a
    text and its class, does not tell samples apart.
    `count` is the number of indices that the loader drew, or None if it is not known; the parts are then the most
    common length. Return [] if it is not clear which parts these are.
    """
    def is_list(value, kind):
        return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(x, kind) for x in value)

    def of_samples(value):
        if is_list(value, torch.Tensor):
            kinds = {x.is_floating_point() for x in value}
            rows = sum(x.ndim > 0 and len(x) == count for x in tensors_in(value))
            parts = len(kinds) > 1 or value is batch and rows > len(value) / 2  # as of speech: features and lengths
            return not parts and len(tensors_in(value)) == len(value)
        pairs = is_list(value, (list, tuple)) and (  # such as an image and a target, not all images and all targets
            {*map(len, value)} != {count} or all(len({(type(x), getattr(x, "ndim", 0)) for x in part}) > 1
                                                 for part in value))
        return (pairs or is_list(value, dict)) and all(any(x.ndim for x in tensors_in(sample)) for sample in value)

    def visit(value):
        for part in torch.utils._pytree.tree_leaves(value, lambda part: of_samples(part) and len(part) == count):
            if isinstance(getattr(part, "data", None), dict):
                yield from visit(part.data)
            elif of_samples(part) or any(item.ndim for item in tensors_in(part)):
                yield part

    found = [*visit(batch)]
    if count is None:
        nested = isinstance(batch, (list, tuple)) and batch and all(isinstance(part, (list, tuple)) for part in batch)
        lengths = [] if nested else [*map(len, found)]
        count = max(lengths, key=lengths.count, default=0)
        return [part for part in found if not nested and len(part) == count]
    for part in [part for part in found if not isinstance(part, torch.Tensor)]:
        if {len(x) if x.ndim else 1 for x in tensors_in(part)} == {count}:  # `count` parts, or what each sample has?
            return [*part] if part is batch and is_list(part, torch.Tensor) else []
    return [part for part in found if len(part) == count]


def tensors_in(value):
    """Return the dense tensors in a nested value, those of subclasses such as torchvision's boxes included."""
    return [item for item in torch.utils._pytree.tree_leaves(value) if isinstance(item, torch.Tensor)
            and item.layout == torch.strided and not item.is_nested]


def joined(value):
    """Return a tensor, or the values of all tensors in a nested value as one tensor, in float64."""
    tensors = [real(item.detach()).cpu().double() for item in tensors_in(value)]
    return tensors[0] if isinstance(value, torch.Tensor) else torch.cat([*map(torch.flatten, tensors)])


def counts_of(parts, ignored=-100):
    """Return, for each tensor, numbers that a loss may be divided by: elements, labels, tokens or masked values, sum.

    Labels are what is neither `ignored` nor NaN, tokens what is not padding. Without the first token of each row, they
    count a second time, for models that predict the next token. Of a list, count each tensor's rows, such as boxes.
    """
    lists = [[tensors_in(sample) for sample in part] for part in parts if not isinstance(part, torch.Tensor)]
    found = [[sum(len(item) if item.ndim else 1 for item in column)] * 4
             for samples in lists if len({*map(len, samples)}) == 1 for column in zip(*samples)]
    for item in (real(item) for item in parts if isinstance(item, torch.Tensor)):
        if item.numel() > 1e6:
            found.append([item.numel()] * 4)  # such as images: too slow to look at
            continue
        mask = item.ndim > 1 and all(bool(((rows == 0) | (rows == 1)).all()) for rows in (item[:1], item))
        integers = not item.is_floating_point()
        padding = 0 if mask else None
        if integers and item.ndim > 1 and not mask:
            value, count = max(padding_of(item), padding_of(item.flip(-1)), key=lambda found: found[1])
            left, right = (item == value)[..., :-1], (item == value)[..., 1:]
            if count and not ((left & ~right).any() and (right & ~left).any()):  # a token has others on both sides
                padding = value
        for part in (item, item[:, 1:]) if item.ndim == 2 else (item,):
            size, total = part.numel(), float(part.sum())
            labels = int((part != ignored).sum()) if integers else size
            tokens = size if padding is None else int((part != padding).sum())
            if math.isnan(total):
                labels, total = size - int(part.isnan().sum()), float(part.nansum())
            found.append([size, labels, tokens, total])
    return found


def weight_of(target, weight, ignored=-100):
    """Return the sum of the class weights of all labels, in the form of counts_of(), or [] for other targets."""
    if target.is_floating_point() or weight.ndim != 1:
        return []
    return [[float(weight[target[target != ignored]].sum())] * 4]


def described(number, parts, indices=()):
    """Return what is recorded of a batch: its loader, counts, samples, ends of parts, indices, labels, size."""
    parts = [real(part.detach()).cpu() if isinstance(part, torch.Tensor) else part for part in parts]
    ends = [(*padding_of(part), digest_of_ones(part.shape[1:], n)) if isinstance(part, torch.Tensor) else (0, 0, 0)
            for n, part in enumerate(parts, 1)]
    indices = [int(index) for index in indices if isinstance(index, (int, numbers.Integral))]  # else, a name
    samples, *rest = samples_of(parts)
    return number, counts_of(parts), samples, ends, indices, *rest


def padding_of(part):
    """Return the number that ends most rows twice, and the number of these rows, or zeros.

    A row that is padded to the length of the batch's longest row ends with the padding: records.without_padding().
    """
    if not len(part) or part[0].numel() < 2:
        return 0, 0
    ends = part.reshape(len(part), -1)[:, -2:]
    padded = ends[ends[:, 0] == ends[:, 1], 1].tolist()
    value, count = collections.Counter(padded).most_common(1)[0] if padded else (0, 0)
    return float(value) if value != -100 and math.isfinite(value) else 0, count  # digests are already without -100


@functools.lru_cache(maxsize=256)
def digest_of_ones(shape, n):
    return float(digests_of(torch.ones(1, *shape, device="cpu"), n))


def samples_of(parts):
    """Return each sample's digest, that of each one's label, which no augmentation changes, and a sample's size."""
    rows = len(parts[0]) if parts else 0
    digest, labels = torch.zeros(2, rows, dtype=torch.float64, device="cpu")
    for n, part in enumerate([part for part in parts if len(part) == rows > 0], 1):
        if isinstance(part, torch.Tensor):
            digest += digests_of(part, n)
            labels += part * n if part.ndim == 1 and not part.is_floating_point() else 0
        else:
            digest += torch.cat([digests_of(joined(row)[None], n) for row in part])
    size = sum(item.numel() for part in parts if len(part) == rows > 0 for item in tensors_in(part[0]))
    return digest.tolist(), labels.tolist(), size


def digests_of(part, n):
    """Return the digest of each row of the `n`th part. Zeros at the end of a row, along any axis, add nothing to it."""
    shape = part.shape[1:] or (1,)
    part = part.double().reshape(len(part), *shape)
    part = part.masked_fill(part == -100, 0).nan_to_num(*NOT_FINITE)  # -100: padded labels
    if math.prod(shape) <= SMALL:
        return part.reshape(len(part), math.prod(shape)) @ waves(shape, part.device)[n % 2] * n
    for axis in range(len(shape) - 1, -1, -1):
        factors = wave(shape[axis], part.device, axis)
        part = part @ factors if part.is_complex() else torch.view_as_complex(part @ torch.view_as_real(factors))
    return (part.imag if n % 2 else part.real) * n
