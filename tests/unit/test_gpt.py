"""The language model computes what its formulas say, and casts no more than it must."""
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from common import layers, shards
from language import gpt

SIZE = gpt.Size(32, 2, 4, 2, 48, base=50.0)


def formula(weights, tokens, size):
    """Return Llama's logits (N, T, vocabulary), position by position and head by head."""
    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"model.{name}.weight"]

    def turned(vector, position):
        """`vector` (width of a head): each pair (i, i + half), as a complex number, times exp(1j * angle)."""
        half = len(vector) // 2
        pairs = torch.complex(vector[:half], vector[half:])
        angles = position / size.base ** (torch.arange(half, dtype=torch.float64) / half)
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag])

    x, width = F.embedding(tokens, weights["model.embed_tokens.weight"]), size.width // size.heads
    for number in range(size.layers):
        layer = {name: weights[f"model.layers.{number}.{name}_proj.weight"] for name in (
            "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")}
        y = norm(x, f"layers.{number}.input_layernorm")
        q, k, v = (y @ layer[f"self_attn.{name}"].t() for name in "qkv")
        rows = []
        for sequence in range(len(tokens)):
            columns = []
            for head in range(size.heads):
                group = head // (size.heads // size.groups)
                own, shared = slice(head * width, (head + 1) * width), slice(group * width, (group + 1) * width)
                queries, keys = (torch.stack([turned(vector, position) for position, vector in enumerate(part)])
                                 for part in (q[sequence, :, own], k[sequence, :, shared]))
                scores = (queries @ keys.t() / math.sqrt(width)).tril() + torch.full_like(
                    queries @ keys.t(), -math.inf).triu(1)
                columns.append(scores.softmax(1) @ v[sequence, :, shared])
            rows.append(torch.cat(columns, 1))
        x = x + torch.stack(rows) @ layer["self_attn.o"].t()
        y = norm(x, f"layers.{number}.post_attention_layernorm")
        gate = y @ layer["mlp.gate"].t()
        x = x + (gate * gate.sigmoid() * (y @ layer["mlp.up"].t())) @ layer["mlp.down"].t()
    return norm(x, "norm") @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).t()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_are_those_of_the_formulas(tied):
    torch.manual_seed(0)
    size = SIZE._replace(tied=tied)
    model, tokens = gpt.GPT(size, 64).double(), torch.randint(64, (2, 7))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.autocast("cpu", torch.bfloat16):  # lowers only float32
        logits = model(tokens)
    expected = formula(dict(model.named_parameters()), tokens, size)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-12)
    found, wanted = (torch.autograd.grad(result.square().sum(), [*model.parameters()]) for result in (logits, expected))
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


class Operators(TorchDispatchMode):
    """Records the names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


def count(layers, lower):
    """Return the numbers of products and casts in the forward and the backward pass of `layers` blocks."""
    model, tokens = gpt.GPT(SIZE._replace(layers=layers), 64), torch.randint(64, (2, 8))
    with Operators() as forward, torch.autocast("cpu", torch.bfloat16, enabled=lower):
        loss = gpt.loss(model(tokens), tokens)
    with Operators() as backward:
        loss.backward()
    return [run.names.count(name) for run in (forward, backward) for name in ("mm", "_to_copy")]


def test_a_block_casts_what_several_products_share_once():
    """With autocast, a block casts 7 weights, 2 outputs of norms, and in backward() what it adds to the stream."""
    plain, lower = ([two - one for one, two in zip(count(1, lower), count(2, lower))] for lower in (False, True))
    assert plain == [7, 0, 14, 0]
    assert lower == [7, 9, 14, 11]


def test_the_gradient_of_a_rotation_is_the_rotation_back():
    torch.manual_seed(0)
    x, angles = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True), torch.randn(5, 4, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    rotations = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)])
    assert torch.autograd.gradcheck(lambda x: gpt.rotate(x, rotations), x)


def test_weights_are_drawn_as_in_gpt2():
    torch.manual_seed(0)
    for name, parameter in gpt.GPT(gpt.Size(128, 8, 4, 2, 384), 1000).named_parameters():
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02 / 4 if adds else 0.02, rel=0.03), name


def test_the_vocabulary_is_a_multiple_of_64():
    with torch.device("meta"):
        assert [len(gpt.GPT(SIZE, rows).model.embed_tokens.weight) for rows in (256, 257, 50257)] == [256, 320, 50304]
        assert len(gpt.GPT(SIZE._replace(vocabulary=61), 256).model.embed_tokens.weight) == 61


def test_metrics_of_windows():
    labels = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    even = torch.zeros(2, 4, 32)
    torch.testing.assert_close(gpt.bits(even, labels), torch.tensor([5.0, 5.0]))
    torch.testing.assert_close(gpt.loss(even, labels), torch.tensor(math.log(32)))
    right = F.one_hot(labels, 32).float()
    right[1, 1:] = right[1, 0]
    torch.testing.assert_close(gpt.hits(right, labels), torch.tensor([1.0, 0.25]))


def test_a_text_is_drawn_from_what_the_model_says_next():
    torch.manual_seed(0)
    model, generator = gpt.GPT(SIZE, 256), torch.Generator().manual_seed(3)
    nn.init.normal_(model.model.embed_tokens.weight, std=0.3)
    tokens = torch.tensor([list(b"def ")])
    for _ in range(40):
        scores = model(tokens[:, -16:])[:, -1].float() / 0.8
        tokens = torch.cat([tokens, torch.multinomial(scores.softmax(1), 1, generator=generator)], 1)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    said = gpt.write(model, "def ", 40, 16, seed=3)
    assert len(said) == len(text) and all(one == other for one, other in zip(said, text) if other.isprintable())


@pytest.mark.parametrize("tied", [True, False])
def test_a_sharded_model_computes_the_same(group, tied):
    """With a vocabulary so large that its two matrices could be units: both are read from outside of their layers."""
    torch.manual_seed(0)
    tokens, whole = torch.randint(500, (2, 9)), gpt.GPT(SIZE._replace(tied=tied), 512)
    model = gpt.GPT(SIZE._replace(tied=tied), 512)
    model.load_state_dict(whole.state_dict())
    mesh = dist.init_device_mesh("cpu", (1,))
    units = [*shards.units(layers.blocks(model), True)]
    assert [block for block, _ in units] == [*model.model.layers]
    for block, reshard in units:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    for each in (model, whole):
        gpt.loss(each(tokens), tokens).backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
