"""Sample groups of answers to prompts, reward them, and compare those of a group: GRPO (arXiv:2402.03300).

An answer depends only on the weights and on (seed, epoch, number of the prompt, number in its group).
"""
import ast
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import loading, reduce
from common.errors import UsageError

from . import gpt, pairs

METRICS = ["reward", "full", "spread", "alike", "tokens"]
Settings = tuple[int, int, float, int]
Reward = Callable[[dict[str, Any], str], float]  # of a row of the data and of the text of an answer


class Prompts(pairs.Pairs):
    """Prompts with room for answers: inputs `int64` (N, 2, length), as those of pairs, and the prompts' numbers (N,).

    All prompts end in the same column, so padding precedes shorter ones. `settings` are those of sampling: the room,
    the size of a group, the temperature and the seed.
    """

    def __init__(self, kept: list[tuple[dict, list[int]]], coder: Any, dropped: int, settings: Settings) -> None:
        self.coder, self.vocabulary, self.dropped, self.epoch = coder, coder.vocabulary, dropped, 0
        self.room, self.group, self.temperature, self.seed = settings
        self.rows, self.prompt = [row for row, _ in kept], kept[0][1]
        self.chat = not isinstance(self.rows[0]["prompt"], str)
        end = max(len(tokens) for _, tokens in kept)
        self.inputs = np.zeros((len(kept), 2, end + self.room), np.int32)
        for (tokens, numbers), (_, prompt) in zip(self.inputs, kept):
            tokens[end - len(prompt):end], numbers[end - len(prompt):] = prompt, 1
        self.targets = np.arange(len(kept), dtype=np.int32)

    def set_epoch(self, epoch: int) -> None:
        """Choose the answers that draw() samples; the epoch 0 is that of validation."""
        self.epoch = epoch

    def describe(self) -> str:
        return f"{len(self):,} prompts ({self.dropped:,} longer ones dropped)"


def create_datasets(name: str, path: str, tokenizer: str | None, length: int, count: int | None, too_long: str,
                    vocabulary: int | None, settings: Settings) -> list[Prompts]:
    """Return the prompts for training and for validation; see pairs.create_datasets().

    Prompts that leave no room for an answer in `length` tokens are dropped, or lose their beginnings.
    """
    coder, most, sets = pairs.Published(tokenizer) if tokenizer else pairs.Bytes(), length - settings[0], []
    for rows, limit in zip(pairs.read(name, path), (count, count and -(-count // 8))):
        found = [(row, pairs.ask(where, row, coder, vocabulary)) for where, row in rows]
        kept = [(row, tokens[-most:]) for row, tokens in found if len(tokens) <= most or too_long == "cut"]
        if most < 1 or not kept:
            raise UsageError(f"--length {length}: none of {len(rows)} prompts leaves room for --max-new {settings[0]}")
        random.Random(0).shuffle(kept)
        sets.append(Prompts(kept[:limit], coder, len(rows) - len(kept), settings))
    return sets


class Cache:
    """The `attend` of a model that computes a sequence in parts: keeps the keys and values of earlier positions."""

    def __init__(self, layers: int) -> None:
        self.kept: list[tuple[Tensor, ...]] = [()] * layers  # the first is that of the next layer

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if before := self.kept.pop(0):
            k, v = (torch.cat(parts, 2) for parts in zip(before, (k, v)))
        self.kept.append((k, v))
        return gpt.attend(q, k, v, mask)


@torch.no_grad()
def draw(model: gpt.GPT, prompts: Prompts, inputs: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a group of answers to each prompt: inputs, targets and log-probabilities of these, each (N * group, ...).

    Inputs and targets are as in pairs.py. All processes that share the model must call this with equally many prompts.
    After the prompts, each forward pass computes one token of each answer, until all answers on all processes have
    ended or fill their room.
    """
    inputs = inputs.repeat_interleave(prompts.group, 0)
    end = inputs.shape[2] - prompts.room  # of the prompts
    seeds = [loading.seed(prompts.seed, prompts.epoch, number, member)
             for number in numbers.tolist() for member in range(prompts.group)]
    uniform = torch.stack([torch.rand(prompts.room, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
                           for seed in seeds])
    targets = torch.full_like(inputs[:, 0], pairs.IGNORED)
    precise = torch.promote_types(model.model.embed_tokens.weight.dtype, torch.float32)  # gathered weights may be bf16
    old = torch.zeros_like(targets, dtype=precise)
    writing = torch.ones_like(targets[:, 0], dtype=torch.bool)
    hook = model.logits.register_forward_pre_hook(lambda _, parts: (parts[0][:, -1:], parts[1]))  # saves memory
    model.attend, model.positions = Cache(model.size.layers), torch.arange(end, device=inputs.device)
    for step in range(prompts.room):
        logits = model(inputs[:, :, :end + step])[:, 0] / prompts.temperature
        if logits.is_mps or torch.are_deterministic_algorithms_enabled():  # before torch 2.14, cumsum() refuses CUDA
            logits = logits.cpu()
        shares = logits.double().softmax(1).cumsum(1)
        point = uniform[:, step, None].to(shares) * shares[:, -1:]
        drawn = torch.searchsorted(shares, point, right=True).clamp(max=logits.shape[1] - 1).to(inputs.device)
        at = end + step - 1  # whose next token this is
        targets[:, at] = torch.where(writing, drawn[:, 0], pairs.IGNORED)
        old[:, at] = log_probs(logits.to(inputs.device)[:, None], targets[:, at, None])[:, 0]
        inputs[:, 0, at + 1] = drawn[:, 0] * writing
        writing &= drawn[:, 0] != prompts.coder.end_token
        model.positions = torch.arange(at + 1, at + 2, device=inputs.device)
        if not reduce.reduce_sum(writing.sum()):
            break
    hook.remove()
    model.attend, model.positions = gpt.attend, None
    return inputs, targets, old


def log_probs(logits: Tensor, targets: Tensor, temperature: float = 1) -> Tensor:
    """Return the log-probabilities (N, T) of the targets, and 0 where a target does not count."""
    logits = logits.transpose(1, 2) / temperature
    return -F.cross_entropy(logits, targets, ignore_index=pairs.IGNORED, reduction="none")


def loss(new: Tensor, targets: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return the SUM over the tokens that count of PPO's clipped loss, from the log-probabilities now and before."""
    ratio = (new - old).exp()
    gains = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - clip, 1 + clip) * advantages[:, None])
    return -gains[targets != pairs.IGNORED].sum()


def advantages(rewards: Tensor) -> Tensor:
    """Return by how many standard deviations each reward (N, G) exceeds the mean of its group, as (N * G,)."""
    spread = rewards.std(1, correction=0, keepdim=True)
    return ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-4)).flatten()


def rewards(reward: Reward, prompts: Prompts, numbers: Tensor, targets: Tensor) -> Tensor:
    """Return the rewards (N, G) of the answers in `targets`."""
    values = []
    for number, row in zip(numbers.repeat_interleave(prompts.group).tolist(), targets.tolist()):
        tokens = [token for token in row if token not in (pairs.IGNORED, prompts.coder.end_token)]
        prompt = prompts.inputs[number, 0, prompts.inputs[number, 1] > 0][:-prompts.room].tolist()
        start = len(prompts.coder.decode(prompt))  # decoded alone, an answer may lose the space with which it begins
        values.append(float(reward(prompts.rows[number], prompts.coder.decode(prompt + tokens)[start:])))
    return torch.tensor(values, device=targets.device).view(-1, prompts.group)


def measure(rewards: Tensor, targets: Tensor) -> Tensor:
    """Return sums over the answers: the loss, which is the negative reward, each of METRICS, and their number."""
    spread = rewards.std(1, correction=0, keepdim=True).expand_as(rewards)
    values = -rewards, rewards, rewards == 1, spread, spread < 1e-9
    return torch.stack([*(each.sum() for each in values), pairs.count(targets), (spread >= 0).sum()])


def parses(row: dict[str, Any], answer: str) -> float:
    """Return a reward: how much of an answer is Python after its prompt; 1 if all of it is.

    Half of the reward is for the share of its first lines that parse together, half if all lines do. An answer without
    a statement is worth nothing: neither `pass`, `...` nor a text counts.
    """
    prompt, lines = row["prompt"] if isinstance(row["prompt"], str) else "", answer.splitlines(keepends=True)
    for count in range(len(lines), 0, -1):
        if (_statements(prompt + "".join(lines[:count])) or 0) > (_statements(prompt) or 0):
            return (count / len(lines) + (count == len(lines))) / 2
    return 0.0


def _statements(source: str) -> int | None:
    """Return how many statements do something in Python code, or None if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for an invalid escape in a string
            tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return sum(isinstance(node, ast.stmt) and not isinstance(node, ast.Pass) for node in ast.walk(tree)) - len(texts)
