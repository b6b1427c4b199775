"""check.py: launches on good machines, faults that one process can show, and its decisions for given values."""
import json
import socket

import pytest
from conftest import LAUNCH, PYTHON, free_port, good, run

import check

FACTS = {"device": "cuda", "id": None, "product": "H100", "driver": "570.1", "nccl": "2.27.3", "torch": "2.15",
         "cuda": "13.0", "python": "3.12.1", "cores": [0, 1, 2, 3], "quota": 4, "memory": 64000.0, "shm": 32000.0,
         "open-files": 65536, "unused": False, "unreachable": [], "wrong": [], "refused": None, "full": False,
         "sees": True, "torn": False, "locked": 0, "slower": 1.0, "clock": 0.0}


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
    """Good machines give no errors; other load on this machine may cause warnings."""
    said = good(run(*LAUNCH, "--nproc_per_node=2", "check.py", "--cpu", "--folder", tmp_path, "--params", "100M")).out
    assert "rank 0 on " in said and "rank 1 on " in said and "error" not in said
    for name in check.COLLECTIVES:
        sizes, times, speeds = said[said.index(f"\n{name} "):].strip().splitlines()[:3]
        assert sizes.split()[1] == "1" and len(sizes.split()) == len(times.split()) + 1 >= 3
        assert all(float(speed.replace(",", "")) >= 0 for speed in speeds.split()[:-4])
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


def test_the_ranks_of_slurm_and_of_a_launcher():
    slurm = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "4711",
             "SLURM_STEP_ID": "2", "MASTER_ADDR": "node1"}
    assert check.place(slurm) == (5, 8, 1, "node1", 12000 + 711 * 20 + 2)
    assert check.place({**slurm, "MASTER_PORT": "29500"})[4] == 29500
    launcher = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "MASTER_ADDR": "node2", "MASTER_PORT": "1"}
    assert check.place(slurm | launcher) == (3, 4, 2, "node2", 1)
    assert check.place({**slurm, "SLURM_STEP_NUM_TASKS": "1"}) == (0, 1, 0, "localhost", 0)
