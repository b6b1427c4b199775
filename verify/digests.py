"""Digests: a few numbers for each tensor. Equal tensors have equal digests, and the digests of parts add up.

A digest is the norm of a tensor and its two projections on a plane wave. It needs a copy of one tensor at a time.
"""
import collections
import functools
import math
from typing import NamedTuple

import torch

from .records import UNNAMED

SMALL = 1 << 14  # elements; the waves of smaller tensors are kept, which makes many small digests faster
NOT_FINITE = 0.7, 1.1, -1.1  # in place of NaN and infinity in samples and inputs: missing labels, masks
FREQUENCIES = [math.sqrt(2 + axis) for axis in range(64)]  # of the plane wave in a digest, one for each axis


class Part(NamedTuple):
    """How a tensor is part of the other command's tensor: along `axis`, its `rows` are at `places` among `total`."""

    axis: int
    rows: tuple
    places: tuple
    total: int


def dense(tensor):
    """Return the full tensor, dense and in float64, on a device that supports float64; complex numbers as pairs."""
    tensor = real(tensor.detach())
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    tensor = tensor.cpu() if tensor.device.type == "mps" else tensor
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).double()


def real(tensor):
    """Return a tensor of complex numbers with a last axis for the real and imaginary parts, and others unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def digest(tensors, parts=()):
    """Return the norm and two projections of each tensor or, with `parts`, of a part of it. None counts as zero."""
    norms, projections = [], []
    with torch.no_grad():
        for tensor, part in zip(tensors, parts or [None] * len(tensors)):
            part = None if tensor is None else part
            tensor = dense(torch.zeros(1) if tensor is None else tensor)
            if part:
                tensor = tensor.index_select(part.axis, torch.tensor(part.rows, device=tensor.device))
            small = not part and tensor.numel() <= SMALL
            norms.append(torch.linalg.vector_norm(tensor))
            projections.append(waves(tensor.shape, tensor.device) @ tensor.reshape(-1) if small
                               else project(tensor, part))
        found = [torch.stack(items if len({item.device for item in items}) < 2 else [item.cpu() for item in items])
                 for items in (norms, projections) if items]
        return torch.cat([found[0][:, None], found[1]], 1).tolist() if found else []


def project(tensor, part=None):
    """Return a tensor's projections on a plane wave's real and imaginary parts. Those of all parts add up."""
    shape, device = tensor.shape or (1,), tensor.device
    for axis, size in enumerate(shape):  # the plane wave is the product of one wave for each axis
        factors = wave(size, device, axis)
        if part and part.axis == axis:
            factors = wave(part.total, device, axis)[torch.tensor(part.places, device=device)]
        tensor = tensor.reshape(size, math.prod(shape[axis + 1:]))
        tensor = factors @ tensor if axis else torch.complex(*torch.view_as_real(factors).T @ tensor)
    return torch.view_as_real(tensor[0])


@functools.lru_cache(maxsize=256)
def waves(shape, device):
    """Return the plane wave's real and imaginary parts for all elements of a small tensor."""
    product = torch.ones(1, dtype=torch.complex128, device=device)
    for axis, size in enumerate(shape or (1,)):
        product = torch.outer(product, wave(size, device, axis)).reshape(-1)
    return torch.view_as_real(product).T.contiguous()


@functools.lru_cache(maxsize=256)
def wave(size, device, axis=0):
    """Return `size` values of the wave along one axis, as complex numbers."""
    phase = FREQUENCIES[axis] * torch.arange(1, size + 1, dtype=torch.float64, device=device)
    return torch.complex(phase.cos(), phase.sin())


def marks(tensor):
    """Return, for each axis of a tensor, a string for each slice along it; equal slices have equal strings."""
    tensor, found = dense(tensor), []
    for axis in range(tensor.ndim):
        flat = tensor.movedim(axis, 0)
        flat = flat.reshape(len(flat), math.prod(flat.shape[1:]))
        flat = flat @ wave(flat.shape[1], flat.device).real
        found.append([f"{value:.8g}" for value in flat.tolist()])
    return found


def find_parts(names, tensors, others, rank):
    """Return, for each tensor, its Part if it is a part of one of `others`, or None.

    `others` has the (name, shape, marks) of each tensor of the other command. What a module has is no part of what none
    has, such as a vector of all tensors.
    """
    found, known = [], {}
    for number, (name, item) in enumerate(zip(names, tensors)):
        near = sorted(range(len(others)), key=lambda n: (others[n][0] != name, abs(n - number)))
        near = [row for row in (others[n] for n in near)
                if len(row[1]) == item.ndim and (name == UNNAMED or row[0] != UNNAMED)]
        same = [row for row in near if row[1] == list(item.shape)]
        own = near and name not in [row[0] for row in same] and marks(item)
        whole = not own or near[0][0] != name and own in [row[2] for row in same]
        parts = (find_part(item.shape, own, *row[1:], known, rank) for row in near if not whole)
        found.append(next(filter(None, parts), None))
    return found


def find_part(shape, marked, other, others, known, rank):
    """Return a tensor's Part if it is a part of `other`, or None. `known` maps (own, full size) to found rows."""
    axes = [axis for axis, pair in enumerate(zip(shape, other)) if pair[0] != pair[1]]
    if len(axes) != 1:
        return None
    own, theirs, size, total = marked[axes[0]], others[axes[0]], shape[axes[0]], other[axes[0]]
    counts, places = collections.Counter(theirs), dict(zip(theirs, range(total)))
    hits = {row: places[mark] for row, mark in enumerate(own) if counts[mark] == 1}
    offsets = {place - row for row, place in hits.items()} or {rank * size % total}
    if not hits and not {*own} <= {*theirs}:
        return None
    if not hits and (size, total) in known:  # all rows are equal: reuse another tensor's layout
        hits = known[size, total]
    elif len(offsets) == 1:
        hits = {row: row + min(offsets) for row in range(size) if 0 <= row + min(offsets) < total}
    unlike = sum(own[row] != theirs[place] for row, place in hits.items())  # few, by rounding
    rest = [row for row in range(size) if row not in hits]
    if unlike > 0.1 * len(hits) or rest and (len(rest) > len(hits) or rest[0] < max(hits)):  # else, it is padding
        return None
    known[size, total] = hits
    return Part(axes[0], (*hits,), (*hits.values(),), total)
