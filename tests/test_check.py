"""check.py: launches on good machines, faults that one process can show, and its decisions for given values."""
import itertools
import json
import os
import re
import shutil
import socket
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import PROGRAMS, PYTHON, STRICT, TORCHRUN, free_port, good, run
from torch.testing._internal.distributed.fake_pg import FakeStore

import check

FACTS = {"device": "cuda", "id": None, "product": "H100", "driver": "570.1", "nccl": "2.27.3", "torch": "2.15",
         "cuda": "13.0", "python": "3.12.1", "cores": [0, 1, 2, 3], "quota": 4, "memory": 64000.0, "shm": 32000.0,
         "open-files": 65536, "unused": False, "unreachable": [], "wrong": [], "refused": None, "full": False,
         "sees": True, "torn": False, "locked": 0, "slower": 1.0, "clock": 0.0}

BUS = {  # bus bandwidth / (bytes of the whole message / time), for n ranks: nccl-tests, doc/PERFORMANCE.md
    "all-reduce": lambda n: 2 * (n - 1) / n, "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n, "all-to-all": lambda n: (n - 1) / n}


def by_hand(rank, world, port, address="localhost"):
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def names(report):
    return [each["name"] for each in report["findings"]]


@pytest.mark.drill
def test_one_process_needs_no_launcher(tmp_path):
    report = json.loads(good(run(PYTHON, "check.py", "--cpu", "--json", "--folder", tmp_path)).out)
    rank, = report["ranks"]
    assert report["stage"] == "report" and rank["host"] == socket.gethostname()
    assert rank["wrong"] == rank["unreachable"] == [] and rank["write"] > 0 and rank["read"] > 0
    assert rank["sees"] and rank["locked"] == 1 and not rank["torn"] and not list(tmp_path.iterdir())


def test_two_processes_fill_the_table(tmp_path):
    """Good machines give no errors; other load on this machine may cause warnings. Rank 1's clock is 90 s ahead."""
    said = good(run(*TORCHRUN, "--nproc-per-node=2", PROGRAMS / "around.py", "ahead", "1", "90", "check.py", "--cpu",
                    "--folder", tmp_path, "--params", "100M", env=STRICT)).out
    assert "rank 0 on " in said and "rank 1 on " in said and "error" not in said
    clocks = [float(clock) for clock in re.findall(r"^rank .* clock ([-\d.e]+)", said, re.M)]
    warned = re.search(r"warning: clock: rank 1 on \S+: the clock is \+(\d+) s from rank 0's", said)
    assert [*clocks, int(warned[1])] == pytest.approx([0, 90, 90], abs=5)  # an answer can take seconds
    for name, ratio in BUS.items():
        sizes, times, speeds = said[said.index(f"\n{name} "):].strip().splitlines()[:3]
        assert sizes.split()[1] == "1" and len(sizes.split()) == len(times.split()) + 1 >= 3
        size, milliseconds, speed = (float(line.split("  ")[-2].replace(",", "")) for line in (sizes, times, speeds))
        assert speed == pytest.approx(ratio(2) * size * 1024 / milliseconds / 1e6, rel=0.05)
    assert "100,000,000 parameters: a step waits " in said
    assert not list(tmp_path.iterdir())


@pytest.mark.drill
def test_a_rank_that_never_comes_is_named():
    result = run(PYTHON, "check.py", "--cpu", "--json", "--limit", "1", env=by_hand(0, 3, free_port()))
    report = json.loads(result.out)
    assert result.code == 1 and report["stage"] == "ranks" and names(report)[0] == "missing"
    assert report["findings"][0]["text"].startswith("rank 1, 2 ")


@pytest.mark.parametrize(("address", "name"), [
    ("localhost", "port"), pytest.param("no-such-host.invalid", "name", marks=pytest.mark.drill)])
def test_what_a_lone_rank_cannot_reach_is_named(address, name):
    """Nothing listens on the port, or no host has the name."""
    port = free_port()
    result = run(PYTHON, "check.py", "--cpu", "--json", "--limit", "1", env=by_hand(1, 2, port, address))
    report = json.loads(result.out)
    assert (result.code, report["stage"], names(report)) == (1, name, [name])
    assert f"rank 1 on {socket.gethostname()}" in report["findings"][0]["text"]
    assert f"{address}:{port}" in report["findings"][0]["text"]


@pytest.mark.parametrize(("facts", "found"), [
    ({}, []),
    ({"id": "GPU-1"}, [("shared-device", "error", "rank 0, 1 on a: share the device GPU-1")]),
    ({"torch": ["2.15", "2.15", "2.14"]}, [("versions", "error", "rank 2 on b: torch 2.14, but rank 0 has 2.15")]),
    ({"device": ["cuda", "cuda", "cpu"]}, [("versions", "error", "rank 2 on b: device cpu, but rank 0 has cuda")]),
    ({"driver": ["1", "1", "2"]}, [("versions", "warning", "rank 2 on b: driver 2, but rank 0 has 1")]),
    ({"unused": [False, False, True]}, [("unused-gpu", "error", "rank 2 on b")]),
    ({"shm": [64.0, 64.0, 8.0]}, [("shm", "warning", "rank 0, 1 on a: /dev/shm has 64 MiB"),
                                  ("shm", "error", "rank 2 on b: /dev/shm has 8 MiB")]),
    ({"open-files": [1024, 1024, 64]}, [("open-files", "warning", "rank 0, 1 on a: only 1024 open files"),
                                        ("open-files", "error", "rank 2 on b: only 64 open files")]),
    ({"memory": 1500.0}, [("memory", "warning", "rank 0, 1 on a: 2 ranks share 1500 MiB")]),
    ({"quota": 1.5}, [("cores", "warning", "rank 0, 1 on a: 2 ranks share 1.5 cores")]),
    ({"quota": 1, "cores": [[0], [1], [0]]}, []),
    ({"slower": [1.0, 1.0, 1.3]}, [("slow-rank", "warning", "rank 2 on b: a matrix product takes 1.3 times")]),
    ({"slower": [1.0, 1.0, 1.3], "device": "cpu"}, []),
    ({"clock": [0.0, 0.1, -2.0]}, [("clock", "warning", "rank 2 on b: the clock is -2 s from rank 0's")]),
    ({"wrong": [[], ["all-reduce"], []]}, [("wrong-result", "error", "rank 1 on a: wrong results of all-reduce")]),
    ({"unreachable": [["rank 2"], ["rank 2"], []]}, [("pairs", "error", "rank 0, 1 on a: cannot reach rank 2")]),
    ({"torn": [False, True, True]}, [("rename", "error", "rank 1 on a; rank 2 on b")]),
    ({"locked": [1, 0, 0]}, []),
    ({"locked": [1, 1, 0]}, [("locks", "warning", "the folder has no working locks")]),
    ({"locked": 2}, [("locks", "warning", "the folder has no working locks")]),
    ({"sees": [True, True, False]}, [("not-shared", "error", "rank 2 on b: the folder does not show")]),
    ({"refused": [None, "/f: Permission denied", None]}, [("folder", "error", "rank 1 on a: /f: Permission denied")])])
def test_the_decisions(facts, found):
    """Ranks 0 and 1 are on host a, rank 2 on host b. A list holds one value for each of them."""
    everyone = [{**FACTS, "rank": rank, "host": "aab"[rank],
                 **{name: value[rank] if isinstance(value, list) and len(value) == 3 else value
                    for name, value in facts.items()}} for rank in range(3)]
    said = check.judge(everyone)
    assert [(each["name"], each["level"]) for each in said] == [(name, level) for name, level, _ in found]
    for each, (_, _, text) in zip(said, found):
        assert text in each["text"] and each["remedy"]


SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "4711",
         "SLURM_STEP_ID": "2", "MASTER_ADDR": "node1"}


def test_the_ranks_of_slurm_and_of_a_launcher():
    slurm = {**SLURM, "SLURM_TASK_PID": str(os.getpid())}
    assert check.place(slurm) == (5, 8, 1, "node1", 12000 + 711 * 20 + 2)
    assert check.place({**slurm, "MASTER_PORT": "29500"})[4] == 29500
    launcher = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "MASTER_ADDR": "node2", "MASTER_PORT": "1"}
    assert check.place(slurm | launcher) == (3, 4, 2, "node2", 1)
    assert check.place({**slurm, "SLURM_STEP_NUM_TASKS": "1"}) == (0, 1, 0, "localhost", 0)


@pytest.mark.drill
@pytest.mark.parametrize(("terminal", "task", "found"), [
    (True, "$$ exec", "(5, 8,"), (True, "1", "(0, 1, 0, 'localhost', 0)"),
    *(pytest.param(*each, "(5, 8,", marks=pytest.mark.nightly) for each in ((False, "1"), (True, "$$")))])
def test_the_shell_of_srun_with_pty_starts_one_process(terminal, task, found):
    """The other tasks of `srun -n8 --pty bash` have ended. Python may be a task itself, or started by a script."""
    start = [PYTHON, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"] if terminal else []
    code = "import os, check; print(check.place(os.environ))"
    result = good(run(*start, "sh", "-c", f'SLURM_TASK_PID={task} {PYTHON} -c "{code}"; true', env=SLURM))
    assert result.out.startswith(found)


@pytest.fixture
def clock(monkeypatch):
    """Return the clock by which check.py measures; it stands still unless a test moves its `now` or sets its `tick`."""
    clock = SimpleNamespace(now=100.0, tick=0.0)

    def perf_counter():
        clock.now += clock.tick
        return clock.now

    monkeypatch.setattr(check, "time", SimpleNamespace(**{**vars(time), "perf_counter": perf_counter}))
    return clock


def test_a_time_is_that_of_one_call(clock):
    def call(number):
        clock.now += 0.25

    assert check.seconds(call, [torch.zeros(1)], 4) == 0.25


def test_the_product_of_a_rank_that_pauses_takes_longer(clock, monkeypatch):
    times = itertools.cycle([0.25, 0.25, 1.0])

    def seconds(call, tensors, count):
        clock.now += (taken := next(times))
        return taken

    monkeypatch.setattr(check, "seconds", seconds)
    assert check.multiply(torch.device("cpu")) == 0.625  # the warm-up takes 0.25 s; then two products, 0.25 and 1 s


def test_a_rank_is_compared_with_the_median():
    for values, median in (([0.2, 0.6, 0.4], 0.4), ([0.3, 0.2], 0.2)):
        everyone = [{"seconds": value} for value in values]
        check.compare(everyone)
        assert [facts["slower"] for facts in everyone] == pytest.approx([value / median for value in values])


def test_the_bus_bandwidth_is_that_of_nccl_tests(alone, monkeypatch):
    """In a group of four ranks that sends nothing, each call takes 4 ms."""
    sent = []

    def seconds(call, tensors, count):
        call(*tensors)
        sent.append((tensors[0].nbytes, tensors[1].nbytes * 4, tensors[2].nbytes))
        return 0.004

    monkeypatch.setattr(check, "seconds", seconds)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    found = check.measure(SimpleNamespace(world=4, enter=lambda stage: None), torch.device("cpu"))
    assert found.keys() == BUS.keys()
    for name, rows in found.items():
        assert [round(size / 1024) for size, _, _ in rows] == [1, 8, 64, 512, 4096, 16384]
        assert [seconds for _, seconds, _ in rows] == pytest.approx([0.004] * 6)
        assert [speed for _, _, speed in rows] == pytest.approx([BUS[name](4) * size / 0.004 for size, _, _ in rows])
    sizes = [size for rows in found.values() for size, _, _ in rows for _ in range(3)]
    assert sent == [(size, size, size) for size in sizes]


def test_the_table_shows_figures_in_their_units():
    """16 MiB take 16 ms, so 400 MB of gradients take 0.381 s."""
    rank = {**FACTS, "rank": 0, "host": "a", "peer": ["rank 0 on a", "eth0", "10.0.0.1", 1], "clock": -2.5,
            "seconds": 0.0125, "write": 250.0}
    rows = [[1024, 2e-5, 25.6e6], [2**24, 0.016, 2**20 * 1e3]]
    said = check.table({"ranks": [rank, {}], "bandwidth": {"all-reduce": rows}, "findings": []}, 1e8).splitlines()
    assert said[0] == "memory, shm: MiB; clock: s ahead of rank 0's; seconds: of a matrix product; write, read: MB/s"
    assert said[1].startswith("rank 0 on a (eth0 10.0.0.1): cores 4, device cuda, product H100, ")
    assert said[1].endswith("memory 64000, shm 32000, open-files 65536, clock -2.5, seconds 0.0125, write 250")
    assert [re.sub(" +", " ", line).strip() for line in said[3:6]] == [
        "all-reduce 1 16,384 KiB", "0.02 16.00 ms", "0.026 1.049 GB/s bus bandwidth"]
    assert "100,000,000 parameters: a step waits up to 0.381 s for its gradients in float32" in said[7]


def test_the_number_of_parameters_is_read():
    assert [check.count(text) for text in ("12", "1.5k", "100M", "7B", "1T")] == [12, 1500, 1e8, 7e9, 1e12]


def test_the_speed_of_the_folder_is_that_of_what_was_written(clock, tmp_path):
    """Each look at the clock takes a second, and there are three while 4 MiB are written, and one for reading."""
    clock.tick, news = 1.0, {}
    team = SimpleNamespace(rank=0, local_rank=1, litter=[], everyone=[{"pid": 1}],
                           exchange=lambda step, **more: news.update(more))
    check.check_folder(team, tmp_path)
    assert (news["write"], news["read"]) == pytest.approx((2**22 / 2e6, 2**22 / 1e6))


def test_the_facts_are_in_mebibytes():
    facts = check.describe(3, torch.device("cpu"))
    total = int(check.read("/proc/meminfo", r"MemTotal: *(\d+) kB")) / 1024
    assert total / 1000 < facts["memory"] < total
    assert facts["shm"] == pytest.approx(shutil.disk_usage("/dev/shm").total / 2**20)
