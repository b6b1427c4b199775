"""A language model with Llama's architecture and names, so that published weights fit it."""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Size(NamedTuple):
    """The dimensions and options of a model, as in Llama."""

    width: int
    layers: int
    heads: int
    groups: int  # heads of keys and values; several heads of queries share one (arXiv:2305.13245)
    hidden: int  # width of the feed-forward layer
    tied: bool = True  # one weight serves as the embedding and as the last layer
    base: float = 10000.0  # the base of the rotary positions' frequencies


SIZES = {"gpt_tiny": Size(128, 4, 4, 2, 448), "gpt_124m": Size(768, 12, 12, 12, 2048),
         "gpt_1b": Size(2048, 16, 32, 8, 8192, base=500000.0)}


class Attention(nn.Module):
    """Causal self-attention (N, T, width) -> (N, T, width) with rotary positions (arXiv:2104.09864)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.q_proj = nn.Linear(size.width, size.width, bias=False)
        self.k_proj = nn.Linear(size.width, size.groups * self.head_width, bias=False)
        self.v_proj = nn.Linear(size.width, size.groups * self.head_width, bias=False)
        self.o_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        count, length, _ = x.shape
        q, k, v = (project(x).view(count, length, -1, self.head_width).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        values = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(values.transpose(1, 2).reshape(count, length, -1))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): (N, T, width) -> (N, T, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and a feed-forward layer, each after an RMSNorm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(size.width, 1e-5) for _ in range(2))
        self.self_attn, self.mlp = Attention(size), FeedForward(size)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """All layers except the last: tokens `int64` (N, T) to (N, T, width)."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, 1e-5)

    def forward(self, tokens: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, turns, mask)
        return self.norm(x)


class GPT(nn.Module):
    """Tokens `int64` (N, T) to logits (N, T, vocabulary) of the next tokens.

    With `end`, a token attends only to its own document, which starts after the last earlier token `end`. The weights
    are drawn as in GPT-2: with standard deviation 0.02, and less in the layers that add to the residual stream.
    """

    def __init__(self, size: Size, vocabulary: int, end: int | None = None) -> None:
        super().__init__()
        self.size, self.end, self.model = size, end, Trunk(size, vocabulary)
        self.lm_head = None if size.tied else nn.Linear(size.width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers if adds else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        last = (self.lm_head or self.model.embed_tokens).weight
        turns = self.turns(torch.arange(tokens.shape[1], device=tokens.device), last.dtype)
        mask = None if self.end is None else same_document(tokens, self.end)
        return F.linear(self.model(tokens, turns, mask), last)

    def turns(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the cosines and sines, (2, T, width of a head / 2), with which rotate() turns heads at `positions`."""
        width = self.size.width // self.size.heads
        speeds = self.size.base ** (-torch.arange(0, width, 2, device=positions.device).double() / width)
        angles = positions[:, None].double() * speeds
        return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair of a head's numbers, (N, heads, T, width); numbers i and i + width / 2 form a pair."""
    (cos, sin), (one, two) = turns, x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def same_document(tokens: Tensor, end: int) -> Tensor:
    """Return the mask (N, 1, T, T): a token attends to the tokens of its own document up to its own position."""
    document = (tokens == end).cumsum(1) - (tokens == end).long()  # `end` itself belongs to the document before it
    return (document[:, :, None] == document[:, None, :]).tril()[:, None]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy per token. All windows have equal lengths, so it is a mean over windows, too."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def bits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a metric: the mean cross-entropy of each window (N,) in bits per token."""
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1) / math.log(2)


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a metric: for each window (N,), the fraction of the labels that the model predicts correctly."""
    return (logits.argmax(2) == labels).to(logits.dtype).mean(1)


@torch.no_grad()
def write(model: GPT, prompt: str, count: int, length: int, seed: int, temperature: float = 0.8) -> str:
    """Return `prompt` and `count` bytes that the model draws after it, reading at most the last `length` bytes.

    Bytes that are not printable text become "\N{REPLACEMENT CHARACTER}": control characters could change a terminal.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(count):
        logits = model(tokens[:, -length:].to(device))[:, -1].float().cpu() / temperature
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(1), 1, generator=generator)], 1)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)
