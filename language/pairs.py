"""Pairs of a prompt and an answer, packed into windows: the datasets of the scripts that fine-tune.

A pair becomes a list of tokens and, for each token, whether the loss counts it: only those of answers, with the token
that ends an answer. The names in files, and which tokens count, are those of TRL (huggingface.co/docs/trl).
"""
import bisect
import hashlib
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UsageError, reason

from . import gpt, text

DATASETS, KINDS = ["stdlib", "chat"], ["training", "validation"]
IGNORED = -100  # the target at each place whose next token does not count; cross_entropy() leaves it out
FUNCTION = re.compile(  # a function's signature and docstring, and its body; `i` is the indentation
    r'^(?P<prompt>(?P<i> *)def \w+\([^()]*(?:\([^()]*\)[^()]*)*\)[^\n:]*:\n'
    r'(?P=i)    r?"""[^"]*(?:"(?!"")[^"]*)*"""\n)(?P<body>(?:\n*(?P=i)    [^\n]*\n)+)', re.M)

Messages = list[dict[str, str]]
Pair = tuple[list[int], list[bool], int]  # the tokens, whether each counts, and the length of the first prompt
Compact = tuple[np.ndarray, np.ndarray, int]  # the same in little memory


class Bytes:
    """Tokens are bytes, and a zero byte ends an answer."""

    vocabulary, end, end_token = text.BYTES, "\0", 0

    def render(self, messages: Messages, ask: bool) -> str:
        """Return a chat as text: each message after a line with its role; with `ask`, the line before an answer."""
        for number, message in enumerate(messages, 1):
            if message["role"] not in ("system", "user", "assistant"):
                raise ValueError(f"the role {message['role']!r} is not system, user or assistant")
            if "\0" in message["content"]:
                raise ValueError(f"message {number}: has a zero byte (\\u0000), which ends a message here; remove it")
        lines = [f"{message['role']}\n{message['content']}\0" for message in messages]
        return "".join(lines) + "assistant\n" * ask

    def encode(self, words: str, chat: bool) -> list[int]:
        return list(words.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(min(token, 255) for token in tokens).decode(errors="replace")


class Published:
    """The tokenizer of a published model in `folder`, and its chat template."""

    def __init__(self, folder: str) -> None:
        try:
            from transformers import AutoTokenizer  # not at the top: an optional package, and slow to import
        except ImportError:
            raise UsageError("--tokenizer: needs the package transformers: pip install transformers") from None
        if not Path(folder).is_dir():
            raise UsageError(f"--tokenizer {folder}: no such folder")
        try:
            self.made: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"--tokenizer {folder}: {reason(error)}") from None
        if self.made.eos_token is None:
            raise UsageError(f"--tokenizer {folder}: has no eos_token, which would end an answer")
        self.vocabulary, self.end, self.end_token = len(self.made), self.made.eos_token, self.made.eos_token_id
        self.appends = self.made("a")["input_ids"][-1:] == [self.end_token]  # an end token to each text

    def render(self, messages: Messages, ask: bool) -> str:
        from jinja2 import TemplateError  # transformers needs it, too

        try:
            return self.made.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it: {reason(error)}") from None

    def encode(self, words: str, chat: bool) -> list[int]:
        """Return the tokens of a text, without an end token that the tokenizer would append.

        A chat template has written the special tokens at the start of a `chat`.
        """
        tokens = self.made(words, add_special_tokens=not chat, verbose=False)["input_ids"]
        return tokens[:-1] if self.appends and not chat else tokens

    def decode(self, tokens: list[int]) -> str:
        return self.made.decode(tokens)


class Pairs:
    """Windows of pairs: inputs `int64` (N, 2, length), and targets (N, length), which are the next tokens or IGNORED.

    The inputs are tokens and the numbers of their pairs, which start at 1 in each window; padding has the number 0. A
    pair is never split. The packing depends on the pairs alone.
    """

    most_workers = 0  # no workers needed: a window is a row of an array

    def __init__(self, pairs: list[Compact], coder: Bytes | Published, length: int, count: int | None,
                 chat: bool) -> None:
        self.coder, self.vocabulary, self.chat = coder, coder.vocabulary, chat
        self.prompt = pairs[0][0][:pairs[0][2]].tolist()
        windows = pack([len(tokens) - 1 for tokens, _, _ in pairs], length)
        random.Random(0).shuffle(windows)  # so that the first `count` are not those of the longest pairs
        windows = windows[:count]
        self.inputs = np.zeros((len(windows), 2, length), np.int32)
        self.targets: np.ndarray = np.full((len(windows), length), IGNORED, np.int32)
        self.size, self.dropped = sum(map(len, windows)), 0
        for row, window in enumerate(windows):
            start = 0
            for number, (tokens, counted, _) in enumerate((pairs[index] for index in window), 1):
                end = start + len(tokens) - 1
                self.inputs[row, 0, start:end], self.inputs[row, 1, start:end] = tokens[:-1], number
                self.targets[row, start:end] = np.where(counted[1:], tokens[1:], IGNORED)
                start = end

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(part[np.asarray(indices)]).long() for part in (self.inputs, self.targets))
        return inputs, targets

    def describe(self) -> str:
        """Return the numbers of pairs, windows, tokens that count and dropped pairs, and a digest of all windows."""
        start = hashlib.sha256(self.inputs.tobytes() + self.targets.tobytes()).hexdigest()[:8]
        return (f"{self.size:,} pairs ({self.dropped:,} longer ones dropped) in {len(self):,} windows, "
                f"{(self.targets != IGNORED).sum():,} tokens of answers (sha256 {start})")


def create_datasets(name: str, path: str, tokenizer: str | None, length: int, count: int | None, too_long: str,
                    vocabulary: int | None = None) -> tuple[Pairs, Pairs]:
    """Return the training and validation pairs of `name`, one of DATASETS, in windows of `length` tokens.

    - "stdlib": functions of Python's standard library. The prompt is the signature with its docstring, and the answer
      is the body. The last 5 % of the files are for validation, as in text.py.
    - "chat": the file `path` with a JSON object in each line. The last 5 % of the lines are for validation.

    `tokenizer` is a folder, or None for bytes. There are at most `count` windows, and an eighth of them for validation.
    Pairs of more than `length` + 1 tokens are dropped or cut, as `too_long` says. `vocabulary` is the size of the
    model's vocabulary, or None if the model accepts any. Raises UsageError, naming file and line, for what cannot be
    used.
    """
    coder, sets = Published(tokenizer) if tokenizer else Bytes(), []
    for kind, rows, most in zip(KINDS, read(name, path), (count, count and -(-count // 8))):
        pairs = [check(where, encode(where, row, coder, length + 1), length, too_long, vocabulary)
                 for where, row in rows]
        kept = [pair for pair in pairs if pair]
        if not kept:
            raise UsageError(f"--length {length}: there are {len(pairs)} pairs for {kind}, and none fits")
        sets.append(Pairs(kept, coder, length, most, is_chat(rows[0][1])))
        sets[-1].dropped = len(pairs) - len(kept)
    return sets[0], sets[1]


def read(name: str, path: str) -> list[list[tuple[str, dict[str, Any]]]]:
    """Return the rows of `name` for training and for validation: for each, its place in words and its content."""
    found: list[Any] = text.standard_library() if name == "stdlib" else list(_read(Path(path)))
    if len(found) < 2 and name == "chat":
        raise UsageError(f"--data-path: {path}: has {'one row' if found else 'no row'}, and needs at least two: one to "
                         "train on, and one for validation")
    cut = len(found) - max(1, len(found) // 20)
    return [list(_functions(part)) if name == "stdlib" else part for part in (found[:cut], found[cut:])]


def is_chat(row: dict[str, Any]) -> bool:
    """Return whether encode() reads messages, and not the texts prompt and completion."""
    return not (isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str))


def encode(where: str, row: dict[str, Any], coder: Bytes | Published, most: float = math.inf) -> Pair:
    """Return the tokens of a row of a file, and which of them count; raise UsageError, naming `where`, if none can.

    After the first `most` tokens, an answer need not count: looking for each would make long chats slow.
    """
    if not is_chat(row):
        if not row["completion"]:
            raise UsageError(f"{where}: the completion is empty")
        whole = row["prompt"] + row["completion"]
        whole += "" if row["completion"].endswith(coder.end) else coder.end
        return _count(coder, whole, [(row["prompt"], whole)], False, most)
    before: Any = [] if "messages" in row else row.get("prompt")
    after: Any = row["messages"] if "messages" in row else row.get("completion")
    if not are_messages(before) or not are_messages(after):
        raise UsageError(f"{where}: needs messages, a list of objects with the texts role and content, or prompt and "
                         f"completion; it has {fields(row)}")
    messages = before + (after[len(before):] if after[:len(before)] == before else after)
    answers = [number for number in range(len(before), len(messages)) if messages[number]["role"] == "assistant"]
    try:
        whole = coder.render(messages, False)
        if not answers:
            raise ValueError("no message of the assistant, so no answer")
        for number in answers:
            if not messages[number]["content"]:
                raise ValueError(f"message {number + 1}: the answer is empty")
        return _count(coder, whole, _spans(coder, whole, messages, answers), True, most)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def ask(where: str, row: dict[str, Any], coder: Bytes | Published, vocabulary: int | None) -> list[int]:
    """Return the tokens of the prompt in a row, after which a model writes its answer."""
    prompt, chat = row.get("prompt"), not isinstance(row.get("prompt"), str)
    if not prompt or chat and not are_messages(prompt):
        raise UsageError(f"{where}: needs a prompt, a text or a list of objects with the texts role and content; it "
                         f"has {fields(row)}")
    try:
        tokens = coder.encode(coder.render(prompt, True) if chat else prompt, chat)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if vocabulary and max(tokens) >= vocabulary:
        raise UsageError(f"{where}: has token {max(tokens)}, and the model's vocabulary ends at {vocabulary - 1}")
    return tokens


def are_messages(value: Any) -> bool:
    """Return whether `value` is a list of objects with the texts role and content."""
    return isinstance(value, list) and all(isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(
        each.get("content"), str) for each in value)


def fields(row: dict[str, Any]) -> str:
    """Return the names of the fields of a row, each with the type of its value."""
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items()) or "nothing"


def _spans(coder: Bytes | Published, whole: str, messages: Messages, answers: list[int]) -> Iterator[tuple[str, str]]:
    """Yield the beginnings of a chat that end before and after each of the messages with the numbers `answers`."""
    for number in answers:
        asked, answered = coder.render(messages[:number], True), coder.render(messages[:number + 1], False)
        if not answered.startswith(asked) or not whole.startswith(answered):
            raise ValueError(f"message {number + 1}: to ask for this answer, the chat template writes a text that the "
                             "whole chat does not contain, so training would differ from sampling")
        yield asked, answered


def _count(coder: Bytes | Published, whole: str, spans: Iterable[tuple[str, str]], chat: bool, most: float) -> Pair:
    """Return the tokens of `whole`; those between the two texts of a span, with which it begins, count.

    If a token spans the end of a prompt, it counts. No span is read after the first that begins after `most` tokens.
    """
    tokens = coder.encode(whole, chat)
    counted = [False] * len(tokens)
    prompts = []
    for span in spans:
        start, end = (_shared(tokens, coder.encode(words, chat)) for words in span)
        counted[start:end] = [True] * (end - start)
        prompts.append(start)
        if start >= most:
            break
    return tokens, counted, prompts[0]


def _shared(one: list[int], other: list[int]) -> int:
    """Return how many tokens two lists share at their beginnings."""
    if one[:len(other)] == other:
        return len(other)
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(one, other)))


def check(where: str, pair: Pair, length: int, too_long: str, vocabulary: int | None) -> Compact | None:
    """Return a pair that fits into a window of `length` inputs, or None if it is to be dropped."""
    tokens, counted, prompt = pair
    if vocabulary and max(tokens) >= vocabulary:
        raise UsageError(f"{where}: has token {max(tokens)}, and the model's vocabulary ends at {vocabulary - 1}")
    if len(tokens) > length + 1 and too_long == "drop":
        return None
    tokens, counted = tokens[:length + 1], counted[:length + 1]
    if not any(counted[1:]):
        raise UsageError(f"{where}: no token of the answer is left in the first {length + 1}; raise --length, or pass "
                         "--too-long drop")
    return np.array(tokens, np.int32), np.array(counted), prompt


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return the indices of the items in each window: the largest first, each in the window with the least room."""
    windows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # sorted: the room in a window, and its index
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        place = bisect.bisect(rooms, (sizes[item], -1))
        if place == len(rooms):
            rooms.append((length, len(windows)))
            windows.append([])
        room, index = rooms.pop(place)
        windows[index].append(item)
        bisect.insort(rooms, (room - sizes[item], index))
    return windows


def _functions(files: list[bytes]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the functions with a docstring and a body in Python files: their name, and prompt and completion."""
    for content in files:
        for found in FUNCTION.finditer(content.decode(errors="replace")):
            prompt, body = (re.sub(f"^{found['i']}", "", found[part], flags=re.M) for part in ("prompt", "body"))
            yield prompt.partition("(")[0], {"prompt": prompt, "completion": body}


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the content of each line of a file that is not empty."""
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("is not a JSON object")
                    if "\\u" in line:  # UTF-8 itself has no lone surrogates
                        _require_whole(row)
                    yield f"{path}:{number}", row
    except UnicodeEncodeError as error:
        raise UsageError(f"--data-path: {path}:{number}: has {error.object[error.start]!r}, half of a character (a "
                         "lone surrogate); remove it, or export the text as UTF-8") from None
    except (ValueError, OSError) as error:
        place = path if isinstance(error, (OSError, UnicodeDecodeError)) else f"{path}:{number}"
        raise UsageError(f"--data-path: {place}: {reason(error)}") from None


def _require_whole(value: Any) -> None:
    """Raise UnicodeEncodeError if a text in a row has half of a character; this is faster than json.dumps()."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            _require_whole(each)


def sum_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the SUM of the cross-entropy over the tokens that count."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a metric: the sum over each window (N,) of the cross-entropy in bits."""
    each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return each.sum(1) / math.log(2)


def hits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a metric: for each window (N,), how many of the targets the model predicts."""
    return (logits.argmax(2) == targets).sum(1).to(logits.dtype)


def count(targets: Tensor) -> Tensor:
    """Return the number of tokens that count."""
    return (targets != IGNORED).sum()


def answer(model: gpt.GPT, val_set: Pairs, prompt: str | None, seed: int) -> str:
    """Return a prompt, by default the first for validation, and the answer of at most 200 tokens that a model draws.

    For an empty prompt, the result is empty, too. All processes that share the model must call this.
    """
    coder, tokens = val_set.coder, val_set.prompt
    if prompt is not None:
        words = coder.render([{"role": "user", "content": prompt}], True) if val_set.chat else prompt
        tokens = coder.encode(words, val_set.chat)
    if not tokens or prompt == "":
        return ""
    drawn = gpt.draw(model, tokens, 200, val_set.inputs.shape[2], seed)[len(tokens):]
    drawn = list(takewhile(lambda token: token != coder.end_token, drawn))
    return gpt.printable(coder.decode(tokens + drawn))
