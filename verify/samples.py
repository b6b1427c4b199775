"""Watch what a program reads: the samples that its DataLoaders deliver or, without one, the inputs of its models."""
import weakref

import torch

from .digests import wave


class Samples:
    """The samples read since the last optimizer step."""

    def __init__(self, write):
        self.write, self.batches, self.evaluated = write, [], False
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
            if id(iterator._dataset) in self.trained and torch.is_grad_enabled():
                sampler = getattr(iterator, "_index_sampler", None)
                for name in ("batch_sampler", "sampler"):  # accelerate wraps the sampler in another sampler
                    sampler = getattr(sampler, name, sampler)
                settable = ", which has set_epoch" * any(hasattr(x, "set_epoch") for x in (sampler, iterator._dataset))
                self.write("epoch", shuffled=bool(getattr(sampler, "shuffle", False)),
                           sampler=type(sampler).__name__ + settable)
            raise
        except Exception:
            self.write("failed")
            raise
        if not torch.is_grad_enabled():
            self.evaluated = True
            return batch
        if isinstance(batch, (list, tuple)) and batch and all(isinstance(part, (list, tuple)) for part in batch):
            tensors = []  # collate_fn did not stack the samples, so a tensor's length is not the number of samples
        self.pending.setdefault(iterator, []).append(samples_of(tensors))
        return batch

    def backward(self):
        """Count all batches since the last backward pass as read in this step."""
        for iterator, batches in self.pending.items():
            self.trained.add(id(iterator._dataset))
            self.batches += batches
            batches.clear()
        self.batches += [] if self.trained else map(samples_of, self.inputs)
        self.inputs.clear()


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
