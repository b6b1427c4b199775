"""launch/hosts.sh on two hosts, here two network namespaces, without a scheduler and with links that can be cut."""
import os
import re
import signal
import time

import hosts
import pytest
from conftest import PYTHON, TORCHRUN, distance, good, load, run, same
from live import Live, ours

pytestmark = pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")
ONE_EACH = {"PROCESSES_PER_HOST": "1", "PATH": f"{os.path.dirname(PYTHON)}:{os.environ['PATH']}"}
ARGUMENTS = ["--batch-size", "96", "--lr", "1e-5", "--epochs", "4", "--save-every", "2"]
LONG = [*ARGUMENTS, "--epochs", "24"]  # at night, while a host joins and leaves


@pytest.fixture
def both():
    with hosts.pair() as both:
        yield both


def reference(folder, arguments):
    """Return the last checkpoint of an uninterrupted run of two processes on this machine."""
    good(run(*TORCHRUN, "--nproc-per-node=2", "train_DDP.py", *arguments, "--output-dir", folder))
    assert distance(folder / "epoch-002.pt", folder / "last.pt") > 1e-4  # it did train
    return folder / "last.pt"


def start(host, nodes, *command, **settings):
    """Start launch/hosts.sh on a host with one of this machine's cores, as each of the two reference processes has."""
    cores = sorted(os.sched_getaffinity(0))
    core = str(cores[host.number % len(cores)])
    return Live(*host.command("taskset", "-c", core, "bash", "launch/hosts.sh", nodes, "cook1", *command),
                env=ONE_EACH | settings)


def test_a_killed_process_is_started_again_and_nothing_is_lost(both, tmp_path):
    """After kill -9 within an epoch, on the host that is not the master, the final weights are bit-identical."""
    command = [2, "train_elastic.py", *ARGUMENTS, "--resume", "auto", "--snapshot-every", "5", "--output-dir",
               tmp_path / "out"]
    with start(both[0], *command, MAX_RESTARTS="3") as first, start(both[1], *command, MAX_RESTARTS="3") as second:
        first.wait_for("^epoch +1/")
        os.kill(second.ranks()[1], signal.SIGKILL)
        first.wait_for("^resume ")
        assert first.end(180) == 0 and second.end(60) == 0, first.said() + second.said()
    assert same(load(reference(tmp_path / "whole", ARGUMENTS)), load(tmp_path / "out/last.pt"))


@pytest.mark.nightly
def test_a_host_joins_and_leaves(both, tmp_path):
    """One host starts, a second joins and is then terminated: the weights equal those of an uninterrupted run."""
    command = ["1:2", "train_elastic.py", *LONG, "--resume", "auto", "--output-dir", tmp_path / "out"]
    with start(both[0], *command, MAX_RESTARTS="9") as first:
        first.wait_for("1 process.*x 96")
        with start(both[1], *command, MAX_RESTARTS="9") as second:
            first.wait_for("2 process.*x 48")
            done = [line for line in first.out if line.startswith("resume")][-1]
            epoch = int(re.search(r"epoch (\d+)", done)[1])
            first.wait_for(f"^epoch +{epoch + 2}/")
            second.process.terminate()
            second.end(40)
        assert first.end(300) == 0, first.said()
    assert len([line for line in first.out if "1 process" in line]) == 2  # alone, together, alone
    last = tmp_path / "out/last.pt"
    assert load(last)["epoch"] == 24 and distance(reference(tmp_path / "whole", LONG), last) < 1e-5


def test_a_cut_link_ends_both_hosts_in_time(both, tmp_path):
    """Both processes say after --timeout (default: ten minutes) at which line they were; nothing hangs on.

    torchrun itself, on the host without the meeting point, may wait for it for minutes; the training processes do not.
    """
    command = ["train_DDP.py", *ARGUMENTS, "--epochs", "1000", "--output-dir", tmp_path, "--timeout", "8"]
    with start(both[0], 2, *command) as first, start(both[1], 2, *command) as second:
        first.wait_for("^epoch +2/")
        both[1].cut()
        said = [live.wait_for(r"train_DDP.py: error: rank \d: line", 60) for live in (first, second)]
        for rank, line in enumerate(said):
            assert re.search(rf"rank {rank}: line \d+: lost the other processes", line), line
            assert "network" in line and "--timeout" in line
        for live in (first, second):
            assert len(ours(live.err)) == 1
        end = time.monotonic() + 60
        while (left := [first.ranks(), second.ranks()]) != [{}, {}] and time.monotonic() < end:
            time.sleep(0.1)
        assert left == [{}, {}]
    kept = load(tmp_path / "last.pt")
    assert kept["epoch"] >= 2
