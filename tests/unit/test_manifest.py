"""launch/trainjob.yaml is a TrainJob of Kubeflow, and starts a script with arguments that the script takes."""
import importlib
import re
import sys

import jsonschema
import pytest
import yaml
from conftest import ROOT


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
    return yaml.safe_load((ROOT / "launch/trainjob.yaml").read_text())


def test_the_manifest_is_a_train_job(manifest):
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
