"""A language model with Llama's architecture and parameter names, so that it can load published weights."""
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from common.reduce import get_world_size

from .experts import Mixture

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Size(NamedTuple):
    """The dimensions and options of a model; FIELDS in `llama.py` lists their names in Hugging Face's config.json."""

    width: int
    layers: int
    heads: int
    groups: int  # number of key and value heads; several query heads share one (arXiv:2305.13245)
    hidden: int  # width of the feed-forward layer
    tied: bool = True  # one weight serves as the embedding and as the last layer
    base: float = 10000.0  # the base of the rotary positions' frequencies
    vocabulary: int | None = None  # by default, that of the data
    end: int | None = None  # the token that ends a document, in a vocabulary that text.py does not know
    experts: int = 0  # number of feed-forward layers to choose from; 0: one layer for all tokens
    active: int = 2  # experts per token


SIZES = {"gpt_tiny": Size(128, 4, 4, 2, 448), "gpt_124m": Size(768, 12, 12, 12, 2048),
         "gpt_1b": Size(2048, 16, 32, 8, 8192, base=500000.0), "moe_tiny": Size(128, 4, 4, 2, 224, experts=8)}

# Peak TFLOP/s in bfloat16, by a pattern in the device's name, from the makers' data sheets (for NVIDIA, half the figure
# "with sparsity"). The peak of the RTX 4090, with sums in float32, is from NVIDIA's white paper on Ada
PEAKS = {"A100": 312, "H[12]00 NVL": 835, "H100 PCIe": 756, "G?H[12]00": 989, "B200": 2250, "L4": 121, "L40S": 362,
         "RTX 4090$": 165, "MI300X": 1307}


def product_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which `device` multiplies tensors of this `dtype`. Autocast lowers only float32."""
    if dtype == torch.float32 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


class Attention(nn.Module):
    """Causal self-attention (N, T, width) -> (N, T, width) with rotary position embeddings (arXiv:2104.09864)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width, self.heads = size.width // size.heads, size.groups
        self.q_proj = nn.Linear(size.width, size.width, bias=False)
        self.k_proj = nn.Linear(size.width, size.groups * self.head_width, bias=False)
        self.v_proj = nn.Linear(size.width, size.groups * self.head_width, bias=False)
        self.o_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor, mask: Tensor | None, attend: Attend) -> Tensor:
        count, length, _ = x.shape
        x = x.to(product_type(x.dtype, x.device))  # once for all three
        q, k, v = (layer(x).view(count, length, -1, self.head_width).transpose(1, 2)
                   for layer in (self.q_proj, self.k_proj, self.v_proj))
        values = attend(rotate(q, rotations), rotate(k, rotations), v, mask)
        return self.o_proj(values.transpose(1, 2).reshape(count, length, -1))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): (N, T, width) -> (N, T, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(product_type(x.dtype, x.device))  # once for both
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a preceding RMSNorm and a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(size.width, 1e-5) for _ in range(2))
        self.self_attn = Attention(size)
        mixture = size.width, size.hidden, size.experts, size.active
        self.mlp: nn.Module = Mixture(*mixture) if size.experts else FeedForward(size)

    def forward(self, x: Tensor, rotations: Tensor, mask: Tensor | None, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotations=rotations, mask=mask, attend=attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """All layers except the last: tokens, `int64` (N, T), -> (N, T, width)."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, 1e-5)

    def forward(self, tokens: Tensor, *around: Any) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, *around)
        return self.norm(x)


class Head(nn.Linear):
    """The last layer of an untied model, an nn.Linear, which tensor parallelism can divide.

    Logits reads its weight and never calls it, so it must not be a separate FSDP2 unit.
    """

    forward = nn.Module.forward  # layers_of() takes it for a mere container, so the root's unit gathers its weight


class Logits(nn.Module):
    """The last layer, (N, T, width) -> (N, T, vocabulary); in a tied model, its `weight` is the embedding's."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class GPT(nn.Module):
    """Maps tokens, `int64` (N, T), to logits (N, T, vocabulary) of the next tokens.

    With `end`, a token attends only to its own document, which starts after the previous `end` token. Instead of `end`,
    an input of shape (N, 2, T) can name the documents: tokens, and the numbers of their documents. The size of the
    data's vocabulary is rounded up to a multiple of 64, which is faster on a GPU and can be divided over processes. The
    weights are drawn as in GPT-2: with standard deviation 0.02, or less in the layers that add to the residual stream.

    With `positions` (P,), the model computes only these positions of a sequence, and returns logits (N, P, vocabulary).
    The attribute `attend`, a function (q, k, v, mask), must then fetch the keys and values of the other positions.
    """

    positions: Tensor | None

    def __init__(self, size: Size, vocabulary: int, end: int | None = None) -> None:
        super().__init__()
        vocabulary = size.vocabulary or vocabulary + -vocabulary % 64
        self.size, self.end, self.model = size, end, Trunk(size, vocabulary)
        self.lm_head = None if size.tied else Head(size.width, vocabulary, bias=False)
        self.logits, self.positions, self.attend = Logits(), None, attend
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                adds = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers if adds else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens, documents = tokens.unbind(1) if tokens.ndim == 3 else (tokens, None)
        x = self.model(self.part(tokens), *self.around(tokens, documents))
        return self.logits(x, (self.lm_head or self.model.embed_tokens).weight)

    def part(self, tokens: Tensor) -> Tensor:
        """Return the columns of `tokens` (N, T), or of targets, at the `positions` that this process computes."""
        return tokens if self.positions is None else tokens[:, self.positions]

    def around(self, tokens: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor | None, Attend]:
        """Return what the blocks need to know about positions: rotations, mask and `attend`.

        `rotations`, shape (2, P, width of a head), holds the cosines and sines with which rotate() rotates queries and
        keys. The mask, shape (N, 1, P, T), is also causal. Without `end` and `documents`, the numbers (N, T) of the
        tokens' documents, it is None, which makes attend() causal.
        """
        every = torch.arange(tokens.shape[1], device=tokens.device)
        positions = every if self.positions is None else self.positions
        width, precise = self.size.width // self.size.heads, torch.float32 if every.is_mps else torch.float64
        speeds = self.size.base ** (-torch.arange(0, width, 2, device=every.device).to(precise) / width)
        angles = positions[:, None] * speeds
        dtype = product_type(self.model.embed_tokens.weight.dtype, tokens.device)
        if documents is None and self.end is not None:
            documents = number_documents(tokens, self.end)
        mask = None if documents is None else same_document(documents, positions)
        cos, sin = angles.cos(), angles.sin()
        rotations = torch.stack([cos, cos, -sin, sin], 1).view(-1, 2, width)
        return rotations.transpose(0, 1).to(dtype), mask, self.attend


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention (N, heads, T, width) of queries `q` to keys `k` and values `v`, both (N, groups, S, width).

    Without `mask`, attention is causal. The queries are those of the last T of the S positions.
    """
    causal = mask is None and q.shape[2] == k.shape[2]
    mask = causal_lower_right(q.shape[2], k.shape[2]) if mask is None and not causal else mask
    if k.shape[1] < q.shape[1] and not k.is_cpu:  # a GPU's kernels share keys only in 16 bits and without a mask
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    shared = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=shared)


class Rotation(torch.autograd.Function):
    """Rotates pairs of numbers; backward() rotates the gradient back, with half of the kernels that autograd needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        cos, sin = ctx.saved_tensors
        return turn(gradient, cos, -sin), None, None


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Return `x` (N, heads, T, width) with pairs of numbers rotated; i and i + width / 2 in a head form a pair."""
    return Rotation.apply(x, *rotations.to(x.dtype))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x * cos + (x with its halves exchanged) * sin."""
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[:, :half])
    turned[..., half:].addcmul_(x[..., :half], sin[:, half:])
    return turned


def number_documents(tokens: Tensor, end: int) -> Tensor:
    """Return the number of each token's document (N, T); an `end` token belongs to the document that it ends."""
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def same_document(documents: Tensor, positions: Tensor) -> Tensor:
    """Return the mask (N, 1, P, T): whether the tokens at `positions` (P,) attend to each token.

    `documents` (N, T) are the numbers of the tokens' documents. A token attends to itself and to the earlier tokens of
    its document.
    """
    before = positions[:, None] >= torch.arange(documents.shape[1], device=documents.device)
    return ((documents[:, positions, None] == documents[:, None, :]) & before)[:, None]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy per token. All windows are equally long, so this is also the mean over windows."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a metric: the mean cross-entropy of each window (N,) in bits per token."""
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1) / math.log(2)


def hits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a metric: for each window (N,), the fraction of the targets that the model predicts correctly."""
    return (logits.argmax(2) == targets).to(logits.dtype).mean(1)


def operations(model: GPT, length: int) -> int:
    """Return the number of floating-point operations to train on one token of a window: 6 N + 12 L H Q T.

    The formula is from PaLM's appendix B (arXiv:2204.02311): N parameters in matrix products, L layers, H heads of
    width Q, and T = `length`. It counts all of attention, although a causal kernel skips half of it. A parameter that
    is frozen, as with adapters, counts 4 times: it passes gradients back, but has none.
    """
    embedding = None if model.size.tied else model.model.embed_tokens.weight
    products = [parameter for parameter in model.parameters() if parameter.ndim > 1 and parameter is not embedding]
    passes = sum((6 if parameter.requires_grad else 4) * parameter.numel() for parameter in products)
    return passes + 12 * model.size.layers * model.size.width * length


def utilization(model: GPT, length: int, speed: float, device: torch.device) -> str:
    """Return "  MFU 40%": the FLOP/s at `speed`, in tokens/s over all processes, relative to the bfloat16 peak.

    Returns "" if the peak is not in PEAKS. In float32, GPUs reach at most half of this peak.
    """
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    peak = find_peak(ask(device)) if ask and device.type != "cpu" else None
    return f"  MFU {operations(model, length) * speed / peak:.0%}" if peak else ""


def find_peak(name: str) -> float | None:
    """Return the sum over all processes of the peak in PEAKS of the device `name`, in FLOP/s."""
    peaks = (peak for pattern, peak in PEAKS.items() if re.search(rf"\b{pattern}\b", name))
    return next((peak * 1e12 * get_world_size() for peak in peaks), None)


def write(model: GPT, prompt: str, count: int, length: int, seed: int) -> str:
    """Return `prompt` and the next `count` bytes, which draw() draws, as printable text; "" for an empty prompt.

    If the tokens are not bytes, the result is a line that says so. All processes that share the model must call this.
    """
    if not prompt:
        return ""
    if len(model.model.embed_tokens.weight) != 256:
        return "no sample: the tokens are not bytes"
    if "forward" in vars(model):  # a pipeline's forward() accepts only whole batches
        return "no sample: write one with python -m language.train --evaluate"
    return printable(bytes(draw(model, list(prompt.encode()), count, length, seed)).decode(errors="replace"))


@torch.no_grad()
def draw(model: GPT, prompt: list[int], count: int, length: int, seed: int, temperature: float = 0.8) -> list[int]:
    """Return the tokens `prompt` and the next `count`, each drawn by the model from at most `length` tokens."""
    model.eval()
    divided = model.positions, model.attend
    model.positions, model.attend = None, attend
    device, generator = model.model.embed_tokens.weight.device, torch.Generator().manual_seed(seed)
    tokens = torch.tensor([prompt])
    for _ in range(count):
        window = tokens[:, -length:]
        logits = model(F.pad(window, (0, length - window.shape[1])).to(device))[:, window.shape[1] - 1]
        if hasattr(logits, "full_tensor"):  # tensor parallelism splits the logits
            logits = logits.full_tensor()
        drawn = torch.multinomial((logits.float().cpu() / temperature).softmax(1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], 1)
    model.positions, model.attend = divided
    return tokens[0].tolist()


def printable(text: str) -> str:
    """Return `text` with "\N{REPLACEMENT CHARACTER}" for control characters, which could change a terminal."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)
