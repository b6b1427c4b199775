"""tools/gpu_report.py: what it measures, how it stops, and what its report says of tests and measurements."""
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import gpu_report
import pytest
import test_gpu
from conftest import PYTHON, ROOT, SCRIPTS, good, processes_of_session, run, unexplained

HERE = {"gpus": ["T4", "T4"], "torch": "2.14.1", "commit": "abc", "details": "CPU: two cores"}


def plan(count=2, device=None, nanogpt=None):
    return list(gpu_report.measurements(count, device, ROOT / "tokens", nanogpt))


def test_the_report_lists_what_was_not_run_with_its_reason(tmp_path):
    notes = tmp_path / "notes.json"
    gpu_report.note(notes, "machine", **HERE, date="2026-11-25")
    gpu_report.note(notes, "tests", names=["test_a", "test_b", "test_c", "test_d"])
    for name, result, said, text in (("test_a", "passed", "", ""), ("test_b", "failed", "", "E   assert 1 == 2"),
                                     ("test_c", "skipped", "needs 4 GPUs", "")):
        gpu_report.note(notes, name, result=result, seconds=60, said=said, text=text)
    gpu_report.write(tmp_path / "report.md", gpu_report.read(notes), [])
    text = (tmp_path / "report.md").read_text()
    assert "# 2 x T4, torch 2.14.1\n" in text and "1 passed, 1 failed, 2 not run." in text
    for row in ("| `test_a` | passed | 60 |  |", "| `test_b` | **failed** | 60 |  |",
                "| `test_c` | not run | 60 | needs 4 GPUs |", "| `test_d` | not run | 0 | the time was over |"):
        assert row in text, text
    assert "E   assert 1 == 2" in text


def test_the_table_shows_the_first_epoch_apart_and_compares_within_a_precision(tmp_path):
    found = {"bare step": {"result": "passed", "first": 8.25, "speeds": [90, 100, 110], "peak": None},
             "bare step --bf16": {"result": "passed", "first": 8, "speeds": [200, 200], "peak": None},
             "train.py": {"result": "passed", "first": 9, "speeds": [80], "peak": 1234.0},
             "train_amp.py --precision fp16": {"result": "stopped", "first": 9, "speeds": [150, 160], "peak": None,
                                               "seconds": 71.6},
             "train_FSDP.py": {"result": "stopped", "seconds": 60},  # before its first epoch
             "train_DDP.py": {"result": "failed", "seconds": 9}}
    lines = [each for each in plan(1) if each.table.startswith("resnet18")
             and each.what in (*found, "train_amp.py --precision bf16")]
    text = gpu_report.of_speed(lines, {each.name: found[each.what] for each in lines if each.what in found})
    assert text.splitlines()[2:] == [
        "| bare step | 8.2 | 100 (90 to 110) | 1.00 | - |",
        "| bare step --bf16 | 8.0 | 200 | 1.00 | - |",
        "| train.py | 9.0 | 80 | 0.80 | 1,234 MiB |",
        "| train_DDP.py | - | **failed** | - | - |",
        "| train_amp.py --precision bf16 | - | not run | - | - |",
        "| train_amp.py --precision fp16 (stopped after 72 s) | 9.0 | 155 (150 to 160) | 0.78 | - |",
        "| train_FSDP.py (stopped after 60 s) | - | **stopped** | - | - |"]


def test_the_plan_has_every_script_of_the_classifiers_and_one_gpu_needs_one_process():
    planned = plan()
    assert set(SCRIPTS) <= {each.what.split()[0] for each in planned}
    assert len({each.name for each in planned}) == len(planned)
    assert {each.what.split()[0] for each in planned if "one device" in each.what} == {
        "bare", "train.py", "language/train.py"}
    for each in planned:
        batch, processes = 512 if each.table.endswith("images/s") else 32, 1 if "one device" in each.what else 2
        assert each.command[each.command.index("--batch-size") + 1] == str(batch * processes)
    assert all("--nproc-per-node=2" in each.command for each in planned if each.what.endswith("train_DDP.py"))
    one = plan(1)
    assert not any(word in ("--nproc-per-node=2", "--nprocs") for each in one for word in each.command)
    tables = {each.table: each.what for each in reversed(one)}
    assert tables == {"resnet18, fake, batch 512, 1 process: images/s": "bare step",
                      "gpt_124m, 1024 tokens per window, batch 32, 1 process: tokens/s": "bare step"}


@pytest.mark.parametrize("line", [
    "/home/me/tests/programs/around.py:56: UserWarning: Synchronization debug mode is a prototype feature and does "
    "not yet detect all synchronizing operations (Triggered internally at /pytorch/torch/csrc/cuda/Module.cpp:986.)",
    "/env/lib/python3.12/site-packages/torch/profiler/profiler.py:224: UserWarning: Warning: Profiler clears events at "
    "the end of each cycle.Only events from the current cycle will be reported."])
def test_what_torch_says_of_a_tests_own_call_fails_no_row(line):
    assert unexplained(line, test_gpu.WARNING, test_gpu.EXPLAINED) == []
    other = line.split("Warning: ")[0] + "Warning: Grad strides do not match bucket view strides"
    assert unexplained(other, test_gpu.WARNING, test_gpu.EXPLAINED) == [other]


def test_a_test_that_is_done_is_not_started_again(tmp_path):
    gpu_report.note(tmp_path / "notes.json", "test_a", result="passed")
    items = [SimpleNamespace(name=name, nodeid=f"tests/test_gpu.py::{name}") for name in ("test_a", "test_b", "test_c")]
    selection = gpu_report.Selection(tmp_path / "notes.json", "test_[ab]")
    selection.pytest_collection_modifyitems(items)
    assert selection.selected == ["tests/test_gpu.py::test_b"]
    assert gpu_report.read(tmp_path / "notes.json")["tests"]["names"] == ["test_a", "test_b"]


@pytest.mark.drill
def test_a_machine_without_gpus_passes_none_of_their_tests():
    """Each test is listed, and the exit code is not 0."""
    done = subprocess.run([PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-k", "drift or XPU", "tests/test_gpu.py"],
                          cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 5, done.stdout + done.stderr
    for row in ("drift_apart[gpu 8]: needs 8 GPUs; this machine has 0", "a_cpu_trains[XPU]: needs XPU"):
        assert done.stdout.count(row) == 1, done.stdout


@pytest.mark.nightly
def test_tests_run_several_at_a_time_and_at_the_end_those_that_fill_a_gpu(tmp_path):
    """Without GPUs, each test is skipped in its turn."""
    notes = tmp_path / "notes.json"
    program = ("import pathlib, gpu_report; gpu_report.run_tests(None, pathlib.Path('notes.json'), "
               "'out_of_memory|detector_trains|XPU')")
    said = good(run(PYTHON, "-c", program, cwd=tmp_path,
                    env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"})).out
    names = gpu_report.read(notes)["tests"]["names"]
    done = [name for name, each in gpu_report.read(notes).items() if each.get("result") == "skipped"]
    assert len(names) == 4 and sorted(done) == sorted(names)
    assert done[-1].startswith("test_out_of_memory") and not names[-1].startswith("test_out_of_memory")
    assert "bringing up nodes" in said.split("3 skipped")[0] and "bringing up nodes" not in said.split("3 skipped")[1]


@pytest.mark.drill
def test_a_measurement_that_outlasts_its_share_ends_with_all_its_processes(tmp_path):
    """The epochs that were done count. The child is in a session of its own, as torchrun's are."""
    pytest.importorskip("psutil", reason="no psutil: pip install -r requirements/bench.txt")
    child = "import time; time.sleep(600)"
    program = f"""import subprocess, sys, time
print(subprocess.Popen([sys.executable, '-c', '{child}'], start_new_session=True).pid, file=sys.stderr, flush=True)
for number in (1, 2, 3):
    print(f'epoch   {{number}}/9  0.500 s  {{number}}00 images/s  7 MiB')
time.sleep(600)"""
    begin = time.monotonic()
    found = gpu_report.measure(gpu_report.Measurement("table", "what", [sys.executable, "-c", program]), tmp_path, 5)
    assert time.monotonic() - begin < 30
    assert found["result"] == "stopped" and found["first"] == 0.5
    assert found["speeds"] == [200, 300] and found["peak"] == 7
    session, end = int((tmp_path / "err").read_text()), time.monotonic() + 10
    while processes_of_session(session) and time.monotonic() < end:
        time.sleep(0.05)
    assert not processes_of_session(session)


@pytest.mark.nightly
def test_nanogpt_and_the_bare_step_of_the_language_model_are_measured(tmp_path):
    """In place of nanoGPT, a program that prints its lines."""
    pytest.importorskip("psutil", reason="no psutil: pip install -r requirements/bench.txt")
    (tmp_path / "train.py").write_text(
        "import sys\nassert '--n_embd=128' in sys.argv and '--device=cpu' in sys.argv\n"
        "for number in range(17):\n"
        "    print(f'iter {number}: loss 4.2, time {1000 if number < 4 else 500}.00ms, mfu 1.00%')")
    wanted = {each.what: each for each in gpu_report.measurements(2, "cpu", tmp_path, tmp_path)
              if each.table.startswith("gpt_tiny")}
    theirs = gpu_report.measure(wanted["nanoGPT --bf16"], tmp_path, 60)
    assert (theirs["first"], theirs["speeds"]) == (4, [2 * 4 * 32] * 3)
    gpu_report.write_tokens(tmp_path)
    ours = gpu_report.measure(wanted["bare step --bf16"], tmp_path, 200)
    assert ours["result"] == "passed" and len(ours["speeds"]) == 3 and min(ours["speeds"]) > 0, ours
