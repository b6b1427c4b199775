"""A model's layers and blocks: what FSDP2 shards, torch.compile compiles and a pipeline divides into stages."""
import functools

import torch.utils.checkpoint
from torch import nn

from .errors import UsageError

WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # their forward() reads the weights of layers inside them


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's children, with each Sequential and each module without forward() replaced by its items."""
    found: list[nn.Module] = []
    for child in model.children():
        if type(child).forward is nn.Module.forward:
            found += layers_of(child)
        else:
            found += child if isinstance(child, nn.Sequential) else [child]
    return found


def has_parameters(layer: nn.Module) -> bool:
    """Return whether a layer, or a layer inside it, has parameters."""
    return any(True for _ in layer.parameters())


def blocks(model: nn.Module, recompute: bool = False, bf16: bool = False) -> list[nn.Module]:
    """Return a model's blocks in order: those of `layers_of(model)` that have parameters.

    A block with more than half of the parameters, such as the network inside a wrapper, is divided into its own layers.
    With `recompute`, backward() recomputes the blocks' activations, which are not stored. Raises UsageError if the
    model has BatchNorm and either option is set. Recomputing would update BatchNorm's statistics twice
    (github.com/pytorch/pytorch/issues/96136). With `bf16`, FSDP2 would cast BatchNorm's weights but not its statistics,
    and CUDA rejects this mix in backward().
    """
    for option, wanted in (("--activation-checkpointing", recompute), ("--bf16", bf16)):
        if wanted and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            raise UsageError(f"{option}: not with BatchNorm; use a model without it, or train_amp.py")
    found, layers, at = [model], [model], 0
    while layers:
        found[at:at + 1] = layers
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in found]
        at = sizes.index(max(sizes))
        split = sizes[at] * 2 > sum(sizes) and not isinstance(found[at], WHOLE)
        layers = [*dict.fromkeys(filter(has_parameters, layers_of(found[at])))] if split else []
    for layer in found if recompute else []:
        layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    return found
