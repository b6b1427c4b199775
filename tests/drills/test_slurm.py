"""train_DDP.py under a real srun, and the unchanged files of launch/, on a Slurm cluster with two nodes."""
import json
import re
import time

import pytest
import slurm
from conftest import FROM_ROOT, PYTHON, REFERENCE, distance, epochs, good, load, run, same
from live import Live

pytestmark = pytest.mark.skipif(bool(slurm.missing()), reason=f"needs {slurm.missing()}")


@pytest.fixture(scope="module")
def environment():
    with slurm.cluster() as environment:
        yield {name: environment[name] for name in ("SLURM_CONF", "PATH")}


def srun(environment, *options):
    start = ["srun", "--kill-on-bad-exit=1", *options]
    return lambda *command: run(*start, *command, env=FROM_ROOT | environment)


def batch(environment, log, *command):
    """Run a batch job, as a user does in the folder of the scripts; return its output."""
    good(run("sbatch", "--wait", "-o", log, *command, env=environment))
    return log.read_text()


def test_tasks_of_srun_are_the_processes_of_a_group(environment, tmp_path):
    """An uneven placement of three tasks counts three. The step starts a module; launch/srun.sbatch starts a script."""
    said = good(srun(environment, "-N2", "-n3", "--distribution=arbitrary", "--nodelist=cook1,cook1,cook2")(
        PYTHON, "-m", "language.train_DDP", "--epochs", "1", "--windows", "12", "--length", "16", "--batch-size", "6",
        "--sample", "", "--output-dir", tmp_path / "three")).out
    assert "3 process(es) x 1 micro-batch x 2" in said and len(epochs(said)) == 1


def test_tasks_check_their_machines(environment, tmp_path):
    command = PYTHON, "check.py", "--cpu", "--json", "--folder", tmp_path
    said = json.loads(good(srun(environment, "-N2", "-n2")(*command)).out)
    assert [facts["rank"] for facts in said["ranks"]] == [0, 1] and said["stage"] == "report"


@pytest.mark.nightly
def test_a_batch_script_is_no_task(environment, tmp_path):
    """sbatch sets SLURM_PROCID in the script itself: plain python there is a group of one and waits for nobody."""
    script = f"env | grep -c '^SLURM_PROCID'; {PYTHON} {' '.join(REFERENCE)} --epochs 1 --output-dir {tmp_path}"
    said = batch(environment, tmp_path / "out", "-N2", "-n2", "--wrap", script)
    assert said.startswith("1\n") and "1 process(es) x 1 micro-batch x 96" in said and len(epochs(said)) == 1


@pytest.mark.nightly
def test_two_steps_of_a_job_train_side_by_side(environment, tmp_path):
    """Each has a port of its own. One is told MASTER_ADDR and finds no scontrol, as in a container."""
    train = f"{PYTHON} {' '.join(REFERENCE)} --epochs 1 --output-dir {tmp_path}"
    step = "srun --exact -n2 -c1 --kill-on-bad-exit=1"
    batch(environment, tmp_path / "out", "-N1", "-n4", "--wrap", f"""
        {step} {train}/first > {tmp_path}/first.out 2>&1 &
        {step} env PATH= MASTER_ADDR=cook1 {train}/second > {tmp_path}/second.out 2>&1 &
        wait""")
    for name in ("first", "second"):
        said = (tmp_path / f"{name}.out").read_text()
        assert "2 process(es) x 1 micro-batch x 48" in said and len(epochs(said)) == 1, said


def test_a_task_computes_with_the_cores_of_its_own_mask(environment):
    """Two tasks on a node of four cores, with masks of two: two cores each, and not one.

    The masks are named so that two real cores are enough to see it.
    """
    both = srun(environment, "-N1", "-n2", "-c2", "--cpu-bind=mask_cpu:0x3,0x3")
    shown = ("import os; from common import launch; os.environ.update(launch.launch_environment()); "
             "print(launch.cores_per_process(), os.environ['LOCAL_WORLD_SIZE'])")
    assert good(both(PYTHON, "-c", shown)).out == "2 2\n" * 2


def test_the_batch_files_train_what_two_processes_train(environment, reference, tmp_path):
    """On two nodes. Not bit for bit: a task computes with its cores, and so may sum in another order."""
    for name in ("srun", "torchrun"):
        said = batch(environment, tmp_path / f"{name}.out", "-N2", "--ntasks-per-node=1", "-c2",
                     f"launch/{name}.sbatch", *REFERENCE, "--output-dir", tmp_path / name)
        assert "2 process(es) x 1 micro-batch x 48" in said
        assert distance(reference, tmp_path / name / "last.pt") < 1e-5
        assert len(list((tmp_path / name).glob("events*"))) == 1


def test_a_preempted_run_goes_on_to_the_same_weights(environment, tmp_path):
    """A signal before the time limit, and a requeue from outside: each time it saves, and goes on at that step."""
    arguments = ["-N2", "--ntasks-per-node=1", "-c2", "launch/elastic.sbatch", *REFERENCE[1:], "--epochs", "8",
                 "--log-every", "2", "--snapshot-every", "5", "--output-dir"]
    batch(environment, tmp_path / "whole.out", *arguments, tmp_path / "whole")
    log = tmp_path / "elastic.out"
    log.touch()

    def ask(*command):
        return run(*command, env=environment).out

    def wait_for(condition):
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.1)

    def pending():
        return "JobState=PENDING" in ask("scontrol", "show", "job", number)

    submit = ["sbatch", "--wait", "--parsable", "-o", log, *arguments, tmp_path / "elastic"]
    with Live(*submit, env=environment) as job:
        number = job.wait_for(r"^\d+$")
        for count, command in enumerate((["scontrol", "requeue"], ["scancel", "--signal=USR1"])):
            wait_for(lambda: f"epoch {3 * count + 2:3}/" in log.read_text())  # noqa: B023
            ask(*command, number)
            wait_for(pending)
            # Slurm would wait for two minutes, in which what is left of the first start ends
            wait_for(lambda: not ask("pgrep", "-f", rf"slurmstepd: \[{number}\."))
            now = ["scontrol", "update", f"jobid={number}", "StartTime=now"]
            wait_for(lambda: not ask(*now) and not pending())  # noqa: B023
            assert log.read_text().count("stopped by a signal and saved") == count + 1, log.read_text()
        assert job.end(240) == 0, log.read_text()
    said = log.read_text()
    assert len(re.findall(r"^resume .* steps of epoch \d+ are done", said, re.M)) >= 1
    assert len(re.findall("^resume ", said, re.M)) == 2 and "train_elastic.py: error" not in said
    assert same(load(tmp_path / "whole/last.pt"), load(tmp_path / "elastic/last.pt"))
