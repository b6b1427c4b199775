"""Which device a process selects, given the answers of real machines: testing the choice needs no accelerator."""
import ast
import os
import socket
import threading

import markers
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

from common import devices, loading, reduce, spawn
from common.errors import UsageError
from detection import mean_ap

GROUPS = {"cpu", "cuda", "xpu"}  # torch.distributed has no backend that takes MPS tensors


def choose(name, machine, count, *group):
    """Return the choice for (local rank, processes on the host), or for a single process without them."""
    options = dict(zip(("local_rank", "processes"), group), in_groups=GROUPS) if group else {}
    return devices.choose_device(name, machine, count, **options)


@pytest.mark.parametrize(("asked", "machine", "count", "group", "chosen"), [
    # one process
    (None, None, 0, (), "cpu"),
    (None, "cuda", 4, (), "cuda"),
    (None, "mps", 1, (), "mps"),
    ("cpu", "cuda", 4, (), "cpu"),
    ("cuda:3", "cuda", 4, (), "cuda:3"),
    ("mps", "mps", 1, (), "mps"),
    # a process of a group takes its own
    (None, None, 0, (1, 2), "cpu"),
    (None, "cuda", 4, (2, 4), "cuda:2"),
    ("cuda", "cuda", 4, (3, 4), "cuda:3"),
    (None, "xpu", 2, (1, 2), "xpu:1"),
    ("cpu", "cuda", 4, (1, 2), "cpu"),
    # more processes than devices: a laptop; or Slurm's --gpus-per-task=1, where each sees one
    (None, "cuda", 1, (1, 2), "cuda:0"),
    (None, "cuda", 2, (3, 4), "cuda:1"),
    # an Apple computer: no backend takes its tensors
    (None, "mps", 1, (0, 1), "cpu"),
    (None, "mps", 1, (1, 2), "cpu"),
    ("cpu", "mps", 1, (1, 2), "cpu"),
    # one process may name its device, under a launcher too
    ("cuda:1", "cuda", 4, (0, 1), "cuda:1")])
def test_the_choice(asked, machine, count, group, chosen):
    assert choose(asked, machine, count, *group) == chosen


@pytest.mark.parametrize(("asked", "machine", "count", "group", "said"), [
    ("warp", "cuda", 1, (), "no such kind of device"), ("cuda", None, 0, (), "not on this machine"),
    ("cuda", "mps", 1, (), "its accelerator: mps"), ("cuda:4", "cuda", 4, (), "has 4, numbered from 0"),
    ("cuda:4", "cuda", 4, (0, 1), "has 4, numbered from 0"), ("mps", "mps", 1, (0, 1), "--device cpu"),
    ("cuda:1", "cuda", 4, (0, 2), "CUDA_VISIBLE_DEVICES")])
def test_what_cannot_be_had_is_refused(asked, machine, count, group, said):
    with pytest.raises(UsageError) as refused:
        choose(asked, machine, count, *group)
    assert f"--device {asked}: " in str(refused.value) and said in str(refused.value)


def test_a_device_with_an_index_becomes_the_current_one(monkeypatch):
    made = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", made.append)
    monkeypatch.setattr(devices, "_choose", lambda name, local_rank: torch.device(name))
    for name in ("cuda", "cuda:1"):
        devices.select_device(name)
    assert made == [1]


def test_on_windows_a_group_is_on_the_cpu():
    """gloo would end the process there, at the first all-reduce of a CUDA tensor."""
    linux, windows = map(devices.device_types_in_groups, ("linux", "win32"))
    assert {"cpu", "cuda"} <= linux and "mps" not in linux  # torch itself says which devices a group can have
    assert devices.choose_device(None, "cuda", 1, 0, 2, windows) == "cpu"
    assert devices.choose_device(None, "cuda", 1) == "cuda"
    with pytest.raises(UsageError, match="--device cuda: no torch.distributed backend supports it; use train.py"):
        devices.choose_device("cuda", "cuda", 1, 0, 2, windows)


def test_without_an_accelerator_there_is_one_cpu():
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without an accelerator")
    assert devices.select_device(None).type == devices.select_device(None, 1).type == "cpu"
    assert devices.count_processes(None) == 2
    assert [devices.device_ids(torch.device(name)) for name in ("cpu", "mps", "cuda:1")] == [[], [], [1]]


def test_deterministic_is_for_those_who_ask_and_the_others_get_the_fastest(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")

    def found():
        return (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
                torch.backends.cudnn.benchmark)

    try:
        devices.choose_algorithms(False, torch.device("cpu"))
        assert found() == (False, "highest", False)
        devices.choose_algorithms(True, torch.device("cuda"))
        assert found() == (True, "highest", False) and os.environ["CUBLAS_WORKSPACE_CONFIG"]
        with pytest.raises(UsageError, match="--deterministic: MPS .* --device cpu"):
            devices.choose_algorithms(True, torch.device("mps"))
        torch.use_deterministic_algorithms(False)
        devices.choose_algorithms(False, torch.device("cuda"))
        assert found() == (False, "high", True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("kind", ["cpu", "mps", "cuda", "xpu"])
def test_copies_do_not_wait_only_from_pinned_memory(kind):
    options = loading.options(0, torch.device(kind), [])
    assert options["pin_memory"] == (kind in ("cuda", "xpu"))


def test_the_store_of_one_host_listens_on_one_address():
    store, port = spawn.serve_store("127.0.0.1", 0, nodes=1)
    assert port == store.port
    socket.create_connection(("127.0.0.1", store.port), 5).close()
    with pytest.raises(OSError):  # refused; macOS has no such address
        socket.create_connection(("127.0.0.2", store.port), 5)
    with pytest.raises(UsageError, match=f"--port {store.port} on --ip 127.0.0.1: .*in use"):
        spawn.serve_store("127.0.0.1", store.port, nodes=1)
    with pytest.raises(UsageError, match="--nnodes 2: .*--port"):
        spawn.serve_store("127.0.0.1", 0, nodes=2)


def test_an_earlier_attempt_says_nothing_of_who_shares_a_device(monkeypatch):
    """Processes on two devices restart on one device: the store still contains the keys of the first attempt."""
    store, _ = spawn.serve_store("127.0.0.1", 0, nodes=1)
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def attempt(number, *identities):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        monkeypatch.setenv("RANK", "1")
        before, found = store.num_keys(), []
        other = threading.Thread(target=lambda: found.append(reduce.devices_are_shared(identities[1])))
        other.start()
        while store.num_keys() == before and other.is_alive():  # it has read its rank, and waits for rank 0
            pass
        monkeypatch.setenv("RANK", "0")
        found.append(reduce.devices_are_shared(identities[0]))
        other.join()
        return found

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert attempt(0, "GPU-1", "GPU-2") == [False, False]
    assert attempt(1, "GPU-2", "GPU-2") == [True, True]


def pick(name, device_type, default, available=("nccl", "gloo", "xccl"), shared=False):
    """Return the choice of a backend, with torch's own table of the devices that each serves."""
    return reduce.pick_backend(name, device_type, default, available.__contains__, dist.Backend.backend_capability,
                               lambda: shared)


@pytest.mark.parametrize(("options", "backend"), [
    ({"device_type": "cpu", "default": "gloo"}, "gloo"),
    ({"device_type": "cuda", "default": "nccl"}, "nccl"),
    ({"device_type": "cuda", "default": "nccl", "shared": True}, "gloo"),  # a laptop with one GPU
    ({"device_type": "cuda", "default": "nccl", "available": ("gloo",)}, "gloo"),
    ({"device_type": "xpu", "default": "xccl", "shared": True}, "xccl"),  # whose tensors gloo does not send
    ({"name": "nccl", "device_type": "cuda", "default": "nccl", "shared": True}, "nccl"),  # as asked for
    ({"name": "gloo", "device_type": "cuda", "default": "nccl"}, "gloo")])
def test_the_backend_follows_from_the_device_the_build_and_sharing(options, backend):
    assert pick(**{"name": None} | options) == backend


@pytest.mark.parametrize(("name", "device_type", "available", "said"), [
    ("nccl", "cpu", ("nccl", "gloo"), "does not work on cpu; use gloo"),
    ("nccl", "cpu", ("gloo",), "not in this build"), ("smoke", "cpu", ("gloo",), "not in this build")])
def test_a_backend_that_cannot_work_is_refused(name, device_type, available, said):
    with pytest.raises(UsageError, match=f"--backend {name}: {said}"):
        pick(name, device_type, "gloo", available)


class Unpicklable(torch.Tensor):
    """A tensor that reports when something pickles it."""

    def __reduce_ex__(self, protocol):
        raise AssertionError("the rows were pickled")


def test_detections_are_gathered_without_pickling(request):
    rows = torch.arange(15.0).reshape(5, 3)
    assert mean_ap.gather_rows(rows) is rows
    request.getfixturevalue("group")
    assert torch.equal(mean_ap.gather_rows(rows.as_subclass(Unpicklable)), rows)
    assert mean_ap.gather_rows(rows[:0]).shape == (0, 3)


@pytest.mark.parametrize("path", [*markers.scripts(), ROOT / "check.py"], ids=markers.name_of)
def test_every_group_is_told_its_device(path):
    """Otherwise, NCCL guesses, which only several GPUs would show."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dist.init_process_group":
            assert "device_id" in [keyword.arg for keyword in node.keywords]
