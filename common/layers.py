"""A model's layers and blocks: what FSDP2 shards, torch.compile compiles and a pipeline divides into stages."""
import functools

import torch.utils.checkpoint
from torch import nn
from torch.torch_version import TorchVersion

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
        layers = [*dict.fromkeys(each for each in layers_of(found[at]) if [*each.parameters()])] if split else []
    for layer in found if recompute else []:
        layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    return found


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of a model separately, so that equal blocks compile only once.

    Each block stays one graph, and DDP can send gradients whenever a block's backward pass ends. So Dynamo need not
    split a graph where DDP's buckets end (https://docs.pytorch.org/docs/stable/notes/ddp.html).

    Dynamo counts the graphs of blocks that share code together and stops compiling them after 8; a ResNet needs 16. It
    would also take a size in which two blocks differ for a size that varies, and compile slower code for all sizes
    (pytorch issue 102670). So if blocks of one class have weights of different shapes, every block is compiled once for
    each size of its inputs. Others keep Dynamo's default: a second graph, for all sizes, if the size varies. Raises
    UsageError for an embedding that torch cannot compile.
    """
    from torch._dynamo import config

    meshes = [getattr(module.weight, "device_mesh", None) for module in model.modules()
              if isinstance(module, nn.Embedding)]
    if TorchVersion(torch.__version__) < "2.14" and any("tensor" in mesh.mesh_dim_names for mesh in meshes if mesh):
        raise UsageError(f"--compile: torch {torch.__version__} cannot compile an embedding that is split by tensor "
                         "parallelism; use torch 2.14 or newer, or omit --compile")

    config.optimize_ddp = False
    parts = blocks(model)
    config.recompile_limit = max(config.recompile_limit, 8 * len(parts))
    kinds = {(type(block), *[parameter.shape for parameter in block.parameters()]) for block in parts}
    differ = len(kinds) > len({type(block) for block in parts})
    for block in parts:
        block.compile(dynamic=False if differ else None)
