"""Tar shards of pairs in WebDataset's format, for loader_streaming.py: write them, find them, and read them.

    python -m common.pairs.tars --data-source DATA --split train --output SHARDS

A set is SHARDS/SPLIT-000000.tar, SHARDS/SPLIT-000001.tar, ... and SHARDS/SPLIT.json, which lists the shards with their
numbers of pairs. In a shard, a pair is two consecutive files: KEY.img.jpg and KEY.gt.jpg, or with another extension.
"""
import http.client
import io
import json
import os
import posixpath
import random
import tarfile
import time
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from .. import cli
from ..errors import ProcessError, RunError, UsageError, reason
from . import pairs

SAMPLES = Path("data", "shards")  # the default set
KIND = "wids-shard-index-v1"  # the format of SPLIT.json, which other readers of WebDataset's shards know
PAUSES = (0, 1, 2, 4, 8, 16)  # seconds before each new attempt to reach a server
TIMEOUT = 60  # seconds without data after which an attempt fails
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # HTTP codes after which a new attempt can succeed


class Shards:
    """The shards of a split, in a folder or below an http(s) URL; the length is the number of pairs.

    `names` are those of the two files of a pair, such as ("img", "gt"), and `buffer` is the size of the shuffle buffer,
    in pairs. `shards` lists (URL, number of pairs). The default `data_source` is a sample set, which the first call
    creates. Raises UsageError, naming the file, if the list or a shard in the folder is missing or does not fit.
    """

    def __init__(self, data_source: str | None, split: str, names: Sequence[str], buffer: int) -> None:
        _library()
        self.names, self.buffer, self.shards = names, buffer, list[tuple[str, int]]()
        if data_source is None:
            pairs.create_once(SAMPLES, _make_samples)
            data_source = str(SAMPLES)
        index = f"{data_source}/{split}.json"
        try:
            with _open(index) as stream:
                listed = [(url if "://" in (url := entry["url"]) else posixpath.join(data_source, url),
                           int(entry["nsamples"]), entry.get("filesize")) for entry in json.load(stream)["shardlist"]]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{index}: cannot be read as a list of shards ({_reason(error)}); "
                             f"python -m {__name__} --split {split} writes shards and their list") from None
        for url, size, length in listed:
            self.shards.append((url, size))
            if size < 0:
                raise UsageError(f"{index}: nsamples of {url} is {size}; correct it")
            if "://" in url:
                continue  # a request for each of thousands of shards would take too long: check when reading
            if not os.path.isfile(url):
                raise UsageError(f"{url}: {index} lists it, but there is no such file")
            if length not in (None, os.path.getsize(url)):
                raise UsageError(f"{url}: has {os.path.getsize(url)} bytes, but {index} says {length}; copy it again")
        if not len(self):
            raise UsageError(f"{index}: lists no pairs")

    def __len__(self) -> int:
        return sum(size for _, size in self.shards)

    def read(self, shards: Sequence[tuple[str, int]], first: int, stop: int) -> Iterator[list[tuple[str, bytes]]]:
        """Yield the pairs `first` to `stop - 1` as two files (name, content); raise ProcessError for a bad shard."""
        for url, size in shards:
            begin, end = max(first, 0), min(stop, size)
            first, stop = first - size, stop - size
            if begin >= end:
                continue
            count, pair = 0, None
            for sample in _samples(url):
                if count < end:  # yield the last pair after the check below, which would not run otherwise
                    if pair:
                        yield pair
                    pair = [_file(url, sample, name) for name in self.names] if begin <= count else None
                count += 1
                if count == end < size:  # the rest is for another reader
                    break
            if count != end:  # a tar file that was cut off between two files looks complete
                raise ProcessError(f"{url}: has {count} pairs, but its list says {size}; copy it again")
            if pair:
                yield pair


def write_shards(pair_list: Sequence[tuple[str, str]], folder: Path, split: str, count: int) -> int:
    """Write pairs of files to shards of `count` pairs, then the list of shards; return the number of shards."""
    library = _library()
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / f"{split}.json"
    index.unlink(missing_ok=True)  # written last: if the list exists, the shards are complete
    order = list(range(len(pair_list)))
    if split == "train":
        random.Random(0).shuffle(order)  # a reader's buffer mixes only pairs that are close together
    listed: list[dict[str, object]] = []
    for first in range(0, len(order), count):
        path, numbers = folder / f"{split}-{len(listed):06}.tar", order[first:first + count]
        with library.TarWriter(str(path), encoder=False, mtime=0, format="PAX_FORMAT") as writer:
            for number in numbers:
                files = [Path(file) for file in pair_list[number]]
                key = f"{number:08}-{files[0].stem.replace('.', '_')}"  # in WebDataset, the key ends at the first dot
                sides = {f"{side}{file.suffix}": file.read_bytes() for side, file in zip(("img", "gt"), files)}
                writer.write({"__key__": key, **sides})
        listed.append({"url": path.name, "nsamples": len(numbers), "filesize": path.stat().st_size})
    index.write_text(json.dumps({"__kind__": KIND, "wids_version": 1, "shardlist": listed}, indent=1) + "\n")
    return len(listed)


def _file(url: str, sample: dict[str, Any], name: str) -> tuple[str, bytes]:
    found = [file for file in sample if file.startswith(f"{name}.")]
    if len(found) != 1:
        have = " ".join(file for file in sample if not file.startswith("__"))
        raise ProcessError(f"{url}: the pair {sample['__key__']} needs one file {name}.*, but has {have}: "
                           "--img-dir and --gt-dir name the two")
    return f"{url}: {sample['__key__']}.{found[0]}", sample[found[0]]


def _library() -> Any:
    try:
        import webdataset
    except ImportError as error:
        raise UsageError(f"no webdataset ({error}): pip install -r requirements/streaming.txt") from None
    return webdataset


def _samples(url: str) -> Iterator[dict]:
    try:
        with _open(url) as stream:
            library = _library().tariterators
            yield from library.group_by_keys(library.tar_file_expander([{"url": url, "stream": stream}]))
    except (OSError, http.client.HTTPException, tarfile.TarError, zlib.error, EOFError, ValueError) as error:
        raise ProcessError(f"{url}: cannot be read as a tar file ({_reason(error)})") from None


def _open(url: str) -> IO[bytes]:
    return io.BufferedReader(_Download(url), 1 << 20) if "://" in url else open(url, "rb")


def _reason(error: Exception) -> str:
    # webdataset appends the stream and more arguments; the errors of http.client contain the data that it read
    first = str(error.args[0] if error.args and not isinstance(error, http.client.HTTPException) else error)
    return getattr(error, "strerror", None) or first.split(" @ <")[0] or type(error).__name__


class _Download(io.RawIOBase):
    """A file on a server, as a stream. If the connection drops, the download resumes at the same byte."""

    def __init__(self, url: str) -> None:
        self.url, self.at, self.size = url, 0, 0
        self.response: http.client.HTTPResponse | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        pauses = iter(PAUSES)
        while True:
            try:
                self.response = self.response or self._connect()
                count = self.response.readinto(buffer)
                if not count and self.at < self.size:
                    raise ConnectionError(0, f"the connection ended after {self.at} of {self.size} bytes")
                self.at += count
                return count
            except (OSError, http.client.HTTPException) as error:
                code, pause = getattr(error, "code", None), next(pauses, None)
                if pause is None or code and code not in TRANSIENT:
                    why = f"HTTP {code}" if code else getattr(error, "reason", None) or _reason(error)
                    raise ConnectionError(0, str(why)) from None
                self.response = None
                time.sleep(pause)

    def _connect(self) -> http.client.HTTPResponse:
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={self.at}-"} if self.at else {})
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
        skip = 0 if response.status == 206 else self.at  # 206: the server sends only the requested range
        if length := int(response.headers["Content-Length"] or 0):
            size = length + self.at - skip
            if self.at and self.size not in (0, size):
                raise ConnectionError(0, f"the file has changed: {size} bytes, {self.size} before")
            self.size = size
        while skip and (part := response.read(min(skip, 1 << 20))):
            skip -= len(part)
        return response


def _make_samples(folder: Path) -> None:
    for split in ("train", "test"):
        write_shards(pairs.find_pairs(None, split, "img", "gt"), folder, split, 5)


def main() -> None:
    parser = cli.ArgumentParser(__doc__ or "")
    parser.add_argument("--data-source", metavar="DATA", help="folder of the pairs (default: a sample set)")
    parser.add_argument("--split", default="train", help="the folder in DATA, and the name of the shards")
    parser.add_argument("--img-dir", default="img", help="folder of input images in the split")
    parser.add_argument("--gt-dir", default="gt", help="the folder of target images")
    parser.add_argument("--output", metavar="SHARDS", required=True, help="folder for the shards and their list")
    parser.add_argument("--pairs-per-shard", type=cli.positive_int, default=500, help="aim for 0.1 to 1 GB per shard")
    args = parser.parse_args()
    found = pairs.find_pairs(args.data_source, args.split, args.img_dir, args.gt_dir)
    try:
        count = write_shards(found, Path(args.output), args.split, args.pairs_per_shard)
    except OSError as error:
        raise RunError(f"{error.filename or args.output}: {reason(error)}") from None
    print(f"{args.output}: {len(found)} pairs of {args.split} in {count} shards")


if __name__ == "__main__":
    with cli.report_errors():
        main()
