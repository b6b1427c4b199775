"""launch/trainjob.yaml starts a script with arguments that the script takes."""
import importlib
import re
import sys

import pytest
import yaml
from conftest import ROOT


@pytest.fixture
def manifest():
    return yaml.safe_load((ROOT / "launch/trainjob.yaml").read_text())


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
