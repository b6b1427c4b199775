"""What GitHub and Kubernetes read starts what README.md, .ci/run and a script take."""
import importlib
import re
import sys

import yaml
from conftest import ROOT


def read(path):
    return yaml.safe_load((ROOT / path).read_text())


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def command_under(heading):
    """Return a command of README.md: the first block of shell under the heading."""
    section = (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1]
    return re.search(r"```sh\n(.*?)\n```", section, re.S)[1]


def test_the_workflows_run_the_commands_of_the_readme():
    jobs = read(".github/workflows/test.yml")["jobs"]
    assert commands(jobs["readme"])[1:] == [command_under("Run"), command_under("Test")]
    install, unit = commands(jobs["unit"])
    assert install == command_under("Test").split(" && ")[0] and unit == "python -m pytest tests/unit"
    assert "`pytest tests/unit`" in (ROOT / "README.md").read_text()
    assert commands(read(".github/workflows/pages.yml")["jobs"]["publish"])[-1] == "python tools/build_page.py"
    assert commands(read(".github/workflows/nightly.yml")["jobs"]["mutations"])[-1].startswith("python tools/mutate.py")


def test_by_night_the_system_has_the_packages_of_the_drills():
    day, night = (re.search(r"--no-install-recommends((?:[ \\\n]+[a-z][\w-]+)+)", (ROOT / path).read_text())[1]
                  for path in (".ci/run", ".github/workflows/nightly.yml"))
    assert day.replace("\\", "").split() == night.split() and "slurm-wlm" in night


def test_the_oldest_versions_are_those_that_the_project_asks_for():
    needed = dict(re.findall(r"^(torch|torchvision)>=([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M))
    oldest, newest = read(".github/workflows/test.yml")["jobs"]["readme"]["strategy"]["matrix"]["include"]
    assert oldest["torch"] == " ".join(f"{name}=={version}.*" for name, version in needed.items())
    python = re.search(r"^python_version = \"(.*?)\"", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert oldest["python"] == python and f"Python {python} or newer" in (ROOT / "README.md").read_text()
    assert newest["torch"] == "torch torchvision"


def test_the_requirements_that_anything_names_exist():
    places = ("*.md", "*.txt", "[a-z]*/**/*.md", "docs/*.ipynb", "launch/*", "*.py", "[a-z]*/**/*.py", ".ci/run",
              ".github/**/*.yml")
    named = {name for place in places for path in ROOT.glob(place) if path.is_file()
             for name in re.findall(r"\brequirements[\w/-]*\.txt", path.read_text())}
    assert {"requirements/drill.txt", "requirements/streaming.txt"} < named
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def test_the_manifest_starts_a_script_that_takes_its_arguments(monkeypatch):
    text = (ROOT / "launch/trainjob.yaml").read_text()
    manifest = yaml.safe_load(text)
    trainer = manifest["spec"]["trainer"]
    launcher, script, *arguments = trainer["command"]
    folder, name = script.rsplit("/", 1)
    assert launcher == "torchrun" and (ROOT / name).is_file()
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
