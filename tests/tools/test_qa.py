"""`make qa`: what it asks for, the models that it writes, what it says of tests that fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmserve.serving.settings import ControlMode
from tests.serving.models import serving
from tools.qa.__main__ import collected, main, run_tests, table, unexpected
from tools.qa.group import Group
from tools.qa.groups import GROUPS
from tools.qa.models import Copied, PythonModel, ResponseSenders

ROOT = Path(__file__).resolve().parents[2]
SENDER = (
    "import triton_python_backend_utils as pb_utils\nclass TritonPythonModel:\n    def execute(self, requests): ..."
)
CONFIG = """name: "{}" backend: "python" max_batch_size: 8
input {{ name: "X" data_type: TYPE_BOOL dims: [ 1 ] }} output {{ name: "Y" data_type: TYPE_BOOL dims: [ 1 ] }}"""


def clone_of(folder: Path) -> Path:
    """With a file of every name that a group wants."""
    for group in GROUPS:
        for file in group.files:
            (folder / group.folder).mkdir(parents=True, exist_ok=True)
            (folder / group.folder / file).touch()
        for model in group.models:
            if isinstance(model, Copied):
                copied = folder / model.places[0] / "copied"
                copied.mkdir(parents=True, exist_ok=True)
                (copied / "config.pbtxt").write_text(CONFIG.format("copied").replace("python", "identity"))
            if isinstance(model, PythonModel | ResponseSenders):
                source = folder / model.place
                source.mkdir(parents=True, exist_ok=True)
                (source / "config.pbtxt").write_text(CONFIG.format(source.name))
                for name in ("model.py", "model_async.py", "model_common.py"):
                    (source / name).write_text(SENDER)
    return folder


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "git clone --depth 1 -b r24.10" in capsys.readouterr().err
    (tmp_path / "qa").mkdir()
    assert main([str(tmp_path), "--group", "response_sender"]) == 2
    said = capsys.readouterr().err
    assert "response_sender: qa/L0_backend_python/response_sender/response_sender_test.py is not in" in said
    assert "response_sender: qa/python_models/response_sender/model_async.py is not in" in said
    assert "generate" not in said


def test_the_command_without_a_clone_says_how_to_get_one() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.qa", "nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "git clone" in done.stderr) == (2, True)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
async def test_the_models_of_a_group_can_be_loaded(tmp_path: Path, group: Group) -> None:
    clone, repository = clone_of(tmp_path / "clone"), tmp_path / "models"
    repository.mkdir()
    for model in group.models:
        assert model.missing(clone) == []
        model.write(clone, repository)
    names = tuple(sorted(each.name for each in repository.iterdir()))
    assert names
    async with serving(repository, control_mode=ControlMode.EXPLICIT, load_at_start=names) as core:
        assert [row.reason for row in core.repository_index() if row.state != "READY"] == []


def test_failures_are_told_with_the_reason_that_is_known() -> None:
    group = Group("some", "qa", ["a_test.py"], [], known={"test_old": "because"})
    results = {"some": {"test_good": "passed", "test_old": "a != b", "test_new": "c != d", "test_not": "skipped"}}
    text = table([group], results, is_real=False)
    assert "some                      1   3" in text
    assert "test_old: a != b [known: because]" in text
    assert "test_new: c != d\n" in text
    assert unexpected([group], results) == ["some: test_new"]
    assert "known" not in table([group], results, is_real=True)


TESTS = """
import os, unittest
class One(unittest.TestCase):
    def test_same(self): self.assertEqual(os.environ["KIND"], "some")
    def test_else(self): self.fail("never selected")
class Other(unittest.TestCase):
    def test_same(self): self.fail("of the other class")
"""


def test_tests_are_selected_and_told_apart(tmp_path: Path) -> None:
    (tmp_path / "some_test.py").write_text(TESTS)
    group = Group("some", "qa", ["some_test.py"], [], environment={"KIND": "some"}, select="not else")
    names = collected(group, tmp_path, group.files)
    assert names == ["some_test.py::One::test_same", "some_test.py::Other::test_same"]
    results = run_tests(group, tmp_path, "some_test.py", {})
    assert results == {"test_same": "passed", "Other.test_same": "AssertionError: of the other class"}
    assert list(run_tests(group, tmp_path, names[1], results)) == ["Other.test_same"]


def test_models_of_another_name_and_backend_are_written(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    for name in ("a", "b"):
        (tmp_path / "qa/python_models" / name).mkdir(parents=True)
    (tmp_path / "qa/python_models/a/config.pbtxt").write_text('name: "a"\nbackend: "identity"')
    (tmp_path / "qa/python_models/b/model.py").write_text(SENDER)
    PythonModel("c", "a", {"identity": "python"}, "max_batch_size: 3").write(tmp_path, repository)
    Copied("qa/python_models", without=("b",), text="max_batch_size: 4").write(tmp_path, repository)
    assert (repository / "c/config.pbtxt").read_text() == 'name: "c"\nbackend: "python"\nmax_batch_size: 3\n'
    assert (repository / "a/config.pbtxt").read_text() == 'name: "a"\nbackend: "python"\nmax_batch_size: 4\n'
    assert (repository / "a/1/model.py").exists()
    assert not (repository / "b").exists()
