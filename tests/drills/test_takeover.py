"""Other launchers: the manifest's command on two nodes, and train_DDP.py in the workers of Ray Train."""
import contextlib
import os
import re
import signal

import pytest
import yaml
from conftest import PYTHON, REFERENCE, ROOT, TORCHRUN, distance, epochs, free_port, good, run
from live import Live

ARGUMENTS = REFERENCE[1:]
CPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_the_manifests_command_joins_nodes_by_the_variables_of_kubeflow(reference, tmp_path):
    """The environments of two pods on one machine; the command is unchanged except for the size of the training."""
    manifest = yaml.safe_load((ROOT / "launch/trainjob.yaml").read_text())
    _, script, *arguments = manifest["spec"]["trainer"]["command"]
    small = [*arguments, *ARGUMENTS, "--dataset=digits", "--model=cnn", "--weight-decay=1e-4"]
    port = free_port()
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Live(
            *TORCHRUN, ROOT / script.rsplit("/", 1)[1], *small, f"--output-dir={tmp_path / 'kubeflow'}",
            env=CPU | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": rank,
                       "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port)})) for rank in "01"]
        assert [node.end(180) for node in nodes] == [0, 0]
    said = ["\n".join(node.out) for node in nodes]
    assert "2 process(es) x 1 micro-batch x 48" in said[0] and len(epochs(said[0])) == 2 and not epochs(said[1])
    assert distance(tmp_path / "kubeflow/last.pt", reference) < 1e-5


@pytest.fixture
def ray_environment(tmp_path):
    pytest.importorskip("ray.train.torch", reason="no Ray: pip install -r requirements-drill.txt")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores: Ray gives each worker one")
    return CPU | {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}  # Ray keeps a token in HOME


def test_rays_workers_are_the_processes_of_a_group(ray_environment, reference, tmp_path):
    """The weights equal torchrun's; relative paths are the caller's, although each worker has its own folder."""
    driver = [PYTHON, ROOT / "launch/ray_train.py", "--num-workers", "2", "--"]
    command = [*driver, *ARGUMENTS, "--output-dir", "ray"]
    said = good(run(*command, cwd=tmp_path, env=ray_environment, quiet=False)).out  # Ray reports what it tries again
    assert said.count("2 process(es) x 1 micro-batch x 48") == 1
    assert distance(reference, tmp_path / "ray/last.pt") < 1e-5
    assert len(list((tmp_path / "ray").glob("events*"))) == 1


def test_ray_starts_again_what_died(ray_environment, tmp_path):
    command = [PYTHON, ROOT / "launch/ray_train.py", "--num-workers", "2", "--max-failures", "1", "--", *ARGUMENTS,
               "--epochs", "6", "--resume", "auto", "--output-dir", tmp_path / "out"]
    with Live(*command, env=ray_environment) as driver:
        victim = re.search(r"pid=(\d+)", driver.wait_for(r"pid=\d+\) world_rank=1,"))[1]
        driver.wait_for("epoch   1/6")
        os.kill(int(victim), signal.SIGKILL)
        assert driver.end(240) == 0
    said = "\n".join(driver.out + driver.err)
    assert re.search(r"resume \S+: epoch \d is done", said) and "epoch   6/6" in said
