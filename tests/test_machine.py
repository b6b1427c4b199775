"""Resources that the processes of one machine share: the cores, and a dataset that one of them downloads."""
import collections
import functools
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

pytestmark = pytest.mark.drill


class Mirror(http.server.ThreadingHTTPServer):
    """Serves a folder and counts the downloads; the first one waits until `go_on` is set, or a second one begins."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=folder))
        self.downloads, self.go_on = collections.Counter(), threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.headers["Method"] == "HEAD":  # so torchvision asks where the file is, and reads no further
            return self.do_HEAD()
        self.server.downloads[self.path[1:]] += 1
        if self.server.downloads.total() > 1:
            self.server.go_on.set()
        self.server.go_on.wait(60)
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Start two processes on two cores and a set that is not there; return the downloads, and how many processes."""
    folder, served, resources = tmp_path_factory.mktemp("machine"), tmp_path_factory.mktemp("mirror"), []
    for split, count in (("train", 64), ("t10k", 20)):  # pictures, in the files of MNIST
        pixels, labels = os.urandom(count * 28 * 28), bytes(number % 10 for number in range(count))
        for name, content in ((f"{split}-images-idx3-ubyte.gz", struct.pack(">4i", 0x803, count, 28, 28) + pixels),
                              (f"{split}-labels-idx1-ubyte.gz", struct.pack(">2i", 0x801, count) + labels)):
            (served / name).write_bytes(gzip.compress(content))
            resources.append((name, hashlib.md5((served / name).read_bytes()).hexdigest()))
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    with Mirror(served) as mirror:
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
