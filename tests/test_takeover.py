"""Taken over elsewhere: the manifest for Kubernetes, and train_DDP.py in the workers of Ray Train."""
import importlib
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from conftest import PYTHON, ROOT, TORCHRUN, distance, epochs, good, run

pytestmark = pytest.mark.drill
ARGUMENTS = ["--epochs", "2", "--lr", "0.0003"]


def record(required="", **properties):
    """Return the schema of an object with these properties, no others, of which `required` must be there."""
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": required.split()}


def many(schema):
    return {"type": "array", "items": schema}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
NAME = {"type": "string", "minLength": 1, "maxLength": 253}
# Not a host's own folder, nor an address: only kinds of volume that every node can have
QUANTITY = {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[numkMGTPE])?$"}
VOLUME = record("name", name=TEXT, persistentVolumeClaim=record("claimName", claimName=TEXT),
                emptyDir=record(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY))
POD = record(volumes=many(VOLUME),
             containers=many(record("name", name=NAME, volumeMounts=many(
                 record("name mountPath", name=TEXT, mountPath={"type": "string", "pattern": "^/[^:]*$"})))))
JOB = record("name", name=NAME, template=record(spec=record(template=record(spec=POD))))

# What the manifest may use of TrainJob v1alpha1, as published with Kubeflow Trainer 2.2 and 2.3, in
# manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml and pkg/apis/trainer/v1alpha1/trainjob_types.go of
# github.com/kubeflow/trainer. (2.1 had podTemplateOverrides for runtimePatches, and numProcPerNode could be text.)
TRAIN_JOB = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"}, kind={"const": "TrainJob"},
    metadata=record("name", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}),
    spec=record(
        "runtimeRef", runtimeRef=record("name", name=NAME, apiGroup=TEXT, kind=TEXT),
        trainer=record(image={"type": "string", "maxLength": 500}, command=many(TEXT), args=many(TEXT),
                       numNodes=NUMBER, numProcPerNode=NUMBER,
                       env=many(record("name", name={"not": {"pattern": "^PET_"}}, value=TEXT)),  # reserved: refused
                       resourcesPerNode=record(limits={"type": "object", "additionalProperties": QUANTITY},
                                               requests={"type": "object", "additionalProperties": QUANTITY})),
        runtimePatches=many(record("manager", manager=NAME, trainingRuntimeSpec=record(template=record(
            spec=record(replicatedJobs=many(JOB))))))))


@pytest.fixture
def manifest():
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    return yaml.safe_load((ROOT / "launch/trainjob.yaml").read_text())


def test_the_manifest_is_a_train_job(manifest):
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    jsonschema.validate(manifest, TRAIN_JOB)
    for wrong in [{"numProcPerNode": "4"}, {"nodes": 2}, {"env": [{"name": "PET_NNODES", "value": "2"}]}]:
        spec = manifest["spec"] | {"trainer": manifest["spec"]["trainer"] | wrong}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(manifest | {"spec": spec}, TRAIN_JOB)


def test_the_manifest_starts_a_script_that_takes_its_arguments(manifest, monkeypatch):
    trainer = manifest["spec"]["trainer"]
    launcher, script, *arguments = trainer["command"]
    folder, name = script.rsplit("/", 1)
    assert launcher == "torchrun" and (ROOT / name).is_file()
    text = (ROOT / "launch/trainjob.yaml").read_text()
    assert f"WORKDIR {folder}\n" in text and not re.search(r"\d+\.\d+\.\d+\.\d+", text)

    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    args = importlib.import_module(name.removesuffix(".py")).parse_args()
    assert args.resume == "auto"
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert args.batch_size % (trainer["numNodes"] * trainer["numProcPerNode"]) == 0

    [patch] = manifest["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert job["name"] == container["name"] == "node"  # as the runtime torch-distributed calls them
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys() and mounts["shm"] == "/dev/shm"
    assert "persistentVolumeClaim" in volumes["shared"]
    assert all(path.startswith(mounts["shared"] + "/") for path in (args.data_path, args.output_dir))


def test_the_manifests_command_joins_nodes_by_the_variables_of_kubeflow(manifest, tmp_path):
    """Two pods' worth of environment on one machine: the command itself, but for the size of the training."""
    _, script, *arguments = manifest["spec"]["trainer"]["command"]
    small = [*arguments, *ARGUMENTS, "--dataset=digits", "--model=cnn", "--batch-size=64", "--weight-decay=1e-4"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    nodes = []
    for rank in range(2):
        pet = dict(PET_NNODES="2", PET_NPROC_PER_NODE="1", PET_NODE_RANK=str(rank), PET_MASTER_ADDR="localhost",
                   PET_MASTER_PORT=str(port))
        command = [*TORCHRUN, str(ROOT / script.rsplit("/", 1)[1]), *small, f"--output-dir={tmp_path / 'kubeflow'}"]
        nodes.append(subprocess.Popen(command, env=os.environ | pet, stdout=subprocess.PIPE, text=True))
    said = [node.communicate(timeout=180)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert "2 process(es) x 1 micro-batch x 32" in said[0] and len(epochs(said[0])) == 2 and not epochs(said[1])
    good(run(*TORCHRUN, "--nproc-per-node=2", script.rsplit("/", 1)[1], *small, f"--output-dir={tmp_path / 'one'}"))
    assert distance(tmp_path / "kubeflow/last.pt", tmp_path / "one/last.pt") < 1e-5


@pytest.fixture
def ray_environment(tmp_path):
    pytest.importorskip("ray.train.torch", reason="needs ray[train]")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores: Ray gives each worker one")
    # HOME: Ray keeps a token there. No accelerator: the runs that it is compared with have none either.
    return {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}


def test_rays_workers_are_the_processes_of_a_group(ray_environment, tmp_path):
    """The weights are those of torchrun; relative paths are the caller's, though each worker has its own folder."""
    driver = [PYTHON, ROOT / "launch/ray_train.py", "--num-workers", "2", "--"]
    said = good(run(*driver, *ARGUMENTS, "--output-dir", "ray", cwd=tmp_path, env=ray_environment)).out
    assert said.count("2 process(es) x 1 micro-batch x 32") == 1
    good(run(*TORCHRUN, "--nproc-per-node=2", "train_DDP.py", *ARGUMENTS, "--output-dir", tmp_path / "torchrun",
             env=ray_environment))
    assert distance(tmp_path / "torchrun/last.pt", tmp_path / "ray/last.pt") < 1e-5
    assert len(list((tmp_path / "ray").glob("events*"))) == 1


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


@pytest.mark.parametrize("arguments, code, line", [
    (["--max-failures", "1", "--", "--epochs", "1"], 2, r"--max-failures: every restart would lose all progress; .*"),
    (["--num-workers", "2", "--", "--lr", "1e9"], 1, r"epoch 1, step 10: the loss is nan; try a lower --lr"),
])
def test_a_mistake_under_ray_is_one_line(ray_environment, tmp_path, arguments, code, line):
    more = ["--output-dir", tmp_path / "out"] if "--" in arguments else ["--", "--output-dir", tmp_path / "out"]
    result = run(PYTHON, "launch/ray_train.py", *arguments, *more, env=ray_environment)
    said = [text for text in result.err.splitlines() if text.startswith("ray_train.py: error: ")]
    assert result.code == code and len(said) == 1 and re.fullmatch("ray_train.py: error: " + line, said[0]), result.err
