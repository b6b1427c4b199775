"""A Slurm cluster of two nodes on this machine, for tests: no systemd, all files in one folder.

    with slurm.cluster() as environment:
        subprocess.run(["srun", "-N2", "-n2", "hostname"], env=environment)

Needs root, and Debian's packages slurm-wlm and munge. Both nodes share this machine's network; each slurmd has a port
of its own, which Debian's build of Slurm allows.
"""
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scontrol")
PATH = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}:/usr/sbin:/sbin"  # the batch files say "python"
TAG = "# slurm test nodes"


def missing():
    """Return what is missing to start a cluster, as one phrase, or "" if nothing is."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if absent:
        return f"the programs {', '.join(absent)} (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "root, to start the daemons"


def _free_ports(number):
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(number)]


@contextlib.contextmanager
def cluster(cores=4):
    """Start munged, slurmctld and two slurmd; yield the environment for srun and sbatch; end them.

    Each node claims `cores`, and task/affinity binds each task to its own. Where the machine has fewer, tasks share
    cores, and a task for which Slurm itself chooses more cores than the machine has cannot start.
    """
    temporary = tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)
    folder = Path(temporary.name)
    folder.chmod(0o755)  # munge wants a socket that everybody can reach
    host = socket.gethostname().split(".")[0]
    controller, first, second = _free_ports(3)
    for name in ("state", "munge"):
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o700)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    settings = {
        "ClusterName": "test", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmctldPort": controller,
        "SlurmUser": "root", "SlurmdUser": "root", "AuthType": "auth/munge", "AuthInfo": f"socket={folder}/munge.sock",
        "StateSaveLocation": f"{folder}/state", "SlurmdSpoolDir": f"{folder}/spool.%n",
        "SlurmctldPidFile": f"{folder}/slurmctld.pid", "SlurmdPidFile": f"{folder}/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/slurmctld.log", "SlurmdLogFile": f"{folder}/slurmd.%n.log",
        # what needs no cgroups, MPI or accounting
        "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/affinity", "MpiDefault": "none",
        "JobAcctGatherType": "jobacct_gather/none", "AccountingStorageType": "accounting_storage/none",
        "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",  # more cores than the machine has
        "ReturnToService": 2, "KillWait": 5}
    nodes = "".join(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} RealMemory=2000\n"
                    for name, port in (("cook1", first), ("cook2", second)))
    (folder / "slurm.conf").write_text("".join(f"{name}={value}\n" for name, value in settings.items()) + nodes +
                                       "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def start(*command):
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    hosts = Path("/etc/hosts")
    with open(hosts, "a") as file:  # MASTER_ADDR is a node's name
        file.write(f"127.0.0.1 cook1 cook2 {TAG}\n")
    try:
        start("munged", f"--key-file={key}", f"--socket={folder}/munge.sock", f"--pid-file={folder}/munge.pid",
              f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed")
        start("slurmctld")
        start("slurmd", "-N", "cook1")
        start("slurmd", "-N", "cook2")
        end = time.monotonic() + 60
        while subprocess.run(["srun", "-Q", "-N2", "-n2", "--immediate=2", "true"], env=environment,
                             capture_output=True).returncode:
            if time.monotonic() > end:
                raise TimeoutError("waited 60 s for the nodes to answer")
            time.sleep(0.2)
        yield environment
    finally:
        subprocess.run(["scancel", "--full", "-u", "root"], env=environment, capture_output=True)
        for pid_file in (*folder.glob("slurmd.*.pid"), folder / "slurmctld.pid", folder / "munge.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(pid_file.read_text()), signal.SIGTERM)
        hosts.write_text("".join(line for line in hosts.read_text().splitlines(True) if TAG not in line))
        temporary.cleanup()
