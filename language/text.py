"""Text as windows of tokens: the datasets of the language scripts.

A token is a byte, or one of the numbers in the files that the scripts of nanoGPT, build-nanogpt and llm.c write.
"""
import codecs
import hashlib
import os
import sysconfig
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import loading
from common.errors import ProcessError, UsageError, reason
from common.reduce import is_main_process

DATASETS = ["stdlib", "text", "tokens"]
BYTES, GPT2 = 256, 50257  # the sizes of the vocabularies
LLM_C = {20240520: np.uint16, 20240801: np.uint32}  # the first number in llm.c's header of 1,024 bytes: type of tokens


class Windows:
    """Windows of `length` tokens: inputs `int64` (N, length) and targets, which are the next tokens (N, length).

    With a `seed`, each epoch draws `count` windows at random positions, which depend on (seed, epoch) alone. Without a
    seed, the windows are the same in each epoch, do not overlap, and are evenly spaced. Raises ProcessError,
    naming the file, if a token is not in the vocabulary.
    """

    most_workers = 0  # no workers needed: a window is a slice of an array

    def __init__(self, name: str, tokens: np.ndarray, vocabulary: int, length: int, count: int,
                 seed: int | None = None) -> None:
        if len(tokens) <= length:
            raise UsageError(f"--length {length}: {name} has only {len(tokens):,} tokens")
        self.name, self.tokens, self.vocabulary, self.length, self.seed = name, tokens, vocabulary, length, seed
        self.count = count if seed is not None else min(count, (len(tokens) - 1) // length)
        self.set_epoch(0)

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        """Choose the windows of this epoch; call it before the loader workers start the epoch."""
        last = len(self.tokens) - 1 - self.length
        if self.seed is None:
            self.starts = torch.arange(self.count) * (last // max(1, self.count - 1))
        else:
            generator = torch.Generator().manual_seed(loading.seed(self.seed, epoch))
            self.starts = torch.randint(last + 1, (self.count,), generator=generator)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        starts = self.starts[torch.as_tensor(indices)].tolist()
        rows = np.stack([self.tokens[start:start + self.length + 1] for start in starts]).astype(np.int64)
        if rows.max() >= self.vocabulary:
            raise ProcessError(f"{self.name} has token {rows.max()}, and the vocabulary ends at {self.vocabulary - 1}")
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:]


def create_datasets(name: str, path: str, length: int, count: int, seed: int,
                    vocabulary: int | None = None) -> tuple[Windows, Windows]:
    """Return the training and validation windows of `name`, one of DATASETS.

    - "stdlib": the sources of Python's standard library on this machine, without tests. The last 5 % of the files are
      for validation.
    - "text": the UTF-8 file `path`, or all `.txt` files in this folder, as bytes. The last 5 % are for validation: of
      the file, or of the files in the order of their names.
    - "tokens": `path`/train.bin and `path`/val.bin, `uint16`; or, with a header, the formats .npy and llm.c's.

    An epoch has `count` windows; the validation set has at most an eighth of that number. `vocabulary` is the size of
    the model's vocabulary, or None if the model accepts any. Raises UsageError if data is missing.
    """
    if name == "tokens":
        parts, size = [_memory_map(Path(path, f"{part}.bin")) for part in ("train", "val")], vocabulary or GPT2
    else:
        documents = standard_library() if name == "stdlib" else _documents(Path(path))
        parts, size = [np.frombuffer(text, np.uint8) for text in _split(documents)], min(BYTES, vocabulary or BYTES)
    train, val = parts
    return (Windows(f"{name}'s training text", train, size, length, count, seed),
            Windows(f"{name}'s validation text", val, size, length, max(1, count // 8)))


def end(vocabulary: int, other: int | None) -> int:
    """Return the token that ends a document: 0 for bytes, 50256 for GPT-2's vocabulary, and otherwise `other`.

    Raises UsageError if there is no such token.
    """
    found = {BYTES: 0, GPT2: 50256}.get(vocabulary, other)
    if found is None:
        raise UsageError("--document-mask: the model's config.json has no eos_token_id, which would end a document")
    return found


def digest(dataset: Any) -> str:
    """Return the number of tokens and the start of the SHA-256 of the first 2**26, or the length of any other data."""
    if not isinstance(dataset, Windows):
        return f"{len(dataset):,} samples"
    start = hashlib.sha256(dataset.tokens[:2**26].tobytes()).hexdigest()[:8]
    return f"{len(dataset.tokens):,} tokens (sha256 {start})"


def standard_library() -> list[bytes]:
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = set(folders) - left_out  # do not list these folders: that would take half a second
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return [file.read_bytes() for file in sorted(files)]


def _memory_map(file: Path) -> np.ndarray:
    """Return the tokens in `file`, which stay on disk; raise UsageError if it contains anything else."""
    try:
        with open(file, "rb") as opened:
            start = opened.read(2**20)
            opened.seek(-min(len(start), 2**12), os.SEEK_END)
            tail = opened.read()
        if len(tail) > 64 and tail[4:] == tail[:-4]:  # as in a file of numpy.memmap whose program was interrupted
            raise UsageError(f"--data-path: {file}: its last {len(tail):,} bytes repeat; it was not written to its end")
        kind = LLM_C.get(int.from_bytes(start[:4], "little"))
        if start.startswith(b"\x93NUMPY"):
            tokens = np.load(file, mmap_mode="r")
        elif kind:
            tokens = np.memmap(file, kind, "r", offset=1024)
        elif why := _why_not_tokens(start):
            raise UsageError(f"--data-path: {file}: {why}, not uint16 tokens; numpy's astype('uint16').tofile() writes "
                             "them")
        else:
            tokens = np.memmap(file, np.uint16, "r")
    except (OSError, ValueError) as error:  # ValueError: the file is empty, or has an odd number of bytes
        raise UsageError(f"--data-path: {file}: {reason(error)}") from None
    if tokens.dtype.kind != "u" or tokens.ndim != 1:
        raise UsageError(f"--data-path: {file}: has {tokens.dtype} values of shape {tokens.shape}; tokens need one "
                         "dimension and an unsigned type, such as uint16")
    wanted = int.from_bytes(start[8:12], "little") if kind else len(tokens)
    if len(tokens) != wanted:
        raise UsageError(f"--data-path: {file}: incomplete: {len(tokens):,} tokens, and its header says {wanted:,}")
    return tokens


def _why_not_tokens(start: bytes) -> str | None:
    """Return what a file that starts with `start` contains instead of `uint16` tokens, or None."""
    if start.startswith((b"PK\3\4", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"PAR1", b"ARROW1")):
        return "a zip, gzip, zstd, Parquet or Arrow file"
    if start.isascii() and any(start[1::2]):
        return "text, or tokens of one byte"
    halves = np.frombuffer(start, np.uint16, len(start) // 2)
    for other, half in (halves[::2], halves[1::2]), (halves[1::2], halves[::2]):
        if len(half) and half.max() < 8 <= other.max():  # the upper halves of token numbers below 2**19
            return "numbers of 4 or 8 bytes"
    return None


def _documents(path: Path) -> list[bytes]:
    try:
        files = [path]
        if path.is_dir():
            visible = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
            files = [entry for entry in visible if entry.suffix.lower() == ".txt"]
            others = [entry.name for entry in visible if entry not in files]
            if others and is_main_process():
                print(f"{path}: not used, as it is no .txt file: {others[0]}, and {len(others) - 1} more")
        texts = {file.name: content for file in files if (content := _read_text(file))}  # without empty files
    except OSError as error:
        raise UsageError(f"--data-path: {error.filename or path}: {reason(error)}") from None
    if not files:
        raise UsageError(f"--data-path: {path}: the folder has no files that end in .txt")
    if not texts:
        raise UsageError(f"--data-path: {path}: no text; empty files: {', '.join(file.name for file in files[:8])}")
    if len(texts) > 1 and is_main_process():
        names, sizes, cut = list(texts), list(map(len, texts.values())), _cut(texts)
        print(f"{path}: training reads {cut} file(s) up to {names[cut - 1]} ({sum(sizes[:cut]):,} bytes), validation "
              f"{len(names) - cut} from {names[cut]} on ({sum(sizes[cut:]):,} bytes)")
    return list(texts.values())


def _read_text(file: Path) -> bytes:
    text = file.read_bytes().removeprefix(codecs.BOM_UTF8)  # not read_text(): it changes "\r\n"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--data-path: {file}: {reason(error)}") from None
    if b"\0" in text:
        raise UsageError(f"--data-path: {file}: has a zero byte at position {text.index(0):,}, as UTF-16 has; the text "
                         "must be UTF-8, in which zero bytes separate documents here")
    return text


def _cut(documents: Sized) -> int:
    """Return how many documents are for training; the last ones, one of 20, are for validation."""
    return len(documents) - max(1, len(documents) // 20)


def _split(documents: list[bytes]) -> tuple[bytes, bytes]:
    """Join documents, each followed by a zero byte; return the texts for training (95 %) and validation (5 %)."""
    if len(documents) == 1:
        cut = len(documents[0]) * 95 // 100
        documents = [documents[0][:cut], documents[0][cut:]]
    cut = _cut(documents)
    train, val = (b"".join(text + b"\0" for text in part) for part in (documents[:cut], documents[cut:]))
    return train, val
