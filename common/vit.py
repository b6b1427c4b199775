"""A vision transformer whose layers can be sharded, split over a tensor mesh, or cut into pipeline stages."""
import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = {"vit": (64, 4, 4), "vit_base": (768, 12, 12)}  # width, blocks, heads


class Attention(nn.Module):
    """Self-attention over tokens (N, T, width), with three linear layers: no plan could split one between heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        count, length, _ = tokens.shape
        # -1: under tensor parallelism, a process computes only some heads
        query, key, value = (layer(tokens).view(count, length, -1, self.head_width).transpose(1, 2)
                             for layer in (self.query, self.key, self.value))
        values = functional.scaled_dot_product_attention(query, key, value)
        return self.project(values.transpose(1, 2).reshape(count, length, -1))


class Block(nn.Module):
    """Attention and an MLP of four times the width, each with a preceding LayerNorm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class Patches(nn.Module):
    """Maps images (N, C, H, W) to tokens (N, T, width): one per patch, with a learned position added."""

    def __init__(self, width: int, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, columns = image_shape
        side = height // 4 if height <= 64 else 16  # 16 tokens for a small image
        self.project = nn.Conv2d(channels, width, side, stride=side)
        self.position = nn.Parameter(torch.empty((height // side) * (columns // side), width))
        nn.init.normal_(self.position, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.project(images).flatten(2).transpose(1, 2)
        return tokens.contiguous() + self.position  # contiguous, because a pipeline sends it


class Classifier(nn.Module):
    """A LayerNorm, the mean over the tokens and a linear layer: (N, T, width) -> logits (N, num_classes)."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.norm(tokens).mean(1))


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929): normalized images (N, C, H, W) to logits.

    The mean over the tokens replaces the paper's class token (Beyer et al. 2022, arXiv:2205.01580). `size` is one of
    SIZES; "vit_base" has the paper's ViT-B/16 blocks.
    """

    def __init__(self, size: str, num_classes: int, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        width, count, heads = SIZES[size]
        self.patches = Patches(width, image_shape)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(count)))
        self.classifier = Classifier(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.patches(images)))
