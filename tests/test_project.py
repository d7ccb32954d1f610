"""What a package index, a hosting service and a type checker read of the project."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from tools.requirements import of_extra

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# of https://www.apache.org/licenses/LICENSE-2.0.txt
APACHE_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_the_licence_is_the_standard_text() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_SHA256


def test_an_installation_says_its_licence_and_has_the_text() -> None:
    found = metadata("llmserve")
    assert (found["License-Expression"], found["License-File"]) == ("Apache-2.0", "LICENSE")
    assert "Typing :: Typed" in found.get_all("Classifier", [])


def test_type_checkers_are_told_that_there_are_types() -> None:
    assert files("llmserve").joinpath("py.typed").is_file()
    tracked = subprocess.run(["git", "ls-files", "llmserve/py.typed"], cwd=ROOT, capture_output=True, check=True)
    assert tracked.stdout.split() == [b"llmserve/py.typed"]


def test_what_the_tests_need_can_be_installed_before_llmserve() -> None:
    """Pip fetches it while the kernels compile."""
    project = {"optional-dependencies": {"x": ["llmserve[y,z]", "b==2"], "y": ["c"], "z": ["d"]}}
    assert list(of_extra(project, "x")) == ["c", "d", "b==2"]
    command = [sys.executable, "-m", "tools.requirements", "check"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    extras = PROJECT["optional-dependencies"]
    assert {*PROJECT["dependencies"], *extras["pytorch"], *extras["eval"], *extras["docs"]} <= {*lines}
    assert [line for line in lines if line.startswith("llmserve")] == []


def test_no_test_is_tried_again() -> None:
    """One that fails once is broken: nothing that runs tests again is installed, or asked for."""
    runners = ("pytest-rerunfailures", "pytest-retry", "flaky")
    assert [line for line in of_extra(PROJECT, "check") if line.startswith(runners)] == []
    assert "--reruns" not in (ROOT / "Makefile").read_text() + (ROOT / "pyproject.toml").read_text()


def test_the_changelog_names_this_version_or_what_comes() -> None:
    sections = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert PROJECT["version"] in sections or len(sections) == 1


def test_hosted_ci_runs_what_everybody_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert [command.split()[:2] for command in commands] == [["make", "test-all"]]
    assert workflow["permissions"] == {"contents": "read"}
    assert job["timeout-minutes"] == 90


def test_hosted_wheels_are_made_as_at_home_and_tried_without_a_compiler() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert [command.split()[:2] for command in commands["wheels"] if "apt-get" not in command] == [["make", "wheels"]]
    assert [command.split()[:2] for command in commands["trial"]] == [["python", "tools/wheels/trial.py"]]
    assert "slim" in jobs["trial"]["container"]  # the image that has no compiler
    assert all("timeout-minutes" in job for job in jobs.values())


def test_an_installation_without_a_compiler_says_how_to_get_one(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("cmake is not installed")
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path)]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "There is no C++ compiler. Install one (apt-get install g++)" in " ".join(done.stderr.split())
