"""Which lines make a successful launch fail the test: see run() in conftest.py."""
import sys

import pytest
import test_gpu
from conftest import PYTHON, WARNINGS, run, unexplained

PACKAGE = "/usr/lib/python3/dist-packages/torch/nn/functional.py:71: UserWarning: an operator is slow here\n"


@pytest.mark.parametrize("line", [
    "nanobind: leaked 514 functions!", "Traceback (most recent call last):", "torch.AcceleratorError: out of memory",
    "Exception ignored in: <function DataLoader.__del__>", "Exception in thread Thread-1 (_note):", "KeyboardInterrupt",
    "/home/me/train.py:120: UserWarning: lr_scheduler.step() before optimizer.step()", "Aborted (core dumped)"])
def test_noise_is_seen(line):
    assert unexplained(f"{PACKAGE}epoch 1\r{line}\n") == [line]


def test_what_has_a_reason_is_not_noise():
    python = f"{sys.prefix}/lib/python3.14/multiprocessing/popen_fork.py:6: DeprecationWarning: use of fork()\n"
    torch = "[rank0]:[W1125 06:44:57.619910708 reducer.cpp:1529] Warning: find_unused_parameters=True was specified\n"
    log = "W1125 06:36:39.761000 7693 torch/distributed/run.py:982] Setting OMP_NUM_THREADS\n"
    assert unexplained(PACKAGE + python + torch + log) == []


def test_a_good_run_with_noise_fails():
    with pytest.raises(AssertionError, match="a good run of .* says:\n *nanobind: leaked 3 types!"):
        run(PYTHON, "-c", "import sys; print('nanobind: leaked 3 types!', file=sys.stderr)")
    assert run(PYTHON, "-c", "import sys; print('epoch 1', file=sys.stderr)").err == "epoch 1\n"
    assert run(PYTHON, "-c", "raise ValueError").code == 1


@pytest.mark.parametrize("message, category, code", [
    ("The module torch.distributed.launch is deprecated\nand going to be removed", "FutureWarning", 0),
    ("The module torch.distributed.launch is going to be removed", "FutureWarning", 1),
    ("this argument is deprecated", "DeprecationWarning", 1)])
def test_a_warning_without_a_reason_is_an_error_in_a_strict_launch(message, category, code):
    """This includes the processes that it starts."""
    inner = f"import warnings; warnings.warn({message!r}, {category})"
    outer = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {inner!r}]))"
    assert run(PYTHON, "-c", outer, env=WARNINGS, quiet=False).code == code


def test_a_row_of_the_gpu_tests_hears_every_warning_of_torch():
    """This covers warnings that depend on package versions, and logs of torch in C++ and Python."""
    said = [
        "[rank0]:[W1125 06:44:57.619910708 ProcessGroupNCCL.cpp:1553] Warning: destroy_process_group() was not called",
        "[rank0]:[W1125 06:44:57.1 ProcessGroupNCCL.cpp:5068] using GPU 0 as device used by this process for barrier",
        "/usr/lib/python3/site-packages/torch/_inductor/compile_fx.py:236: UserWarning: TensorFloat32 is not enabled",
        "W1125 06:36:39.761000 7693 torch/_dynamo/convert_frame.py:1676] torch._dynamo hit config.recompile_limit (8)",
        "/home/me/train.py:120: UserWarning: lr_scheduler.step() before optimizer.step()"]
    explained = [
        "/usr/lib/python3/site-packages/tensorboard/compat.py:1: DeprecationWarning: old",
        "/usr/lib/python3.12/multiprocessing/popen_fork.py:6: DeprecationWarning: use of fork()",
        "W1125 06:36:39.761000 7693 torch/distributed/run.py:982] Setting OMP_NUM_THREADS",
        "[rank1]:[W1125 06:44:57.6 reducer.cpp:1529] Warning: find_unused_parameters=True was specified in DDP"]
    assert unexplained("\n".join([*said, *explained, "epoch 1"]), test_gpu.WARNING, test_gpu.EXPLAINED) == said
