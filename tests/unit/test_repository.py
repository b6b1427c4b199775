"""What GitHub and pre-commit read is well-formed, and its commands are those of README.md and of .ci/run."""
import re

import pytest
import yaml
from conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(path):
    return yaml.safe_load((ROOT / path).read_text())


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def command_under(heading):
    """Return a command of README.md: the first block of shell under the heading."""
    section = (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1]
    return re.search(r"```sh\n(.*?)\n```", section, re.S)[1]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_and_may_write_only_pages(path):
    workflow = read(path)
    assert workflow["permissions"]["contents"] == "read" and "concurrency" in workflow
    assert True in workflow  # YAML 1.1 reads the key `on` as a truth value
    allowed = {"contents", "pages", "id-token"} if path.name == "pages.yml" else {"contents"}
    assert workflow["permissions"].keys() == allowed
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert len(used) >= 2 and all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)


def test_the_workflows_run_the_commands_of_the_readme():
    jobs = read(".github/workflows/test.yml")["jobs"]
    assert commands(jobs["readme"])[1:] == [command_under("Run"), command_under("Test")]
    install, unit = commands(jobs["unit"])
    assert install == command_under("Test").split(" && ")[0] and unit == "python -m pytest tests/unit"
    assert "`pytest tests/unit`" in (ROOT / "README.md").read_text()
    assert commands(read(".github/workflows/pages.yml")["jobs"]["publish"])[-1] == "python tools/build_page.py"


def test_the_oldest_versions_are_those_that_the_project_asks_for():
    needed = dict(re.findall(r"^(torch|torchvision)>=([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M))
    oldest, newest = read(".github/workflows/test.yml")["jobs"]["readme"]["strategy"]["matrix"]["include"]
    assert oldest["torch"] == " ".join(f"{name}=={version}.*" for name, version in needed.items())
    python = re.search(r"^python_version = \"(.*?)\"", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert oldest["python"] == python and f"Python {python} or newer" in (ROOT / "README.md").read_text()
    assert newest["torch"] == "torch torchvision"


def test_lint_is_the_same_everywhere():
    lint = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith(("ruff ", "mypy"))]
    assert lint and commands(read(".github/workflows/test.yml")["jobs"]["lint"])[1:] == lint
    hooks = [hook for repository in read(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    assert all({"id", "name", "entry", "language"} <= hook.keys() for hook in hooks)
    assert [hook["entry"] for hook in hooks] == ["ruff check", "python tools/markers.py",
                                                "python tools/build_page.py"]


def test_the_code_and_the_digits_have_their_licenses():
    assert (ROOT / "LICENSE").read_text().startswith("MIT No Attribution\n\nCopyright (c) 2026 the contributors\n")
    assert read("CITATION.cff")["license"] == "MIT-0"
    notice = (ROOT / "common/digits.md").read_text()
    assert "CC BY 4.0" in notice and "https://doi.org/10.24432/C50P49" in notice
