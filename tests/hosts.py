"""Two hosts on this machine, for tests: a network namespace each, with a name and an address, on one bridge.

    with hosts.pair() as (first, second):
        subprocess.run([*first, "ping", "-c1", second.name])
        first.cut()

Needs root, and Debian's package iproute2.
"""
import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

NET = "10.97.0"


def missing():
    """Return what is missing to create the hosts, as one phrase, or "" if nothing is."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "the programs ip and unshare (Debian: iproute2, util-linux)"
    if os.geteuid():
        return "root, to make network namespaces"
    name = f"cook-try-{os.getpid()}"  # several processes of pytest-xdist ask at the same time
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if made.returncode == 0 else "the right to make network namespaces"


class Host:
    """A host; `command(...)` returns the command line that runs something on it."""

    def __init__(self, number):
        self.name, self.number, self.address = f"cook{number}", number, f"{NET}.{number}"

    def command(self, *parts):
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"',
                "sh", *map(str, parts)]

    def cut(self):
        """Cut this host's network link."""
        _ip("link", "set", f"cook-v{self.number}", "down")


def _ip(*parts):
    subprocess.run(["ip", *map(str, parts)], check=True)


@contextlib.contextmanager
def pair():
    """Create two hosts, cook1 and cook2, that know each other's names, and remove them at the end.

    Wait until no other process has such a pair.
    """
    both, lock = (Host(1), Host(2)), FileLock(f"{tempfile.gettempdir()}/cook-hosts.lock")
    lock.acquire()
    _remove(both)
    try:
        _ip("link", "add", "cook-bridge", "type", "bridge")
        _ip("link", "set", "cook-bridge", "up")
        for host in both:
            link = f"cook-v{host.number}"
            _ip("netns", "add", host.name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", link, "master", "cook-bridge", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
            folder = Path("/etc/netns", host.name)  # "ip netns exec" mounts the files here over those of /etc
            folder.mkdir(parents=True)
            names = "".join(f"{other.address} {other.name}\n" for other in both)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        yield both
    finally:
        _remove(both)
        lock.release()


def _remove(both):
    for host in both:
        subprocess.run(["ip", "link", "del", f"cook-v{host.number}"], capture_output=True)
        subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        shutil.rmtree(f"/etc/netns/{host.name}", ignore_errors=True)
    subprocess.run(["ip", "link", "del", "cook-bridge"], capture_output=True)
    with contextlib.suppress(OSError):
        Path("/etc/netns").rmdir()
