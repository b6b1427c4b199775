"""Find out in about a minute whether these machines are fit to train, and if not, which host or rank is at fault.

    torchrun --nproc-per-node=gpu check.py
    srun ... python check.py --folder /shared/runs --params 100M
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=host1 MASTER_PORT=29500 python check.py

Launch this file on all hosts, in the same way as training. It needs only torch. Exit code 0 means that the machines are
fit to train, 1 means that a finding prevents training, and 2 means wrong usage. Launchers report any failure as 1. If a
stage or a single measurement takes longer than --limit, the report names the stage and the ranks that are missing,
silent or unreachable. While torchrun itself waits for a host, it does not start this file. In this case, start the
ranks by hand, as in the third command. Bus bandwidth is defined as in nccl-tests: for any number of ranks, you can
compare it with the speed of the links.
"""
import argparse
import contextlib
import datetime
import errno
import fcntl
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

STAGES = "name port store ranks pairs folder group all-reduce collectives product bandwidth report".split()
REMEDIES = {  # what to do about each finding, worst first
    "name": "correct MASTER_ADDR, or add the name to DNS or /etc/hosts on this host; an IP address works, too",
    "port-in-use": "choose another MASTER_PORT, or end the process that listens there (ss -ltnp)",
    "port": "if the connection is refused, start rank 0 on MASTER_ADDR; if it times out, open the port in the firewall",
    "store": "look at rank 0 or, under torchrun, at the launcher on that host: it is stopped, swapping or lost",
    "missing": "read the messages of these ranks; if they only start slowly, raise --limit",
    "failed": "read the traceback of this rank",
    "silent": "look for these processes on their hosts (ps, dmesg): stopped, swapping, out of memory, or lost",
    "pairs": "open all ports between these hosts, or select an interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
    "stuck": "set NCCL_DEBUG=INFO; try another interface (NCCL_SOCKET_IFNAME), NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1",
    "wrong-result": "do not train; replace the device or its link; try NCCL_P2P_DISABLE=1",
    "unused-gpu": "install a CUDA build of torch that the driver supports (nvidia-smi)",
    "shared-device": "start at most one process per device: --nproc-per-node=gpu, or one Slurm task per GPU",
    "versions": "install the same versions on all hosts, and give all ranks the same kind of device",
    "disk-full": "free some space, or use another folder",
    "folder": "create the folder on this host, mount it, or correct its permissions",
    "not-shared": "use a folder that all hosts mount: otherwise, they cannot resume from rank 0's checkpoint",
    "rename": "use another file system: on this one, a reader can see half a checkpoint",
    "locks": "mount the file system with locks (Lustre: -o flock), or use a different folder for each run",
    "shm": "enlarge /dev/shm (docker run --shm-size=8g): DataLoader workers and NCCL need it",
    "open-files": "run ulimit -n 65536 before the launch: workers, connections and shared tensors need open files",
    "memory": "start fewer processes on this host, or request more memory (--mem)",
    "cores": "start fewer processes on this host, or request more cores (--cpus-per-task)",
    "slow-rank": "compare clock rates, temperatures and other processes (nvidia-smi -q -d PERFORMANCE, top)",
    "clock": "synchronize the clocks (chrony): logs and file times disagree"}
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the old name, before torch 2.14
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
COLLECTIVES = {  # name: (factor, call, which of the call's arguments holds the result); see measure()
    "all-reduce": (2, lambda whole, part, other: dist.all_reduce(whole), 0),
    "all-gather": (1, lambda whole, part, other: all_gather(whole, part), 0),
    "reduce-scatter": (1, lambda whole, part, other: reduce_scatter(part, whole), 1),
    "all-to-all": (1, lambda whole, part, other: dist.all_to_all_single(other, whole), 2)}
VERSIONS = "device product driver torch cuda nccl python".split()  # what all ranks should have in common
SHOWN = [*VERSIONS, *"numa memory shm open-files clock measured seconds write read".split()]


def finding(name, text, error=True):
    return {"name": name, "level": "error" if error else "warning", "text": text, "remedy": REMEDIES[name]}


def ranks(numbers, everyone):
    """Return text like "rank 0, 1 on host1; rank 3 on host2"; the host of a rank that has not connected is unknown."""
    hosts = {}
    for rank in numbers:
        hosts.setdefault(everyone[rank].get("host"), []).append(str(rank))
    return "; ".join(f"rank {', '.join(group)}" + (f" on {host}" if host else "") for host, group in hosts.items())


def judge(everyone):
    """Return the findings from the ranks' reports; `everyone` has {} for a rank that has not connected."""
    found, here = {}, [facts for facts in everyone if facts]
    for my in here:
        near = [facts for facts in here if facts["host"] == my["host"]]
        other = {name: f"{name} {my[name]}, but rank {here[0]['rank']} has {here[0][name]}" for name in VERSIONS
                 if my[name] != here[0][name]}
        grave = ", ".join(other[name] for name in ("device", "torch", "nccl") if name in other)
        for name, wrong, error, text in (
                ("pairs", my["unreachable"], True, f"cannot reach {', '.join(my['unreachable'][:4])}"),
                ("wrong-result", my["wrong"], True, f"wrong results of {', '.join(my['wrong'])}"),
                ("unused-gpu", my["unused"], True, f"torch {my['torch']} cannot use the NVIDIA GPUs"),
                ("shared-device", my["id"] and sum(each["id"] == my["id"] for each in near) > 1, True,
                 f"share the device {my['id']}"),
                ("versions", other, grave, grave or ", ".join(other.values())),
                ("disk-full", my["full"], True, "no space is left in the folder"),
                ("folder", my["refused"] and not my["full"], True, my["refused"]),
                ("not-shared", not my["sees"] and not my["refused"] and not here[0]["refused"], True,
                 "the folder does not show the file that rank 0 has written"),
                ("rename", my["torn"], True, "a file that rank 0 replaced was missing or incomplete"),
                ("locks", sum(facts["locked"] for facts in here) > 1, False, "the folder has no working locks"),
                ("shm", my["shm"] < 1024, my["shm"] < 32, f"/dev/shm has {my['shm']:.0f} MiB"),
                ("open-files", my["open-files"] < 4096, my["open-files"] < 256, f"only {my['open-files']} open files"),
                ("memory", my["memory"] < 1024 * len(near), False, f"{len(near)} ranks share {my['memory']:.0f} MiB"),
                ("cores", my["quota"] < sum(bool({*my["cores"]} & {*each["cores"]}) for each in near), False,
                 f"{len(near)} ranks share {my['quota']:g} cores"),
                ("slow-rank", my["slower"] > (1.5 if my["device"] == "cpu" else 1.2), False,
                 f"a matrix product takes {my['slower']:.1f} times as long as on the median rank"),
                ("clock", abs(my["clock"]) > 1, False, f"the clock is {my['clock']:+.0f} s from rank 0's")):
            if wrong:
                found.setdefault((name, text, bool(error)), []).append(my["rank"])
    return [finding(name, f"{ranks(numbers, everyone)}: {text}", error)
            for (name, text, error), numbers in found.items()]


def in_shell(env):
    """Return whether an interactive shell of `srun --pty` started this process: a terminal, and another group."""
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY))
        return env.get("SLURM_TASK_PID") != str(os.getpgrp())


def place(env):
    """Return (rank, world size, rank on this host, address of rank 0, its port), as torchrun or Slurm sets them."""
    if "RANK" not in env and (int(env.get("SLURM_STEP_NUM_TASKS", 1)) == 1 or in_shell(env)):
        return 0, 1, 0, "localhost", 0
    if "RANK" not in env:
        env = {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
               "LOCAL_RANK": env["SLURM_LOCALID"],
               "MASTER_PORT": 12000 + int(env["SLURM_JOB_ID"]) % 1000 * 20 + int(env["SLURM_STEP_ID"]) % 20, **env}
        if "MASTER_ADDR" not in env:
            hosts = subprocess.check_output(["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]], text=True)
            env["MASTER_ADDR"] = hosts.split()[0]
    return (int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0)), env["MASTER_ADDR"],
            int(env["MASTER_PORT"]))


def read(path, pattern="(.*)"):
    """Return the text that a pattern's group matches in a system file, or None."""
    with contextlib.suppress(OSError):
        found = re.search(pattern, Path(path).read_text(), re.M)
        return found and found[1]


def describe(rank, device):
    """Return the facts about this rank, its host and its device."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    nodes = {node.name for core in cores for node in Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")}
    disk = os.statvfs("/dev/shm" if os.path.exists("/dev/shm") else "/")
    facts = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "device": device.type, "product": "cpu",
             "id": None, "driver": read("/proc/driver/nvidia/version", r"Kernel Module.*?  ([\d.]+)"), "nccl": None,
             "torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip,
             "python": sys.version.split()[0], "cores": cores, "quota": len(cores), "numa": ",".join(sorted(nodes)),
             "memory": int(read("/proc/meminfo", r"MemAvailable: *(\d+)") or 2**40) / 1024,
             "shm": disk.f_blocks * disk.f_frsize / 2**20,
             "open-files": resource.getrlimit(resource.RLIMIT_NOFILE)[0] % 2**63,  # -1: no limit
             "unreachable": [], "wrong": [], "refused": None, "full": False, "sees": True, "torn": False, "locked": 0,
             "slower": 1.0, "clock": 0.0}  # defaults, which later stages replace
    facts["unused"] = bool(facts["driver"]) and not torch.cuda.is_available()
    group = Path("/sys/fs/cgroup" + (read("/proc/self/cgroup", "^0::(.*)") or "/"))
    for folder in [group, *group.parents]:  # the limits of a container or a Slurm job; "max" means no limit
        quota, period = (read(folder / "cpu.max") or "max 1").split()
        facts["quota"] = min(facts["quota"], int(quota) / int(period) if quota != "max" else 2**20)
        if limit := read(folder / "memory.max", r"(\d+)"):
            facts["memory"] = min(facts["memory"], (int(limit) - int(read(folder / "memory.current"))) / 2**20)
    if device.type != "cpu":
        about = torch.get_device_module(device).get_device_properties(device)
        nccl = torch.cuda.nccl.version() if device.type == "cuda" and dist.is_nccl_available() else ()
        facts |= {"product": about.name, "id": str(getattr(about, "uuid", device)), "nccl": ".".join(map(str, nccl))}
    return facts


def listen(nccl, name):
    """Serve this process's name and clock where the backend would listen; return (interface, address, port).

    Without *_SOCKET_IFNAME, NCCL uses an interface other than loopback and Docker's; gloo uses the host name's address.
    """
    found = {"lo": "127.0.0.1"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address; 0x8915 is Linux's SIOCGIFADDR
                data = fcntl.ioctl(probe, 0x8915, interface.encode().ljust(256, b"\0"))
                found[interface] = socket.inet_ntoa(data[20:24])
    setting = os.environ.get("NCCL_SOCKET_IFNAME" if nccl else "GLOO_SOCKET_IFNAME", "^lo,docker" if nccl else "")
    chosen = [address for interface, address in found.items() if setting
              and interface.startswith(tuple(setting.lstrip("^=").split(","))) != setting.startswith("^")]
    with contextlib.suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
        chosen += [own] if own in found.values() or own.startswith("127.") else []
    server = socket.create_server(([*chosen, "127.0.0.1"][0], 0), backlog=1024)

    def answer():
        while True:
            with contextlib.suppress(OSError), server.accept()[0] as peer:
                peer.sendall(json.dumps([name, time.time()]).encode())

    threading.Thread(target=answer, daemon=True).start()
    address, port = server.getsockname()
    return [*(interface for interface in found if found[interface] == address), "lo"][0], address, port


def visit(peer):
    """Return (why the `peer` cannot be reached, or None; the number of seconds by which its clock is ahead).

    `peer` is (name, interface, address, port).
    """
    start = time.time()
    try:
        with socket.create_connection(peer[2:], timeout=4) as connection:
            name, clock = json.loads(connection.makefile().read())
    except (OSError, ValueError) as error:
        return re.sub(r"\[.*?\] ", "", str(error)), 0.0
    return None if name.startswith(peer[0] + ",") else f"{name} answers there", clock - (start + time.time()) / 2


class Team:
    """All ranks, connected by a store. If a stage exceeds --limit, a thread reports the stage and ends the process."""

    def __init__(self, options, rank, world, local_rank, head, port):
        self.options, self.rank, self.world, self.local_rank = options, rank, world, local_rank
        self.head, self.port, self.why, self.store, self.litter = head, port, "no answer", None, []
        self.stage, self.everyone, self.bandwidth = "", [{} for _ in range(world)], {}
        self.enter("name")
        threading.Thread(target=self.guard, daemon=True).start()

    def enter(self, stage):
        if self.rank == 0 and stage != self.stage:
            print(f"check.py: {STAGES.index(stage) + 1}/{len(STAGES)} {stage}", file=sys.stderr, flush=True)
        self.stage, self.deadline = stage, time.monotonic() + self.options.limit

    def connect(self):
        limit = datetime.timedelta(seconds=self.options.limit + 30)  # longer, so that guard() reports first
        return dist.PrefixStore("check.py", dist.TCPStore(self.head, self.port, wait_for_workers=False, timeout=limit))

    def start(self):
        """Connect to the store. torchrun serves it; without torchrun, rank 0 does."""
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            try:
                self.server = dist.TCPStore("localhost", self.port, is_master=True, wait_for_workers=False)
            except RuntimeError as error:
                self.end(finding("port-in-use", f"rank 0, port {self.port}: {str(error).splitlines()[0]}"))
            self.port = self.server.port
        for stage, reach in (("name", lambda: socket.getaddrinfo(self.head, self.port)),
                             ("port", lambda: socket.create_connection((self.head, self.port), 3).close())):
            self.enter(stage)
            while self.why:
                try:
                    self.why = reach() and None
                except OSError as error:
                    self.why = error
                    time.sleep(0.2)
            self.why = "no answer"
        self.enter("store")
        self.store = self.connect()
        threading.Thread(target=self.follow, daemon=True).start()

    def exchange(self, step, **news):
        """Publish this rank's `news`, wait until every rank has done so for this step, and update `everyone`."""
        self.store.set(f"{step}/{self.rank}", json.dumps(news))
        texts = self.store.multi_get([f"{step}/{rank}" for rank in range(self.world)])
        for facts, text in zip(self.everyone, texts):
            facts.update(json.loads(text))

    def follow(self):
        """Wait until a stage takes too long on another rank; then let guard() act on this rank, too."""
        with contextlib.suppress(RuntimeError):  # the process that serves the store has ended
            store = self.connect()
            while not store.check(["late"]):
                time.sleep(0.3)
            self.deadline = 0

    def guard(self):
        while time.monotonic() < self.deadline:
            time.sleep(0.1)
        threading.Thread(target=self.find_out, daemon=True).start()
        time.sleep(15)
        if self.deadline != float("inf"):
            self.end(finding("store", f"rank {self.rank}: the store at {self.head}:{self.port} does not answer"))

    def find_out(self):
        """Tell the other ranks that a stage takes too long, and see which ranks answer.

        The lowest rank that answers reports.
        """
        where, me = f"{self.head}:{self.port}", f"rank {self.rank} on {socket.gethostname()}"
        if self.stage in ("name", "port"):
            what = "resolve" if self.stage == "name" else "reach"
            self.end(finding(self.stage, f"{me} cannot {what} {where}: {self.why}"))
        store = self.connect()
        store.set(f"late/{self.rank}", "")
        store.set("late", "")
        time.sleep(4)
        come = [rank for rank in range(self.world) if store.check([f"facts/{rank}"])]
        late = [rank for rank in range(self.world) if store.check([f"late/{rank}"])]
        for rank in come:
            self.everyone[rank] = self.everyone[rank] or json.loads(store.get(f"facts/{rank}"))
        lost = [rank for rank in range(self.world) if rank not in late]
        missing = [rank for rank in lost if rank not in come]
        found = finding("stuck", f"all ranks wait for each other in the stage {self.stage}")
        if store.check(["failed"]):
            found = finding("failed", store.get("failed").decode())
        elif missing:
            found = finding("missing", f"{ranks(missing, self.everyone)} did not reach the store at {where}")
        elif lost:
            found = finding("silent", f"{ranks(lost, self.everyone)} connected, but then stopped answering")
        self.end(found, store, late)

    def end(self, found=None, store=None, present=()):
        """End this process, even if a thread waits for the network. The first rank that is present reports."""
        self.deadline, code, reports = float("inf"), 1, self.rank == [*present, self.rank][0]
        try:
            findings = sorted([found] * bool(found) + judge(self.everyone), key=lambda each: (
                each["level"] == "warning", list(REMEDIES).index(each["name"])))
            code = int(any(each["level"] == "error" for each in findings))
            report = {"stage": self.stage, "findings": findings, "ranks": self.everyone, "bandwidth": self.bandwidth}
            if reports:
                print(json.dumps(report) if self.options.json else table(report, self.options.params), flush=True)
            for path in self.litter:
                path.unlink(missing_ok=True)
            # The launcher kills all ranks when one of them exits, so no rank exits before the report is printed. The
            # reporting rank may serve the store, so it exits last
            if present:
                store.set_timeout(datetime.timedelta(seconds=9))
                if reports:
                    store.set("reported", "")
                store.wait([f"left/{rank}" for rank in present[1:]] if reports else ["reported"])
                store.set(f"left/{self.rank}", "")
            elif self.rank:
                time.sleep(self.options.limit)
        finally:
            os._exit(code)


def check_folder(team, folder):
    """Write, lock and replace files in a folder that all ranks should share, and measure the speed of the folder."""
    news = {"refused": None, "full": False, "sees": False, "locked": 0, "torn": False}
    common = folder / f".check-{team.everyone[0]['pid']}"
    own = Path(f"{common}-{team.rank}")
    team.litter += [own, common] if team.rank == 0 else [own]

    @contextlib.contextmanager
    def noting():
        try:
            yield
        except OSError as error:
            news["refused"] = news["refused"] or f"{folder}: {error.strerror}"
            news["full"] |= error.errno in (errno.ENOSPC, errno.EDQUOT)

    with noting():
        own.touch()
        if team.rank == 0:
            common.write_text("0" * 2**16)
    team.exchange("written", refused=news["refused"])
    end = time.monotonic() + 5
    while not (file := open(common, "r+") if common.exists() else None) and time.monotonic() < end:
        time.sleep(0.1)  # NFS can show a new file late
    if file:
        news["sees"] = True
        try:  # 1: this rank got the lock; 2: the file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            news["locked"] = 1
        except OSError as error:
            news["locked"] = 0 if isinstance(error, BlockingIOError) else 2
    team.exchange("locked")
    end = time.monotonic() + 0.5
    while file and time.monotonic() < end:  # rank 0 replaces the file; others must see either version
        with noting():
            if team.rank == 0:
                own.write_text(str(time.time_ns() % 10) * 2**16)
                own.replace(common)
            else:
                text = ""
                with contextlib.suppress(OSError):
                    text = common.read_text()
                news["torn"] |= text != text[:1] * 2**16 or not text
    with noting(), own.open("wb+", buffering=0) as file:
        block, size, start = os.urandom(2**22), 0, time.perf_counter()
        while size < (2**26 if team.local_rank == 0 else 2**20) and time.perf_counter() < start + 2:
            size += file.write(block)
        os.fsync(file.fileno())
        middle = time.perf_counter()
        if hasattr(os, "posix_fadvise"):  # read from the disk, not from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(2**22):
            pass
        news |= {"write": size / (middle - start) / 1e6, "read": size / (time.perf_counter() - middle) / 1e6}
    team.exchange("folder", **news)


def verify(rank, world, device):
    """Return the names of the collectives whose results are wrong. Sums are exact, because all values are integers."""
    wrong = set()
    for piece in (1, 1023, 30011) if world <= 32 else (1, 7):
        drawn = torch.stack([torch.randint(-99, 99, (world, piece), generator=torch.Generator().manual_seed(seed))
                             for seed in range(world)]).float().to(device)  # what each rank sends to each rank
        right = {"all-reduce": drawn.sum(0), "all-gather": drawn[:, 0], "reduce-scatter": drawn.sum(0)[rank],
                 "all-to-all": drawn[:, rank]}
        for name, (_, call, result) in COLLECTIVES.items():
            tensors = drawn[rank].flatten().clone(), drawn[rank, 0].clone(), torch.zeros(world * piece, device=device)
            call(*tensors)
            wrong |= set() if torch.equal(tensors[result], right[name].flatten()) else {name}
    return sorted(wrong)


def seconds(call, tensors, count):
    """Return the mean time of a call in seconds, including the work on the device."""
    start = time.perf_counter()
    for _ in range(count):
        call(*tensors)
    if tensors[0].device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) / count


def measure(team, device):
    """Return {collective: [[bytes, seconds of the slowest rank, bus bandwidth in bytes/s], ...]}."""
    world, found = team.world, {}
    powers, budget = ((10, 13, 16, 19, 22, 24), 0.5) if device.type == "cpu" else ((10, 13, 16, 19, 22, 25, 28), 2.0)
    whole, other = torch.zeros(2, 2**powers[-1] // 4 + world, device=device)
    for name, (factor, call, _) in COLLECTIVES.items():
        rows = found[name] = []
        for size in (2**power for power in powers):
            if rows and rows[-1][1] * size / rows[-1][0] > budget:  # a slow network: skip larger messages
                break
            team.enter("bandwidth")
            part, slowest = size // 4 // world + 1, torch.tensor(budget, device=device)
            tensors = whole[:part * world], other[:part], other[:part * world]
            for _ in range(3):  # a warm-up, a trial that sets how many calls fit into the budget, and the measurement
                slowest.fill_(seconds(call, tensors, max(1, min(50, int(budget / 8 / slowest.item())))))
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
            size = 4 * part * world
            rows.append([size, slowest.item(), factor * (world - 1) / world * size / slowest.item()])
    return found


def multiply(device):
    """Return the mean time of a matrix product, in seconds, measured for one second; the mean includes pauses."""
    size, dtype, count = (512, torch.float32, 1) if device.type == "cpu" else (4096, torch.bfloat16, 20)
    matrices, times = torch.randn(2, size, size, device=device, dtype=dtype), []
    seconds(torch.matmul, matrices, 3)
    end = time.perf_counter() + 1
    while time.perf_counter() < end:
        times.append(seconds(torch.matmul, matrices, count))
    return sum(times) / len(times)


def compare(everyone):
    """Set how many times as long as on the median rank a matrix product takes on each rank."""
    usual = sorted(facts["seconds"] for facts in everyone)[(len(everyone) - 1) // 2]
    for facts in everyone:
        facts["slower"] = facts["seconds"] / usual


def run(team):
    """Run the stages one after another."""
    team.start()
    team.enter("ranks")
    device, accelerator = torch.device("cpu"), torch.accelerator.current_accelerator(check_available=True)
    if accelerator and accelerator.type != "mps" and not team.options.cpu:
        device = torch.device(accelerator.type, team.local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    facts = describe(team.rank, device)
    facts["unused"] &= not team.options.cpu
    name = f"rank {team.rank} on {facts['host']}"
    team.exchange("facts", peer=[name, *listen(device.type == "cuda", f"{name}, process {facts['pid']}")], **facts)
    grave = {each["name"] for each in judge(team.everyone) if each["level"] == "error"}
    if grave & {"shared-device", "versions", "unused-gpu"}:
        device = torch.device("cpu")  # NCCL would not start
    team.enter("pairs")
    peers = [facts["peer"] for facts in team.everyone]
    with ThreadPoolExecutor(256) as pool:
        visits = list(pool.map(visit, peers))
    team.exchange("pairs", clock=-visits[0][1], unreachable=[
        f"{peer[0]} at {peer[2]} ({why})" for peer, (why, _) in zip(peers, visits) if why])
    if team.options.folder:
        team.enter("folder")
        check_folder(team, Path(team.options.folder))
    if any(facts["unreachable"] for facts in team.everyone):
        return
    team.enter("group")
    dist.init_process_group(dist.get_default_backend_for_device(device), store=team.connect(), rank=team.rank,
                            world_size=team.world, timeout=datetime.timedelta(seconds=team.options.limit + 30),
                            device_id=None if device.type == "cpu" else device)
    team.enter("all-reduce")
    dist.all_reduce(torch.ones(1, device=device))
    team.enter("collectives")
    team.exchange("collectives", wrong=verify(team.rank, team.world, device))
    team.enter("product")
    team.exchange("product", measured=device.type, seconds=multiply(device))
    compare(team.everyone)
    if team.world > 1:
        team.enter("bandwidth")
        team.bandwidth = measure(team, device)
    dist.destroy_process_group()


def table(report, params):
    """Return a report as text."""
    lines = ["memory, shm: MiB; clock: s ahead of rank 0's; seconds: of a matrix product; write, read: MB/s"]
    for facts in filter(None, report["ranks"]):
        values = [f"{name} {facts[name]:.5g}" if isinstance(facts[name], float) else f"{name} {facts[name]}"
                  for name in SHOWN if facts.get(name) is not None]
        lines.append(f"rank {facts['rank']} on {facts['host']} ({' '.join(facts['peer'][1:3])}): "
                     f"cores {min(facts['quota'], len(facts['cores'])):g}, {', '.join(values)}")
    for name, rows in report["bandwidth"].items():
        lines += ["", f"{name:15}" + "".join(f"{size / 1024:10,.0f}" for size, _, _ in rows) + "  KiB",
                  f"{'':15}" + "".join(f"{time * 1e3:10,.2f}" for _, time, _ in rows) + "  ms",
                  f"{'':15}" + "".join(f"{speed / 1e9:10,.3f}" for _, _, speed in rows) + "  GB/s bus bandwidth"]
    if params and report["bandwidth"]:
        size, time, _ = report["bandwidth"]["all-reduce"][-1]
        lines += ["", f"{params:,.0f} parameters: a step waits up to {4 * params / size * time:.3g} s for its "
                  "gradients in float32; overlap with the backward pass shortens this"]
    for each in report["findings"]:
        lines += ["", f"{each['level']}: {each['name']}: {each['text']}", f"    {each['remedy']}"]
    return "\n".join([*lines, "", f"{len(report['findings'])} finding(s)"])


def count(text):
    """Return the number for a text like 100M or 7B."""
    found = re.fullmatch(r"([\d.]+)([KMBT]?)", text.upper())
    return float(found[1]) * 1000 ** " KMBT".index(found[2] or " ")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=os.path.expanduser,
                        help="an existing folder that all hosts should share, such as --output-dir")
    parser.add_argument("--params", type=count,
                        help="number of parameters of your model, such as 100M, to predict how long a step waits")
    parser.add_argument("--limit", type=float, default=20, help="seconds that a stage may take (default: 20)")
    parser.add_argument("--cpu", action="store_true", help="use the CPUs even if there are accelerators")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args()
    try:
        team = Team(options, *place(os.environ))
    except (KeyError, ValueError, OSError, subprocess.CalledProcessError) as error:
        parser.error(f"cannot tell how this process was launched: {error!r}")
    try:
        run(team)
        team.enter("report")
    except Exception as error:
        sys.excepthook(*sys.exc_info())
        if team.store:
            team.store.set("failed", f"rank {team.rank} on {socket.gethostname()}: {type(error).__name__}: {error}")
        team.deadline = 0
        threading.Event().wait()  # guard() ends this process
    team.end(store=team.store, present=range(team.world))


if __name__ == "__main__":
    main()
