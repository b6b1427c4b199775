"""Which lines and which leftover processes make a launch fail the test: see run() in conftest.py."""
import os
import signal
import subprocess
import sys

import pytest
from conftest import PYTHON, descendants, processes_of_session, run, unexplained

PACKAGE = "/usr/lib/python3/dist-packages/torch/nn/functional.py:71: UserWarning: an operator is slow here\n"


def test_noise_is_what_has_no_reason():
    lines = [
        "nanobind: leaked 514 functions!", "Traceback (most recent call last):", "torch.AcceleratorError: no memory",
        "Exception ignored in: <function DataLoader.__del__>", "Exception in thread Thread-1 (_note):",
        "KeyboardInterrupt", "/home/me/train.py:120: UserWarning: lr_scheduler.step() before optimizer.step()",
        "Aborted (core dumped)"]
    python = f"{sys.prefix}/lib/python3.14/multiprocessing/popen_fork.py:6: DeprecationWarning: use of fork()\n"
    torch = "[rank0]:[W1125 06:44:57.619910708 reducer.cpp:1529] Warning: find_unused_parameters=True was specified\n"
    log = "W1125 06:36:39.761000 7693 torch/distributed/run.py:982] Setting OMP_NUM_THREADS\n"
    assert unexplained(PACKAGE + python + torch + log + "epoch 1\r" + "\n".join(lines)) == lines


def test_a_good_run_with_noise_fails():
    with pytest.raises(AssertionError, match="a good run of .* says:\n *nanobind: leaked 3 types!"):
        run(PYTHON, "-c", "import sys; print('nanobind: leaked 3 types!', file=sys.stderr)")
    assert run(PYTHON, "-c", "import sys; print('epoch 1', file=sys.stderr)").err == "epoch 1\n"
    assert run(PYTHON, "-c", "raise ValueError").code == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_processes_that_a_command_leaves_are_seen():
    """A process, its child and its grandchild, which prints a line when it exists."""
    with subprocess.Popen(["sh", "-c", "sh -c '(echo ready; exec sleep 60); true' & wait"], stdout=subprocess.PIPE,
                          start_new_session=True) as process:
        process.stdout.readline()
        family, session = descendants(process.pid), processes_of_session(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    assert family[0] == process.pid and len(family) == 3 and sorted(session) == sorted(family)
