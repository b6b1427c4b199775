"""Resources that the processes of one machine share: the cores, and a dataset that one of them downloads."""
import collections
import gzip
import hashlib
import http.server
import json
import os
import struct
import threading
from types import SimpleNamespace

import pytest
from conftest import PROGRAMS, TORCHRUN
from live import Live


def idx_files():
    """Return a set of 64 and of 20 pictures in the files of MNIST: {name: bytes}."""
    files = {}
    for split, count in (("train", 64), ("t10k", 20)):
        pixels, labels = os.urandom(count * 28 * 28), bytes(number % 10 for number in range(count))
        files[f"{split}-images-idx3-ubyte.gz"] = gzip.compress(struct.pack(">4i", 0x803, count, 28, 28) + pixels)
        files[f"{split}-labels-idx1-ubyte.gz"] = gzip.compress(struct.pack(">2i", 0x801, count) + labels)
    return files


class Mirror(http.server.ThreadingHTTPServer):
    """Serves files and counts the downloads; the first one is held up until `go_on` is set, or a second one begins."""

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.downloads, self.go_on = files, collections.Counter(), threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.files[self.path[1:]])))
        self.end_headers()

    def do_GET(self):
        if self.headers["Method"] == "HEAD":  # so torchvision asks where the file is, and reads no further
            return self.do_HEAD()
        self.server.downloads[self.path[1:]] += 1
        if self.server.downloads.total() > 1:
            self.server.go_on.set()
        self.server.go_on.wait(60)
        self.do_HEAD()
        self.wfile.write(self.server.files[self.path[1:]])

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Start two processes on two cores and a set that is not there; return the downloads, and how many processes."""
    folder, files = tmp_path_factory.mktemp("machine"), idx_files()
    resources = [(name, hashlib.md5(content).hexdigest()) for name, content in files.items()]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    with Mirror(files) as mirror:
        with Live("taskset", "-c", cores, *TORCHRUN, "--nproc-per-node=2", PROGRAMS / "around.py", "mirror",
                  mirror.address, json.dumps(resources), "train_DDP.py", "--dataset", "fashion-mnist", "--data-path",
                  folder / "data", "--epochs", "1000", "--output-dir", folder, env={"no_proxy": "*"}) as live:
            live.wait_for("Lock .* not acquired|^epoch|rror")  # the other process is there, and waits or does not
            mirror.go_on.set()
            live.wait_for("^epoch +2/|rror")
            yield SimpleNamespace(downloads=mirror.downloads, processes=len(live.family()), said=live.said())
        mirror.shutdown()


def test_one_process_downloads_and_the_others_find_it_there(launched):
    assert list(launched.downloads.values()) == [1, 1, 1, 1], launched.downloads
    assert "epoch   2/1000" in launched.said


def test_no_more_processes_than_cores(launched):
    """There are a launcher and two training processes: with one core each, no core is left for a loader worker."""
    assert launched.processes == 3, launched.said
