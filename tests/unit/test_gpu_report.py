"""tools/gpu_report.py: what its report says of tests and measurements, and that docs/gpus says what it has."""
import os
import subprocess
from types import SimpleNamespace

import gpu_report
import pytest
from conftest import PYTHON, ROOT, SCRIPTS

HERE = {"gpus": ["T4", "T4"], "torch": "2.14.1", "commit": "abc", "details": "CPU: two cores"}


def test_the_report_lists_what_was_not_run_with_its_reason(tmp_path):
    notes = tmp_path / "notes.json"
    gpu_report.note(notes, "machine", **HERE, date="2026-11-25")
    gpu_report.note(notes, "tests", names=["test_a", "test_b", "test_c", "test_d"])
    for name, result, said, text in (("test_a", "passed", "", ""), ("test_b", "failed", "", "E   assert 1 == 2"),
                                     ("test_c", "skipped", "needs 4 GPUs", "")):
        gpu_report.note(notes, name, result=result, seconds=60, said=said, text=text)
    wanted = [each for each in gpu_report.measurements(2, None) if each.what in ("bare step", "train_FSDP.py")][:2]
    gpu_report.note(notes, wanted[0].name, result="passed", seconds=9, speeds=[90, 100, 110], peak=None)
    wanted += [each for each in gpu_report.measurements(2, None) if each.table == "Memory"]
    gpu_report.note(notes, wanted[2].name, result="passed", seconds=9, said="Memory: its table")
    gpu_report.write(tmp_path / "report.md", gpu_report.read(notes), wanted)
    text = (tmp_path / "report.md").read_text()
    assert "# 2 x T4, torch 2.14.1\n" in text and "1 passed, 1 failed, 2 not run." in text
    for row in ("| `test_a` | passed | 60 |  |", "| `test_b` | **failed** | 60 |  |",
                "| `test_c` | not run | 60 | needs 4 GPUs |", "| `test_d` | not run | 0 | the time was over |",
                "| bare step | 100 (90 to 110) | 1.00 | - |", "| train_FSDP.py | not run | - | - |",
                "## Memory\n\nMemory: its table\n"):
        assert row in text, text
    assert "E   assert 1 == 2" in text


def test_every_script_of_the_classifiers_is_measured():
    planned = list(gpu_report.measurements(2, None))
    assert set(SCRIPTS) <= {each.what.split()[0] for each in planned}
    assert len({each.name for each in planned}) == len(planned)


@pytest.mark.drill
def test_a_machine_without_gpus_passes_none_of_their_tests():
    """Each test is listed, and the exit code is not 0."""
    done = subprocess.run([PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-k", "drift or XPU", "tests/test_gpu.py"],
                          cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 5, done.stdout + done.stderr
    for row in ("drift_apart[gpu 8]: needs 8 GPUs; this machine has 0", "a_cpu_trains[XPU]: needs XPU"):
        assert done.stdout.count(row) == 1, done.stdout


def test_a_test_that_is_done_is_not_started_again(tmp_path):
    gpu_report.note(tmp_path / "notes.json", "test_a", result="passed")
    items = [SimpleNamespace(name=name) for name in ("test_a", "test_b", "test_c")]
    gpu_report.Tests(tmp_path / "notes.json", "test_[ab]").pytest_collection_modifyitems(items)
    assert [item.name for item in items] == ["test_b"]
    assert gpu_report.read(tmp_path / "notes.json")["tests"]["names"] == ["test_a", "test_b"]
