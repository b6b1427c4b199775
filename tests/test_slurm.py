"""train_DDP.py under a real srun, on two nodes."""
import pytest
import slurm
from conftest import PYTHON, TORCHRUN, distance, epochs, good, run

pytestmark = [pytest.mark.drill, pytest.mark.skipif(bool(slurm.missing()), reason=f"needs {slurm.missing()}")]
ARGUMENTS = ["train_DDP.py", "--epochs", "2", "--batch-size", "96", "--lr", "0.0003"]


@pytest.fixture(scope="module")
def environment():
    with slurm.cluster() as environment:
        yield environment


def srun(environment, *options):
    names = ("SLURM_CONF", "PATH")
    return lambda *command: run("srun", "--kill-on-bad-exit=1", *options, *command,
                                env={name: environment[name] for name in names})


def test_tasks_of_srun_are_the_processes_of_a_group(environment, tmp_path):
    """Two tasks on two nodes train what torchrun's two processes train; an uneven placement of three counts three.

    Not bit for bit: alone on its node, a task computes with all the node's cores, and so sums in another order.
    """
    good(run(*TORCHRUN, "--nproc-per-node=2", *ARGUMENTS, "--output-dir", tmp_path / "torchrun"))
    said = good(srun(environment, "-N2", "-n2")(PYTHON, *ARGUMENTS, "--output-dir", tmp_path / "srun")).out
    assert "2 process(es) x 1 micro-batch x 48" in said
    assert distance(tmp_path / "torchrun/last.pt", tmp_path / "srun/last.pt") < 1e-5
    assert len(list((tmp_path / "srun").glob("events*"))) == 1
    said = good(srun(environment, "-N2", "-n3", "--distribution=arbitrary", "--nodelist=cook1,cook1,cook2")(
        PYTHON, *ARGUMENTS, "--epochs", "1", "--output-dir", tmp_path / "three")).out
    assert "3 process(es) x 1 micro-batch x 32" in said and len(epochs(said)) == 1


def test_a_mistake_under_srun_is_one_line(environment, tmp_path):
    result = srun(environment, "-N2", "-n2")(PYTHON, *ARGUMENTS, "--batch-size", "97", "--output-dir", tmp_path)
    assert result.code != 0
    said = [line for line in result.err.splitlines() if line.startswith("train_DDP.py")]
    assert said == ["train_DDP.py: error: --batch-size 97: not a multiple of the 2 processes that share it"]
    assert "Traceback" not in result.err


def test_a_batch_script_is_no_task(environment, tmp_path):
    """sbatch sets SLURM_PROCID in the script itself: plain python there is a group of one and waits for nobody."""
    batch = {name: value for name, value in environment.items() if name in ("SLURM_CONF", "PATH")}
    script = f"env | grep -c '^SLURM_PROCID'; {PYTHON} {' '.join(ARGUMENTS)} --epochs 1 --output-dir {tmp_path}"
    good(run("sbatch", "--wait", "-N2", "-n2", "-o", tmp_path / "out", "--wrap", script, env=batch))
    said = (tmp_path / "out").read_text()
    assert said.startswith("1\n") and "1 process(es) x 1 micro-batch x 96" in said and len(epochs(said)) == 1
