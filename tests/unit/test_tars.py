"""Shards in a folder and on a server: reading returns what was written, and one line names an unusable file."""
import io
import json
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import loader_streaming
from common.errors import ProcessError, UsageError
from common.pairs import pairs, tars

PAIRS, PER_SHARD = 10, 4


@pytest.fixture
def shards(tmp_path):
    """A folder of three shards; the files of pair N hold N's name and side, N times 500."""
    listed = []
    for number in range(PAIRS):
        files = [tmp_path / side / f"{number}.v1.JPG" for side in ("img", "gt")]
        for file in files:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(f"{file.parent.name}{number} ".encode() * 500 * (number + 1))
        listed.append(tuple(str(file) for file in files))
    folder = tmp_path / "shards"
    assert tars.write_shards(listed, folder, "test", PER_SHARD) == 3
    return folder


def read(source, first=0, stop=PAIRS):
    found = tars.Shards(str(source), "test", ("img", "gt"), 1)
    return [tuple(content.split()[0].decode() for _, content in pair) for pair in found.read(found.shards, first, stop)]


def expected(first=0, stop=PAIRS):
    return [(f"img{number}", f"gt{number}") for number in range(first, stop)]


class Server(ThreadingHTTPServer):
    """Serves a folder. `faults` lists what happens to the next requests for tar files.

    A code, or half of the file: "lost", "chunk" (of a response without a length), "changed" (the next one is longer).
    """

    def __init__(self, folder):
        super().__init__(("localhost", 0), Handler)
        self.folder, self.ranges, self.faults, self.asked = folder, True, [], []
        self.url = f"http://localhost:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path, start = self.server.folder / self.path[1:], 0
        fault = self.server.faults.pop(0) if self.server.faults and path.suffix == ".tar" else None
        self.server.asked.append((path.name, self.headers["Range"]))
        if isinstance(fault, int) or not path.exists():
            return self.send_error(fault or 404)
        content = path.read_bytes()
        if fault == "changed":
            path.write_bytes(content + bytes(512))
        if self.server.ranges and self.headers["Range"]:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        if fault == "chunk":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(b"%x\r\n" % len(content) * (fault == "chunk"))
        self.wfile.write(content[start:(start + len(content)) // 2 if fault else None])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(shards, monkeypatch):
    """A server of the shards."""
    monkeypatch.setattr(tars, "PAUSES", (0, 0, 0))
    with Server(shards) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server
        server.shutdown()


def test_any_part_is_read_from_a_folder_and_from_a_server(shards, server):
    for first in range(PAIRS):
        for stop in range(first, PAIRS + 1):
            assert read(shards, first, stop) == expected(first, stop)
    assert read(server.url) == expected() and read(server.url, 3, 9) == expected(3, 9)


def test_a_list_may_name_shards_elsewhere(shards, server, tmp_path):
    """As lists do that `widsindex` wrote."""
    for base in (str(shards), server.url):
        content = json.loads((shards / LIST).read_text())
        for shard in content["shardlist"]:
            shard["url"] = f"{base}/{shard['url']}"
        (tmp_path / LIST).write_text(json.dumps(content))
        assert read(tmp_path) == expected()


def test_a_reader_opens_only_the_shards_of_its_part(server):
    assert read(server.url, 5, 8) == expected(5, 8)
    assert [name for name, _ in server.asked] == ["test.json", "test-000001.tar"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_lost_connection_is_continued_at_the_same_byte(server, ranges):
    server.ranges = ranges
    faults = ["lost", "lost", 503, "lost"] if ranges else ["lost", 503]
    server.faults += faults
    assert read(server.url) == expected()
    asked = [wanted for name, wanted in server.asked if name == "test-000000.tar"]
    assert len(asked) == len(faults) + 1 and asked[0] is None
    places = [int(wanted[6:-1]) for wanted in asked[1:]]
    assert places == sorted(places) and len(set(places)) == faults.count("lost")


def test_a_server_that_is_gone_ends_the_attempts(server):
    found = tars.Shards(server.url, "test", ("img", "gt"), 1)
    server.faults += [503] * 4
    with pytest.raises(ProcessError, match=rf"{server.url}/test-000000.tar: .*HTTP 503") as caught:
        list(found.read(found.shards, 0, 1))
    assert len(server.asked) == 5 and "\n" not in str(caught.value)
    (server.folder / "test-000002.tar").unlink()
    with pytest.raises(ProcessError, match=rf"{server.url}/test-000002.tar: .*HTTP 404"):
        read(server.url)
    assert len(server.asked) == 9, "a file that is not there will not come"
    server.shutdown()
    server.server_close()
    with pytest.raises(UsageError, match=rf"{server.url}/test.json: .*refused"):
        tars.Shards(server.url, "test", ("img", "gt"), 1)


@pytest.mark.parametrize(("faults", "said"), [
    (["changed"], "the file has changed: 51712 bytes, 51200 before"), (["chunk"] * 4, "IncompleteRead(")])
def test_what_arrives_only_in_part_is_named_in_a_short_line(server, faults, said):
    server.faults += faults
    with pytest.raises(ProcessError) as caught:
        read(server.url)
    message = str(caught.value)
    assert f"{server.url}/test-000000.tar: " in message and said in message and len(message) < 200, message


def add(path, name, content=b"more"):
    """Append a file to a shard, as if the shard had been written with it."""
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))


def cut(shard, size):
    shard.write_bytes(shard.read_bytes()[:size])


def third_file(shard):
    """Return the offset of the third pair in a shard."""
    with tarfile.open(shard) as archive:
        return archive.getmembers()[4].offset


SHARD, LIST = "test-000001.tar", "test.json"
WRONG_SETS = {  # case: (the file that is named, what spoils it, what is said)
    "no list": (LIST, lambda file: file.unlink(), "no such file"),
    "no json": (LIST, lambda file: file.write_text("{"), "list of shards"),
    "another list": (LIST, lambda file: file.write_text('{"shards": []}'), "shardlist"),
    "negative": (LIST, lambda file: file.write_text('{"shardlist": [{"url": "test-000001.tar", "nsamples": -4}]}'),
                 "nsamples of %s is -4; correct it"),
    "empty list": (LIST, lambda file: file.write_text('{"shardlist": []}'), "no pairs"),
    "missing": (SHARD, lambda file: file.unlink(), "no such file"),
    "shorter": (SHARD, lambda file: cut(file, -512), "bytes")}
DAMAGE = {  # of a shard whose size is not in the list, as in lists that others have written
    "cut between files": (SHARD, lambda file: cut(file, third_file(file)), "2 pairs, but its list says 4"),
    "cut in a file": (SHARD, lambda file: cut(file, 9000), "unexpected end"),
    "no tar": (SHARD, lambda file: file.write_bytes(b"text " * 1000), "tar"),
    "more pairs": (SHARD, lambda file: [add(file, f"more.{side}.jpg") for side in ("img", "gt")],
                   "5 pairs, but its list says 4"),
    "one side": (SHARD, lambda file: add(file, "more.img.jpg"), "more needs one file gt.*, but has img.jpg: --img-dir"),
    "two of a side": (SHARD, lambda file: add(file, "00000007-7_v1.img.png"), "00000007-7_v1 needs one file img")}


def spoil(folder, case):
    """Damage a set; return the file that the error must name, and the expected text."""
    if case in DAMAGE:
        content = json.loads((folder / LIST).read_text())
        del content["shardlist"][1]["filesize"]
        content["shardlist"][1]["nsamples"] += case == "one side"
        (folder / LIST).write_text(json.dumps(content))
    name, change, said = (WRONG_SETS | DAMAGE)[case]
    change(folder / name)
    return folder / name, said.replace("%s", str(folder / SHARD))


@pytest.mark.parametrize("case", WRONG_SETS | DAMAGE)
def test_a_set_that_cannot_be_used_is_named_in_one_line(shards, case):
    file, said = spoil(shards, case)
    with pytest.raises(UsageError if case in WRONG_SETS else ProcessError) as caught:
        read(shards)
    message = str(caught.value)
    assert str(file) in message and said in message.lower() and "\n" not in message, message


class Undecoded(loader_streaming.Stream):
    """A dataset whose files are not images."""

    def _read(self, index):
        self.held.pop(index)
        return torch.zeros(2, 3, 1, 1)


def test_an_epoch_does_not_end_well_with_more_pairs_than_listed(shards):
    """The reader requests no pair after the last, so the last pair must wait for the end of the shard."""
    shard, _ = spoil(shards, "more pairs")
    found = tars.Shards(str(shards), "test", ("img", "gt"), 3)
    stream = Undecoded(found, pairs.Cuts(0, 1, 0, train=False), range(2 * PER_SHARD), 2)
    stream.ring = pairs.Ring(0, 2, 1)
    assert not stream.ring.slots.is_shared()  # without workers, it needs no shared memory
    with pytest.raises(ProcessError, match=f"{shard}: has 5 pairs, but its list says 4"):
        list(stream)


def test_the_buffer_shuffles_pairs_and_releases_none_before_it_is_read():
    orders = [loader_streaming.buffered(range(100), 10, seed) for seed in ("a", "a", "b")]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(order) == list(range(100))
        assert all(order.index(place) >= place - 10 for place in range(100))
        assert sum(order[place] < place for place in range(100)) > 20
    assert loader_streaming.buffered(range(5), 1, "a") == loader_streaming.buffered(range(5), 1, "b") == [*range(5)]


def test_each_epoch_shuffles_the_shards_and_the_pairs(shards):
    """Every reader has the same order of shards, regardless of its part."""
    found = tars.Shards(str(shards), "test", ("img", "gt"), 3)
    cuts = pairs.Cuts(0, 1, 0, train=True)
    parts = [loader_streaming.Stream(found, cuts, part, 1) for part in (range(5), range(5, 10))]
    plans = [[part._plan(epoch, 0) for epoch in range(1, 7)] for part in parts]
    shown = [[url for url, _ in shards] for shards, _ in plans[0]]
    assert shown == [[url for url, _ in shards] for shards, _ in plans[1]]
    assert len({tuple(urls) for urls in shown}) > 2
    for part, plan in zip(parts, plans, strict=True):
        assert all(sorted(order) == list(part.share) for _, order in plan)
        assert len({tuple(order) for _, order in plan}) > 2


def test_a_list_appears_only_when_its_shards_are_complete(shards, tmp_path):
    with pytest.raises(FileNotFoundError):
        tars.write_shards([(str(tmp_path / "img" / "0.v1.JPG"), "nowhere.jpg")], shards, "test", 1)
    with pytest.raises(UsageError, match="test.json"):
        read(shards)
