"""Other launchers: the manifest's command on two nodes, and train_DDP.py in the workers of Ray Train."""
import os
import re
import signal
import subprocess

import pytest
import yaml
from conftest import PYTHON, REFERENCE, ROOT, TORCHRUN, distance, epochs, free_port, good, run

ARGUMENTS = REFERENCE[1:]
CPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.nightly
def test_the_manifests_command_joins_nodes_by_the_variables_of_kubeflow(reference, tmp_path):
    """The environments of two pods on one machine; the command is unchanged except for the size of the training."""
    manifest = yaml.safe_load((ROOT / "launch/trainjob.yaml").read_text())
    _, script, *arguments = manifest["spec"]["trainer"]["command"]
    small = [*arguments, *ARGUMENTS, "--dataset=digits", "--model=cnn", "--weight-decay=1e-4"]
    nodes, port = [], free_port()
    for rank in range(2):
        pet = dict(PET_NNODES="2", PET_NPROC_PER_NODE="1", PET_NODE_RANK=str(rank), PET_MASTER_ADDR="localhost",
                   PET_MASTER_PORT=str(port))
        command = [*TORCHRUN, str(ROOT / script.rsplit("/", 1)[1]), *small, f"--output-dir={tmp_path / 'kubeflow'}"]
        nodes.append(subprocess.Popen(command, env=os.environ | CPU | pet, stdout=subprocess.PIPE, text=True))
    said = [node.communicate(timeout=180)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert "2 process(es) x 1 micro-batch x 48" in said[0] and len(epochs(said[0])) == 2 and not epochs(said[1])
    assert distance(tmp_path / "kubeflow/last.pt", reference) < 1e-5


@pytest.fixture
def ray_environment(tmp_path):
    pytest.importorskip("ray.train.torch", reason="no Ray: pip install -r requirements/drill.txt")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores: Ray gives each worker one")
    # Ray keeps a token in HOME. By default, its workers have niceness 15, and wait while other tests compute
    return CPU | {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


@pytest.mark.nightly
def test_rays_workers_are_the_processes_of_a_group(ray_environment, reference, tmp_path):
    """The weights equal torchrun's; relative paths are the caller's, although each worker has its own folder."""
    driver = [PYTHON, ROOT / "launch/ray_train.py", "--num-workers", "2", "--"]
    command = [*driver, *ARGUMENTS, "--output-dir", "ray"]
    said = good(run(*command, cwd=tmp_path, env=ray_environment, quiet=False)).out  # Ray reports what it tries again
    assert said.count("2 process(es) x 1 micro-batch x 48") == 1
    assert distance(reference, tmp_path / "ray/last.pt") < 1e-5
    assert len(list((tmp_path / "ray").glob("events*"))) == 1


@pytest.mark.nightly
def test_ray_starts_again_what_died(ray_environment, tmp_path):
    command = [PYTHON, ROOT / "launch/ray_train.py", "--num-workers", "2", "--max-failures", "1", "--", *ARGUMENTS,
               "--epochs", "6", "--resume", "auto", "--output-dir", tmp_path / "out"]
    driver = subprocess.Popen([str(part) for part in command], env=os.environ | ray_environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    victim, said = None, []
    for line in driver.stdout:
        said.append(line)
        if found := re.search(r"pid=(\d+)\) world_rank=1,", line):
            victim = victim or int(found[1])
        if victim and "epoch   1/6" in line:
            os.kill(victim, signal.SIGKILL)
    said = "".join(said)
    assert driver.wait(60) == 0, said[-3000:]
    assert re.search(r"resume \S+: epoch \d is done", said) and "epoch   6/6" in said


@pytest.mark.nightly
def test_a_failure_under_ray_is_one_line(ray_environment, tmp_path):
    result = run(PYTHON, "launch/ray_train.py", "--num-workers", "2", "--", "--lr", "1e9", "--output-dir",
                 tmp_path / "out", env=ray_environment)
    said = [line for line in result.err.splitlines() if line.startswith("ray_train.py: error: ")]
    assert result.code == 1
    assert said == ["ray_train.py: error: epoch 1, step 10: the loss is nan; lower --lr, or check the data"]
