"""A failure ends the launch at once and shows its cause, also where destroying the group would wait for the others."""
import os
import shutil
import signal
import subprocess
import time

import pytest
from conftest import PYTHON, ROOT, TORCHRUN, copy_out, descendants, epochs, good, run
from live import Live, alive, ours

SECONDS = 15  # from the cause to the end of all processes
MISTAKE = '''
        indices = torch.as_tensor(indices)
        if get_rank() == 1 and int(self.epoch) == 2:
            torch.stack([torch.zeros(3), torch.zeros(4)])
'''


def around(folder, script, *arguments):
    """Return the command of a launch of two processes whose destroy_process_group waits for both."""
    (folder / "left").mkdir()
    return [*TORCHRUN, "--nproc-per-node=2", ROOT / "tests/waiting_destroy.py", folder / "left", script, *arguments,
            "--output-dir", folder / "out"]


@pytest.mark.drill
def test_a_good_run_destroys_the_group(tmp_path):
    good(run(*around(tmp_path, "train_DDP.py", "--epochs", "1", "--batch-size", "718")))
    assert {path.name for path in (tmp_path / "left").iterdir()} == {"0", "1"}


def test_a_process_that_fails_does_not_wait_for_the_others(photos, tmp_path):
    """A picture that one process cannot read: it says so and is gone; the other waits in an all-reduce for it."""
    data = tmp_path / "data"
    for split in ("train", "val"):
        shutil.copytree(photos, data / split)
    (data / "train/ash/07.jpg").write_bytes(b"")
    command = around(tmp_path, "train_DDP.py", "--dataset", "folder", "--data-path", data, "--batch-size", "4",
                     "--workers", "0")
    with Live(*command) as live:
        line = live.wait_for("error: rank .* cannot be read")
        start = time.monotonic()
        assert live.end(SECONDS) == 1
        assert time.monotonic() - start < SECONDS and ours(live.err)[0] == line


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.drill)])
def test_a_mistake_of_ones_own_keeps_its_traceback(tmp_path, workers):
    """Tensors of different sizes in a dataset, as a user brings one: not "out of memory", and nothing waits."""
    script = copy_out("train_DDP.py", tmp_path / "mine")
    data = script.parent / "common/datasets.py"
    text = data.read_text()
    data.write_text(text.replace("\n        indices = torch.as_tensor(indices)\n", MISTAKE, 1)
                    .replace("import is_main_process", "import get_rank, is_main_process"))
    with Live(*around(tmp_path, script, "--workers", workers, "--epochs", "1000")) as live:
        live.wait_for("^epoch +1/")
        live.wait_for("stack expects each tensor to be equal size")
        start = time.monotonic()
        assert live.end(SECONDS) == 1
        assert time.monotonic() - start < SECONDS
    said = "\n".join(live.err)
    assert "Traceback" in said and "datasets.py" in said and "in __getitems__" in said, said
    assert "out of memory" not in said and len(epochs("\n".join(live.out))) == 1


@pytest.mark.drill
def test_ctrl_c_does_not_wait_for_the_others(tmp_path):
    """One process alone is interrupted, in the middle of training."""
    with Live(*around(tmp_path, "train_DDP.py", "--epochs", "1000")) as live:
        live.wait_for("^epoch +1/")
        victim = next(pid for pid in live.family()
                      if "\0RANK=1\0" in open(f"/proc/{pid}/environ").read() and "waiting" in
                      open(f"/proc/{pid}/cmdline").read())
        os.kill(victim, signal.SIGINT)
        start = time.monotonic()
        assert live.end(SECONDS) == 1
        assert time.monotonic() - start < SECONDS


LOADING = """
import multiprocessing, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from torch.utils.data import DataLoader
from common.datasets import loader_options

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    options = loader_options(2, torch.device("cpu"), Slow()) | {"multiprocessing_context": sys.argv[2]}
    for batch in DataLoader(Slow(), 1, **options):
        print("reading", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("method", ["forkserver", *(pytest.param(name, marks=pytest.mark.drill)
                                                    for name in ("fork", "spawn"))])
def test_a_loaders_workers_end_with_a_killed_process(tmp_path, method):
    """Also under forkserver, Python 3.14's default on Linux, where their parent is the server."""
    (tmp_path / "loading.py").write_text(LOADING)
    process = subprocess.Popen([PYTHON, tmp_path / "loading.py", ROOT, method], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "reading\n"
    family = descendants(process.pid)
    assert len(family) >= 3
    process.kill()
    process.wait()
    end = time.monotonic() + 30
    while any(map(alive, family)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in family if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


SHARED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from common import launch, reduce
os.environ.update(launch.launch_environment())
shared = reduce.devices_are_shared(sys.argv[2].format(os.environ["RANK"]))
dist.init_process_group("gloo")
assert reduce.agree(shared) and not reduce.agree(dist.get_rank())
dist.destroy_process_group()
print("shared" if shared else "apart", flush=True)
"""


@pytest.mark.parametrize(("identity", "found"), [("GPU-1", "shared"), pytest.param("GPU-{}", "apart",
                                                                                   marks=pytest.mark.drill)])
def test_processes_find_out_that_they_share_a_device(tmp_path, identity, found):
    """Before there is a group, through the store that the group then uses too; as on a laptop with one GPU."""
    (tmp_path / "shared.py").write_text(SHARED)
    said = good(run(*TORCHRUN, "--nproc-per-node=2", tmp_path / "shared.py", ROOT, identity)).out
    assert [said.count(word) for word in ("shared", "apart")] == [2 * (found == word) for word in ("shared", "apart")]


@pytest.mark.drill
def test_processes_that_srun_started_share_a_device(tmp_path):
    """Rank 0 serves the store itself there, and the group finds it again at the same port."""
    from concurrent.futures import ThreadPoolExecutor
    from socket import create_server

    (tmp_path / "shared.py").write_text(SHARED)
    with create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ThreadPoolExecutor(2) as pool:
        runs = pool.map(lambda rank: run(PYTHON, tmp_path / "shared.py", ROOT, "GPU-1",
                                         env=shared | {"RANK": rank, "LOCAL_RANK": rank}), "01")
        assert [good(one).out.count("shared") for one in runs] == [1, 1]  # torch 2.9's gloo prints lines of its own
