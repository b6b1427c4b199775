"""verify --resume names what a resumed run has lost, in records of small loops that are forked from one process."""
import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import FROM_ROOT, PYTHON, TORCHRUN, command, good, run

from verify.bugs import __main__ as bugs
from verify.comparing import LIMITS
from verify.records import Run, in_step, join_samples
from verify.resuming import LOST, Resumed, choose, lost

PROGRAM = Path(__file__).parent / "interrupted.py"
# The cause, the step, and a part of the evidence
ANSWERS = {
    "right": None, "batches read and skipped": None, "buffer behind at first": None,
    "from the beginning": ("not-resumed", 1, "started from the beginning"),
    "half the weights": ("weights", 9, "2 of 4 tensors start again as in the first step"),
    "weights of rank 0": ("weights", 9, "4 of 4 tensors are those of rank 0 (only on ranks [1])"),
    "weights of the average": ("weights", 9, "4 of 4 tensors are averages of the weights"),
    "rounded weights": ("weights", 9, "4 of 4 tensors are not those of any step; the nearest is step 8"),
    "no optimizer": ("optimizer-state", 9, "exp_avg, exp_avg_sq, step of 4 tensors is missing"),
    "optimizer of rank 0": ("optimizer-state", 9, "exp_avg, exp_avg_sq of 4 tensors differs (only on ranks [1])"),
    "other settings": ("optimizer-state", 9, "betas is (0.9, 0.999) in the first run and (0.8, 0.99) in"),
    "no scheduler": ("learning-rate", 10, ", that of step 2, not "),
    "scheduler one step behind": ("learning-rate", 9, ", that of step 8, not "),
    "no scaler": ("scaler", 9, "'_growth_tracker': 3"), "epoch again": ("data", 9, "each rank reads 16 samples again"),
    "batch skipped": ("data", 9, "each rank skips 8 samples"),
    "other order": ("data", 9, "other samples"), "data of rank 0": ("data", 9, "all ranks read the samples of rank 0"),
    "smaller batches": ("data", 9, "a step reads 4 samples, not 8"),
    "other augmentation": ("random-state", 9, "equal labels, but other values"),
    "seeded again": ("random-state", 9, "the state of torch differs on ranks [0, 1]"),
    "random state of rank 0": ("random-state", 9, "all ranks have rank 0's state of torch"),
    "no average": ("buffers", 9, "average of 0.bias differs on rank 0"),
    "fewer steps": ("step-counter", 17, "takes 8 steps from step 9 on, the first run 10"),
    "no step": ("step-counter", 18, "takes no step"), "fails": ("failed", None, "fails when it is to resume"),
    "other loss": ("unknown", 9, "mean loss"),
    "random not restored": ("random-state", 9, "the state of random differs on ranks [0, 1]"),
    "average behind at the end": ("buffers", 18, "at the end, average of 0.bias differs"),
    "other factor": ("optimizer-state", 9, "equal gradients, but different updates"),
    "old weights": ("weights", 5, "all tensors are those after step 4, but the optimizer's state is that after step 8")}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    folder = tmp_path_factory.mktemp("records")
    good(run(PYTHON, PROGRAM, folder, "all", env=FROM_ROOT))
    return folder


@pytest.mark.parametrize("way", ANSWERS)
def test_what_a_resumed_run_has_lost_is_named(records, way):
    first = Run.read(records / (way if (records / way / "first").exists() else "right") / "first", "the run")
    third, report = Run.read(records / way / "resumed", "the run", first.extra), {"difference": 0.0, "notes": []}
    answer = lost(first, third, LIMITS["float64"], report, "error" if way == "fails" else None, False)
    if not ANSWERS[way]:
        said = "other buffer value differs on rank 0 before step 9, but agrees one step later"
        notes = [said] * (way == "buffer behind at first")
        assert answer is None and report == {"difference": 0.0, "resumed": 8, "notes": notes}
    else:
        cause, step, fact = ANSWERS[way]
        assert (answer[0], *answer[2:3]) == (cause, *[step] * (step is not None)) and fact in answer[1], answer


def test_other_padding_of_the_same_samples_is_no_difference(records):
    first, third = (Run.read(records / "right" / name, "the run") for name in ("first", "resumed"))
    for found, count, ones in ((first, 9, 0.0), (third, 1, 0.25)):
        for step in (step for steps in found.ranks.values() for step in steps):
            step["batches"] = [[loader, counts, [sample + 7 * ones for sample in samples], [[7, count, ones]], indices]
                               for loader, counts, samples, _, indices in step["batches"]]
            join_samples(step)
    assert lost(first, third, LIMITS["float64"], {"difference": 0.0}, None, False) is None


def test_every_cause_has_a_way_that_shows_it():
    assert {answer[0] for answer in ANSWERS.values() if answer} == set(LOST)


def test_the_weights_tell_the_step_before_the_samples_do():
    """Weights that hardly move fit several steps; a run that reads its first samples again is still a resumed one."""
    def made(*steps):
        return Run("", [(0, [{"event": "step", "flags": [], "samples": [sample], "batches": [[0, [], [sample], [], []]],
                              "rows": [["w", [1], [start] * 3, [0.1], [1.0] * 3, [value] * 3]]}
                             for sample, start, value in steps])])

    first = made((1.0, 1.0, 1.00001), (2.0, 1.0, 1.00002), (3.0, 1.0, 1.00003))
    still = made((1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (3.0, 1.0, 1.1))
    for one, start, step in (first, made((1.0, 1.00002, 1.00003)), 2), (still, made((2.0, 1.0, 1.0)), 1):
        resumed = Resumed(one, start, LIMITS["own"])
        assert (resumed.step, resumed.unfit) == (step, {})


@pytest.mark.parametrize(("read", "extra"), [
    ([[1], [2], [3]], 0), ([[0, 1], [2], [3]], 0), ([[8, 9, 0, 1], [2], [3]], 0), ([[0, 1, 2], [3], []], 1)])
def test_batches_that_are_skipped_are_no_part_of_the_first_step(read, extra):
    steps = in_step([{"batches": [[0, [], [number], [], []] for number in numbers]} for numbers in read], extra)
    assert [step["samples"] for step in steps] == [[1], [2], [3]]


@pytest.mark.parametrize(("after", "length", "sent", "step"), [
    ([4, 8, 12], 18, None, 10), ([5, 10, 15, 20], 20, None, 13), ([10], 20, None, 15), ([20], 20, None, 0),
    ([], 20, None, 0), ([], 20, 15, 10), ([1, 2, 3, 4, 5], 6, None, 3)])
def test_the_kill_comes_between_two_saves(after, length, sent, step):
    run = Run("", [(0, [{"event": "step", "rows": [], "flags": [], "batches": []}] * length + [
        {"event": "saved", "after": number} for number in after])])
    assert choose(run, sent) == step


def resume(folder, *options, way="right"):
    return run(PYTHON, "-m", "verify", "--resume", "--fresh", "out", *options, shlex.join([PYTHON, str(PROGRAM), way]),
               cwd=folder, env=FROM_ROOT)


@pytest.mark.parametrize(("arguments", "names"), [
    (["--resume", "true"], "--fresh PATH"), (["--resume", "--watch", "--fresh", "out", "true"], "exclude each other"),
    (["--resume", "--fresh", "out", "--signal", "NO", "true"], "--signal NO"),
    (["--resume", "--fresh", "out", "--kill-after", "-1", "true"], "--kill-after -1"),
    (["--resume", "--fresh", "out", "true", "true"], "2 COMMAND given, 1 needed"),
    (["--kill-after", "3", "true", "true"], "need --resume"),
    (["--resume", "--fresh", ".", "true"], "--fresh .: exists already")])
def test_wrong_usage_is_named_in_one_line(arguments, names, tmp_path):
    said = run(PYTHON, "-m", "verify", *arguments, cwd=tmp_path, env=FROM_ROOT)
    assert said.code == 2 and said.out == "" and len(said.err.splitlines()) == 1 and names in said.err


@pytest.mark.drill
def test_a_run_that_saves_on_a_signal_repeats_no_step(tmp_path):
    said = resume(tmp_path, "--kill-after", "10", "--signal", "TERM", "--json", "report.json")
    assert said.code == 0 and "\nsame: 8 steps from step 11 on, bit for bit; 0 done twice\n" in said.out, said.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["killed"], report["resumed"], report["steps"], report["ranks"]) == (10, 10, [18, 10, 8], [1, 1])
    assert report["saves"] == [4, 8, 12, 16] and not (tmp_path / "out").exists()


@pytest.mark.drill
def test_a_kill_before_the_first_save_is_not_comparable(tmp_path):
    said = resume(tmp_path, "--kill-after", "4")
    assert said.code == 2 and said.out.splitlines()[-1].startswith(
        "not comparable: no file in out changed before step 4; the first change came after step 4: kill later")


@pytest.mark.parametrize(("way", "options", "code", "last"), [
    *(pytest.param(*row, marks=pytest.mark.drill) for row in (
        ("right", ["--steps", "14"], 0, "same: 6 steps from step 9 on, bit for bit; 2 done twice"),
        ("seeded again", [], 1, "lost: random-state: the state of torch differs on ranks [0]"))),
    *(pytest.param(*row, marks=pytest.mark.nightly) for row in (
        ("fails", [], 1, "ValueError: the shapes do not fit"),
        ("fixed float32", [], 0, "note: in float64, the command fails after 0 step(s), so the runs had their own prec"),
        ("right", ["--kill-after", "18"], 2, "not comparable: the command takes 18 steps"),
        ("right", ["--signal", "CHLD"], 2, "not comparable: the second run trained to its end after the signal"),
        ("right", ["--kill-after", "3", "--signal", "INT"], 2, "not comparable: the signal after step 3 left")))])
def test_the_answer_of_the_command_line(tmp_path, way, options, code, last):
    said = resume(tmp_path, *options, way=way)
    assert said.code == code and said.out.splitlines()[-1].startswith(last), said.out


@pytest.mark.drill
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_verify_leaves_nothing(tmp_path, number):
    (tmp_path / "tmp").mkdir()
    command = [PYTHON, "-m", "verify", "--resume", "--fresh", "out", f"{PYTHON} {PROGRAM} right"]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **FROM_ROOT, "TMPDIR": str(tmp_path / "tmp")},
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 60
    while not [*tmp_path.glob("tmp/verify-*/*/*.jsonl")] and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and out == "" and not [*tmp_path.glob("tmp/verify-*")], out
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 3, 4])
@pytest.mark.parametrize("name", [name for name, program in bugs.programs().items() if program.folder])
def test_a_right_program_resumes_on_any_number_of_processes(tmp_path, name, processes):
    said = run(PYTHON, "-m", "verify", "--resume", "--fresh", "out", shlex.join(
        [*TORCHRUN, f"--nproc-per-node={processes}", str(bugs.FOLDER / f"{name}.py")]), cwd=tmp_path, env=FROM_ROOT).out
    assert said.splitlines()[-1].startswith("same: "), said


SHORT = ["--epochs", "2", "--workers", "0", "--device", "cpu", "--resume", "auto"]
IMAGES = [*SHORT, "--batch-size", "96"]
WINDOWS = [*SHORT, "--batch-size", "12", "--windows", "146", "--length", "32", "--sample", ""]


@pytest.mark.nightly
@pytest.mark.parametrize(("script", "options"), [
    ("train_elastic.py", IMAGES), ("train_DCP.py", IMAGES), ("train_combined.py", [*IMAGES, "--ema", "0.9"]),
    ("language/train_combined.py", [*WINDOWS, "--snapshot-every", "5"]), ("language/train_4D.py", WINDOWS),
    ("minimal/train_resume.py", ["--device", "cpu", "--epochs", "5"])])
def test_our_scripts_resume_bit_for_bit(tmp_path, script, options):
    words = [*command(script), *options, "--output" if "minimal" in script else "--output-dir", tmp_path / "out"]
    said = run(PYTHON, "-m", "verify", "--resume", "--fresh", tmp_path / "out", "--fresh", tmp_path / "out.last",
               shlex.join(map(str, words)), env=FROM_ROOT).out
    assert said.splitlines()[-1].startswith("same: ") and ", bit for bit" in said, said
