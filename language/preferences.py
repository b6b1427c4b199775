"""Pairs of a chosen and a rejected answer to one prompt: the dataset, the reference and the loss of train_DPO.py.

A row of a file has TRL's names: `prompt`, `chosen` and `rejected`, which are texts or lists of messages. pairs.py makes
tokens of them, as if each answer were the completion of the prompt.
"""
import bisect
import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import reduce, shards
from common.errors import UsageError

from . import pairs

Two = tuple[pairs.Compact, pairs.Compact]  # the chosen answer and the rejected one, each after the prompt


class Preferences:
    """Pairs of answers: inputs and targets, both `int64` (N, 2, length), and what the reference gives them (N, 2).

    Of the two rows, the first has the prompt and the chosen answer, the second the prompt and the rejected answer. The
    targets are the next tokens of answers, and IGNORED elsewhere. The reference gives each answer a log-probability.
    """

    most_workers = 0  # no workers needed: a pair is two rows of an array

    def __init__(self, found: list[Two], coder: pairs.Bytes | pairs.Published, length: int, dropped: int,
                 chat: bool) -> None:
        self.coder, self.vocabulary, self.chat, self.dropped = coder, coder.vocabulary, chat, dropped
        tokens, _, prompt = found[0][0]
        self.prompt = tokens[:prompt].tolist()
        self.inputs = np.zeros((len(found), 2, length), np.int32)
        self.targets = np.full(self.inputs.shape, pairs.IGNORED, np.int32)
        for place, (tokens, counted, _) in zip(np.ndindex(len(found), 2), chain(*found)):
            self.inputs[place][:len(tokens) - 1] = tokens[:-1]
            self.targets[place][:len(tokens) - 1] = np.where(counted[1:], tokens[1:], pairs.IGNORED)
        self.digest = hashlib.sha256(self.inputs.tobytes() + self.targets.tobytes()).hexdigest()[:8]
        self.reference = torch.empty(0, 2)  # not known yet

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(part[np.asarray(indices)]).long() for part in (self.inputs, self.targets))
        return inputs, targets, self.reference[indices]

    def describe(self) -> str:
        """Return the numbers of pairs, of dropped pairs and of tokens that count, and a digest of all tokens."""
        return (f"{len(self):,} pairs ({self.dropped:,} longer ones dropped), "
                f"{(self.targets != pairs.IGNORED).sum():,} tokens of answers (sha256 {self.digest})")

    def state_dict(self) -> dict[str, Any]:
        """Return the reference and the digest of its pairs, for a checkpoint."""
        return {"digest": self.digest, "reference": self.reference}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved["digest"] != self.digest:
            raise ValueError("these are other pairs")
        self.reference = saved["reference"]

    @torch.no_grad()
    def measure(self, margins: "Margins", size: int, device: torch.device) -> None:
        """Compute the reference's log-probabilities, unless a checkpoint had them; all processes must call this.

        Each process computes its share of the pairs, `size` at a time.
        """
        if len(self.reference):
            return
        margins.eval()
        self.reference, table = torch.zeros(len(self), 2), torch.zeros(len(self), 2, device=device)
        share = shards.EvenShare(len(self), reduce.get_rank(), reduce.get_world_size())
        for start in range(0, len(share), size):
            inputs, targets, _ = (part.to(device) for part in self.__getitems__(share[start:start + size]))
            own = share[start:start + size][:share.own - start]  # without the padding that comes last
            table[own] = margins.answers(inputs, targets)[:len(own)]
        self.reference = reduce.reduce_sum(table).cpu()


class Margins(nn.Module):
    """Maps a batch of Preferences to margins (N,), in one forward pass of `model` over both answers of each pair.

    A margin says by how much more than the reference the model prefers the chosen answer. It is `beta` times the
    difference between both answers of: the model's log-probability minus the reference's.
    """

    def __init__(self, model: nn.Module, beta: float) -> None:
        super().__init__()
        self.model, self.beta = model, beta

    def forward(self, inputs: Tensor, targets: Tensor, reference: Tensor) -> Tensor:
        chosen, rejected = (self.answers(inputs, targets) - reference).unbind(1)
        return self.beta * (chosen - rejected)

    def answers(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability (N, 2) of each answer: the sum over its tokens."""
        logits = self.model(inputs.flatten(0, 1)).flatten(0, 1)
        each = F.cross_entropy(logits, targets.flatten(), ignore_index=pairs.IGNORED, reduction="none")
        return -each.view_as(targets).sum(2)


def create_datasets(name: str, path: str, tokenizer: str | None, length: int, count: int | None, too_long: str,
                    vocabulary: int | None = None) -> tuple[Preferences, Preferences]:
    """Return the training and validation pairs; the arguments are those of pairs.create_datasets().

    - "stdlib": the rejected answer is the body of another function of the same set, at least twice as long.
    - "chat": the file `path` has prompt, chosen and rejected in each line, or chosen and rejected that begin equally,
      with the prompt.

    A prompt with either answer has at most `length` + 1 tokens. There are at most `count` pairs. Raises UsageError,
    naming file and line, for what cannot be used.
    """
    coder, sets = pairs.Published(tokenizer) if tokenizer else pairs.Bytes(), []
    for kind, rows, most in zip(pairs.KINDS, pairs.read(name, path), (count, count and -(-count // 8))):
        rows = list(_reject(rows)) if name == "stdlib" else [(where, _split(where, row)) for where, row in rows]
        found = [_encode(where, row, coder, length, too_long, vocabulary) for where, row in rows]
        kept = [two for two in found if two]
        if not kept:
            raise UsageError(f"--length {length}: there are {len(found)} pairs for {kind}, and none fits")
        chat = not isinstance(rows[0][1]["prompt"], str)
        random.Random(0).shuffle(kept)  # so that the first `count` are not those of the same files
        sets.append(Preferences(kept[:most], coder, length, len(found) - len(kept), chat))
    return sets[0], sets[1]


def _reject(rows: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows of functions with another body: the shortest that is at least twice as long, if there is one."""
    bodies = sorted({row["completion"] for _, row in rows}, key=lambda body: (len(body), body))
    for where, row in rows:
        place = bisect.bisect_left(bodies, 2 * len(row["completion"]), key=len)
        if place < len(bodies):
            yield where, {"prompt": row["prompt"], "chosen": row["completion"], "rejected": bodies[place]}


def _split(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with prompt, chosen and rejected, which are texts or lists of messages.

    If the prompt is missing, or a text although the answers are messages, it is the messages with which both begin.
    """
    answers: list[Any] = [row.get("chosen"), row.get("rejected")]
    if answers[0] and answers[0] == answers[1]:
        raise UsageError(f"{where}: chosen and rejected are equal")
    if isinstance(row.get("prompt", ""), str) and all(map(pairs.are_messages, answers)):
        prompt = [one for one, _ in takewhile(lambda two: two[0] == two[1], zip(*answers))]
        chosen, rejected = (answer[len(prompt):] for answer in answers)
        texts = [message["content"] for message in prompt if message["role"] == "user"]
        roles = [message["role"] for message in chosen[:1] + rejected[:1]]
        if not prompt or row.get("prompt") not in (None, *texts) or "user" in roles or "system" in roles:
            raise UsageError(f"{where}: chosen and rejected must begin with the same prompt; if prompt is a text, it "
                             "must be one of the user's messages there")
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    parts = [row.get(name) for name in ("prompt", "chosen", "rejected")]
    if not all(isinstance(part, str) for part in parts) and not all(map(pairs.are_messages, parts)):
        raise UsageError(f"{where}: needs prompt, chosen and rejected, three texts or three lists of objects with the "
                         f"texts role and content; it has {pairs.fields(row)}")
    return row


def _encode(where: str, row: dict[str, Any], coder: pairs.Bytes | pairs.Published, length: int, too_long: str,
            vocabulary: int | None) -> Two | None:
    """Return the tokens of both answers, each after the prompt, or None if one is too long and to be dropped."""
    two = []
    for name in ("chosen", "rejected"):
        place = f"{where}: {name}"
        pair = pairs.encode(place, {"prompt": row["prompt"], "completion": row[name]}, coder, length + 1)
        two.append(pairs.check(place, pair, length, too_long, vocabulary))
    if two[0] is None or two[1] is None:
        return None
    if np.array_equal(two[0][0], two[1][0]):
        raise UsageError(f"{where}: chosen and rejected have the same tokens")
    return two[0], two[1]


def sum_loss(margins: Tensor) -> Tensor:
    """Return the SUM over the pairs of the loss of DPO (arXiv:2305.18290), for margins (N,)."""
    return -F.logsigmoid(margins).sum()


def margin(margins: Tensor, targets: Tensor) -> Tensor:
    """Return a metric: the margin of each pair (N,)."""
    return margins


def wins(margins: Tensor, targets: Tensor) -> Tensor:
    """Return a metric: whether each pair (N,) has a positive margin, so that the model has learned the preference."""
    return (margins > 0).to(margins.dtype)
