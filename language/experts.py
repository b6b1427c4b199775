"""A mixture of experts (arXiv:1701.06538): each token goes through a few of many feed-forward layers.

The parts and their names are those of GLM-4.5 in transformers (`Glm4MoeMoE`), without its shared expert.
"""
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Excess(torch.autograd.Function):
    """Returns `weights`; backward also gives `bias` the gradient `excess`, regardless of the loss."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, bias: Tensor, excess: Tensor) -> Tensor:
        ctx.save_for_backward(excess)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return gradient, ctx.saved_tensors[0], None


class Router(nn.Module):
    """Maps tokens (N, T, width) to the weights of the experts (N, T, experts); all but `active` of them are 0.

    A bias affects only which experts a token goes to. It falls for experts with more tokens than the average and rises
    for the others, so the model needs no balancing loss, which would disturb training (arXiv:2408.15664). Here, the
    bias is a parameter, and its gradient is the expert's excess share of the tokens. In any script that reduces
    gradients, the optimizer therefore updates the bias based on the tokens of the whole batch, and checkpoints contain
    the bias. AdamW divides by the size of a gradient, so the factor 0.001 affects only the norm that `--clip-norm`
    limits.
    """

    def __init__(self, width: int, experts: int, active: int) -> None:
        super().__init__()
        self.active, self.weight = active, nn.Parameter(torch.empty(experts, width))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        # up to torch 2.11, a DTensor that is split along its tokens cannot be flattened, as F.linear does: transpose it
        logits = F.linear(x.transpose(0, 1), self.weight).transpose(0, 1)
        scores = logits.to(torch.promote_types(x.dtype, torch.float32)).sigmoid()
        with torch.no_grad():
            chosen = (scores + self.e_score_correction_bias).topk(self.active).indices
            chosen = torch.zeros_like(scores).scatter(2, chosen, 1.0)
            excess = chosen.mean((0, 1)) / self.active - 1 / len(self.weight)
        weights = scores * chosen
        weights = weights / weights.sum(2, keepdim=True)
        return Excess.apply(weights, self.e_score_correction_bias, 0.001 * excess)


class Experts(nn.Module):
    """Maps tokens (N, T, width) and weights (N, T, experts) to weighted sums of the experts' outputs (N, T, width).

    Each expert computes only the tokens for which its weight is not 0.
    """

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.compute = compute
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        tokens, shares = x.flatten(0, 1), weights.flatten(0, 1)
        expert, token = shares.t().nonzero(as_tuple=True)  # sorted by expert
        counts = expert.bincount(minlength=shares.shape[1])
        results = self.compute(tokens[token], counts, self.gate_up_proj, self.down_proj)
        results = (results * shares[token, expert, None]).to(x.dtype)
        return torch.zeros_like(tokens).index_add(0, token, results).view_as(x)


class Mixture(nn.Module):
    """A router and its experts: (N, T, width) -> (N, T, width)."""

    def __init__(self, width: int, hidden: int, experts: int, active: int) -> None:
        super().__init__()
        self.gate, self.experts = Router(width, experts, active), Experts(width, hidden, experts)

    @torch.compiler.disable  # the number of an expert's tokens depends on the data, so there is no graph to reuse
    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x))


def compute(rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the experts' outputs for `rows` (R, width): the first counts[0] rows go to expert 0, and so on.

    Each expert is a SwiGLU with weights from `gate_up` (experts, 2 * hidden, width) and `down` (experts, width,
    hidden).
    """
    results = []
    for part, one, two in zip(rows.split(counts.tolist()), gate_up, down, strict=True):
        gate, up = F.linear(part, one).chunk(2, 1)
        results.append(F.linear(F.silu(gate) * up, two))
    return torch.cat(results)
