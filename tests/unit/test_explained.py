"""The line for an error: one line if the cause is known, otherwise None, so that the traceback remains."""
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import FROM_ROOT, PROGRAMS, PYTHON, good, run
from torch.distributed.device_mesh import init_device_mesh

from common import cli, errors

NCCL = ("NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.27.5\n"
        "{}\nLast error:\n{}")
NCCL2 = "NCCL AllReduce failed: {} \nNCCL Last Error: {}"  # of torch 2.15


def worker_error(kind, text):
    """Return what a DataLoader raises for an error in its worker (torch/_utils.py, ExceptionWrapper)."""
    return kind(f"Caught {kind.__name__} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
                f'  File "mine.py", line 1, in __getitem__\n{kind.__module__}.{kind.__name__}: {text}')


@pytest.mark.parametrize(("error", "parts"), [
    (errors.UsageError("--lr 7: too much"), ["--lr 7: too much"]),
    (worker_error(errors.ProcessError, "a.png: cannot be read"), ["a.png: cannot be read"]),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), ["2 GiB", "--batch-size"]),
    (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "), ["pid 71", "--workers"]),
    (RuntimeError("DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's workers "
                  "are out of shared memory. Please try to raise your shared memory limit."), ["shared memory limit"]),
    (worker_error(RuntimeError, "unable to allocate shared memory(shm) for file </torch_20689_654450319_4>: No space "
                                "left on device (28)"), ["/dev/shm is full", "--shm-size", "--workers"]),
    (worker_error(RuntimeError, "unable to allocate shared memory(shm) for file </torch_1_2_4>: Resource temporarily "
                                "unavailable (11)"), ["/dev/shm is full"]),  # torch 2.11
    (RuntimeError("DataLoader worker (pid(s) 71, 72) exited unexpectedly"), ["71, 72"]),
    (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41"), ["lost", "the first"]),
    (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv"), ["--timeout"]),
    (dist.DistNetworkError("The server socket has failed to listen on any local network address. port: 29500, useIpv6: "
                           "false, code: -98, name: EADDRINUSE, message: address already in use"), ["MASTER_PORT"]),
    (dist.DistNetworkError("The client socket has timed out after 600000ms"), ["lost", "--timeout"]),
    (dist.DistBackendError(NCCL.format("remote process exited or there was a network error", "ncclRemoteError: A call"
                                       " failed possibly due to a network error.", "socketPoll: 10.0.0.2<43>")),
     ["lost", "ncclRemoteError", "10.0.0.2<43>"]),  # the whole message: its first line says nothing
    (RuntimeError(NCCL2.format("remote process exited or there was a network error", "socketPoll: 10.0.0.2<43>")),
     ["lost", "10.0.0.2<43>"]),
    (dist.DistBackendError("NCCL operation timed out"), ["lost", "--timeout"])])
def test_what_can_be_foreseen_is_said(error, parts):
    said = cli.explain(error)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize("error", [
    # a reader's own mistakes
    worker_error(RuntimeError, "stack expects each tensor to be equal size, but got [3, 4, 4] at entry 0"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (64x288 and 100x10)"), KeyError("gloo"),
    RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one."),
    # what NCCL says of this process or of its machine, not of a lost peer
    dist.DistBackendError(NCCL.format("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage of NCCL "
                                      "library.", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10")),
    dist.DistBackendError(NCCL.format("unhandled system error", "ncclSystemError: System call (e.g. socket, malloc) or "
                                      "external library call failed.", "Error while creating shared memory segment")),
    RuntimeError(NCCL2.format("unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "illegal memory access")),
    dist.DistBackendError("NCCL operation failed"),
    ValueError("not foreseen")])
def test_what_is_not_foreseen_keeps_its_traceback(error):
    assert cli.explain(error) is None


@pytest.mark.parametrize(("error", "said"), [
    (errors.UsageError("--lr 7: too much"), None),  # rank 0 says it
    (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41"), "rank 1: lost the")])
def test_after_an_earlier_signal_rank_1_still_says_that_it_lost_the_others(monkeypatch, error, said):
    """Slurm may have signaled all processes, and the lost one cannot say anything."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    cli.noted.set()
    try:
        line, code = cli._last_words(error)
    finally:
        cli.noted.clear()
    assert code and (line.startswith(said) if said else line is None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_ends_the_run(value):
    with pytest.raises(errors.RunError, match=f"^epoch 1: the loss is {value}; lower --lr, or check the data$"):
        errors.require_finite(value, "epoch 1: the loss")
    errors.require_finite(1e300, "epoch 1: the loss")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's PR_SET_PDEATHSIG")
@pytest.mark.parametrize(("variables", "said"), [({"TORCHELASTIC_RUN_ID": "none"}, "15\n"), ({}, "0\n")])
def test_a_process_of_torchrun_ends_with_it(variables, said):
    """The kernel sends it SIGTERM when its parent ends. Without a launcher, a process outlives its shell."""
    shown = ("import ctypes; from common import launch; launch.end_with_launcher(); number = ctypes.c_int(); "
             "ctypes.CDLL(None).prctl(2, ctypes.byref(number)); print(number.value)")  # PR_GET_PDEATHSIG
    assert good(run(PYTHON, "-c", shown, env=FROM_ROOT | variables)).out == said


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGUSR1 and no prctl")
def test_a_script_with_a_device_mesh_keeps_its_exit_code(group, monkeypatch):
    """Exit code 85 tells a batch script to requeue the job."""
    handlers, codes = [], []
    monkeypatch.setattr("atexit.register", handlers.append)
    monkeypatch.setattr(cli, "_exit_at_once", codes.append)
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(SystemExit), cli.report_errors():
        sys.exit(85)
    for handler in handlers:
        handler()
    assert codes == [85] and mesh.size() == 1  # it still exists


def test_importing_common_changes_nothing_in_the_process():
    """Signal handlers stay, so asyncio shuts down on Ctrl-C. The signal on the parent's end does not change either."""
    said = good(run(PYTHON, PROGRAMS / "importing.py", env=FROM_ROOT | {"TORCHELASTIC_RUN_ID": "1"})).out
    assert said == "shut down\ninterrupted\n"


CLOSED = """import sys
from tqdm import tqdm
from common import cli

with cli.report_errors():
    for number in tqdm(range(3), disable=None):
        print(number)
    sys.stdout.flush(), sys.stderr.flush()
    with open(sys.argv[1], "w") as file:
        file.write(f"{number} {file.fileno() > 2}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows' shell closes no streams")
@pytest.mark.parametrize("closed", [
    *(pytest.param(stream, marks=pytest.mark.nightly) for stream in ("2>&-", ">&-")), "<&- >&- 2>&-"])
def test_a_run_without_standard_streams_trains_and_its_files_do_not_take_their_place(tmp_path, closed):
    result = run("sh", "-c", f'exec "$@" {closed}', "sh", PYTHON, "-c", CLOSED, tmp_path / "written", env=FROM_ROOT)
    assert result.code == 0 and (tmp_path / "written").read_text() == "2 True"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize(("end", "why"), [("| head -1", "Broken pipe"), ("> /dev/full", "No space left on device")])
def test_a_run_ends_with_one_line_if_its_output_cannot_be_written(end, why):
    """Exit code 1, so that the launcher ends the other processes."""
    program = "from common import cli\nwith cli.report_errors():\n    for n in range(10**6):\n        print(n)"
    result = run("sh", "-c", f'{{ "$@"; echo $? >&2; }} {end}', "sh", PYTHON, "-c", program, env=FROM_ROOT)
    assert result.err.splitlines() == [f"-c: error: standard output: {why}", "1"]


def test_any_file_name_can_be_printed():
    """With an encoding that lacks a character, and with a byte that is not UTF-8."""
    program = "from common import cli\nwith cli.report_errors():\n    print('caf\\xe9', 'caf\\udce9')"
    said = good(run(PYTHON, "-c", program, env=FROM_ROOT | {"PYTHONIOENCODING": "ascii"})).out
    assert said == r"caf\xe9 caf\udce9" + "\n"
