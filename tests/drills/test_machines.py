"""check.py names faults on two hosts: blocked ports, bad folders, and stopped or missing ranks."""
import contextlib
import datetime
import json
import os
import signal
import socket
from pathlib import Path

import hosts
import pytest
from conftest import PYTHON, TORCHRUN, free_port, good, run
from live import Live
from test_check import by_hand, names

on_hosts = pytest.mark.skipif(bool(hosts.missing()), reason=f"needs {hosts.missing()}")
CHECK = [PYTHON, "check.py", "--cpu", "--json"]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount file systems")
PORT = 29512  # on hosts that nobody else uses


@pytest.fixture
def both():
    with hosts.pair() as both:
        yield both


def report(live, code, seconds=200):
    """Wait for a rank to end, and return its report."""
    assert live.end(seconds) == code, live.said()
    return json.loads(live.out[-1])


def texts(said, name):
    return " ".join(each["text"] for each in said["findings"] if each["name"] == name)


@contextlib.contextmanager
def ranks(world, *options, port=None, without=()):
    """Start ranks by hand, all on this machine."""
    port = port or free_port()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Live(*CHECK, *options, env=by_hand(rank, world, port)))
               for rank in range(world) if rank not in without]


def wait_until_there(port, rank):
    """Wait until a rank has registered in rank 0's store."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", port, wait_for_workers=False, timeout=datetime.timedelta(seconds=200))
    store.wait([f"check.py/facts/{rank}"])


def mounted(folder, size, command):
    """Return a command that runs with a separate, empty file system mounted on a folder."""
    return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} none {folder} && exec "$@"', "sh",
            *map(str, command)]


def on_host(host, rank, *options):
    return Live(*host.command(*CHECK, *options), env=by_hand(rank, 2, PORT, "cook1"))


@on_hosts
def test_two_hosts(both, tmp_path):
    command = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=cook1:{PORT}",
               "--rdzv-id=check", *CHECK[1:], "--folder", tmp_path]
    with Live(*both[0].command(*command)) as first, Live(*both[1].command(*command)) as second:
        assert first.end(200) == second.end(60) == 0, first.said() + second.said()
        said = json.loads((first.out + second.out)[-1])
    assert {facts["host"] for facts in said["ranks"]} == {"cook1", "cook2"}
    assert {tuple(facts["peer"][1:3]) for facts in said["ranks"]} == {("eth0", host.address) for host in both}


@pytest.mark.nightly
@on_hosts
def test_a_blocked_port_is_named(both):
    """cook1 receives messages at rank 0's port, but its answers are lost, as behind a firewall."""
    good(run(*both[0].command("ip", "rule", "add", "pref", "1", "ipproto", "tcp", "sport", PORT, "blackhole")))
    with on_host(both[0], 0, "--limit", "60") as first, on_host(both[1], 1, "--limit", "8") as second:
        second.wait_for('^{"stage"', 200)
        said = json.loads(second.out[-1])
        assert names(said) == ["port"] and "rank 1 on cook2 cannot reach cook1" in said["findings"][0]["text"]
        assert "timed out" in said["findings"][0]["text"]
        said = report(first, 1)
        assert names(said)[0] == "missing" and "rank 1" in texts(said, "missing")
        assert second.end(60) == 1


@on_hosts
def test_hosts_whose_other_ports_are_blocked_are_named(both):
    """The store is reachable, but gloo's ports are not, so check.py does not create the group."""
    rule = "ip rule add pref 1 ipproto tcp sport 32768-60999 blackhole"
    good(run(*both[0].command(*rule.split())))
    with on_host(both[0], 0, "--limit", "60") as first, on_host(both[1], 1, "--limit", "60") as second:
        said = report(first, 1)
        assert names(said)[0] == "pairs" and "group" not in " ".join(first.err)
        assert "rank 1 on cook2: cannot reach rank 0 on cook1 at 10.97.0.1" in texts(said, "pairs")
        assert second.end(60) == 1


@on_hosts
def test_a_name_that_leads_nowhere_else_is_named(both):
    """As in Debian's /etc/hosts, the host's name is a loopback address, which gloo sends to the other hosts."""
    for host in both:
        names_here = Path(f"/etc/netns/{host.name}/hosts")
        names_here.write_text(names_here.read_text().replace(f"{host.address} {host.name}", f"127.0.1.1 {host.name}"))
    with Live(*both[0].command(*CHECK), env=by_hand(0, 2, PORT, both[0].address)) as first, \
            Live(*both[1].command(*CHECK), env=by_hand(1, 2, PORT, both[0].address)) as second:
        said = report(first, 1)
        assert names(said)[0] == "pairs" and "127.0.1.1" in texts(said, "pairs")
        assert second.end(60) == 1


@pytest.mark.parametrize(("stopped", "limit", "name"), [
    pytest.param(1, "40", "silent", marks=pytest.mark.nightly), (0, "5", "store")])
def test_a_stopped_rank_is_named(stopped, limit, name):
    """The last rank connects when another one is stopped; of rank 0, the kernel still accepts connections."""
    port, last = free_port(), stopped + 1
    with ranks(last + 1, "--limit", "40", port=port, without=[last]) as early:
        wait_until_there(port, stopped)
        os.kill(early[stopped].process.pid, signal.SIGSTOP)
        with ranks(last + 1, "--limit", limit, port=port, without=range(last)) as (late,):
            said = report(early[0] if stopped else late, 1)
            assert late.end(60) == 1
    assert names(said)[0] == name and texts(said, name).startswith("rank 1")


def test_a_slow_rank_is_named():
    """After the start, rank 1 is paused for four fifths of the time."""
    with ranks(2, "--limit", "60") as (first, second):
        first.wait_for(" folder| group", 200)
        pid = second.process.pid
        cycle = f"while kill -STOP {pid} && sleep 0.2 && kill -CONT {pid}; do sleep 0.05; done"
        with Live("sh", "-c", cycle):
            first.wait_for(" bandwidth", 200)
        os.kill(pid, signal.SIGCONT)
        said = report(first, 0)
        assert second.end(60) == 0
    assert "rank 1 on" in texts(said, "slow-rank"), said["findings"]


@AS_ROOT
@pytest.mark.parametrize(("size", "name"), [("200m", "not-shared"), ("1m", "disk-full")])
def test_a_folder_that_is_not_shared_or_full(tmp_path, size, name):
    """Rank 1 has a separate file system in the folder, which is full after 1 MiB."""
    port = free_port()
    command = [*CHECK, "--folder", tmp_path, "--limit", "60"]
    with Live(*command, env=by_hand(0, 2, port)) as first, \
            Live(*mounted(tmp_path, size, command), env=by_hand(1, 2, port)) as second:
        said = report(first, 1)
        assert second.end(60) == 1
    assert names(said)[0] == name and texts(said, name).startswith("rank 1 on")


def test_a_folder_that_is_not_there(tmp_path):
    result = run(*CHECK, "--folder", tmp_path / "none")
    said = json.loads(result.out)
    assert result.code == 1 and names(said)[0] == "folder" and "No such file" in texts(said, "folder")


@AS_ROOT
def test_little_shared_memory_and_few_open_files():
    limited = ["prlimit", "--nofile=200", *CHECK]
    result = run(*mounted("/dev/shm", "1m", limited))
    said = json.loads(result.out)
    assert result.code == 1 and {"shm", "open-files"} <= {*names(said)}
    assert "/dev/shm has 1 MiB" in texts(said, "shm") and "only 200 open files" in texts(said, "open-files")


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        result = run(*CHECK, env=by_hand(0, 2, server.getsockname()[1]))
    assert result.code == 1 and names(json.loads(result.out)) == ["port-in-use"]
