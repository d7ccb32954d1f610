"""`EXECUTION_ENV_PATH`: a model in a Python environment of its own, a folder or a packed one."""

from __future__ import annotations

import sys
import tarfile
import venv
from pathlib import Path

import pytest

from llmserve.backends.python.process import environment as environments
from tests.backends.python.test_execute import ECHO_CONFIG
from tests.backends.python.test_loading import reason
from tests.backends.python.test_process import PROCESS, parameter
from tests.serving.models import floats, request, serving, single, write_model

MODEL = """
import sys
import numpy as np
import only_there
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(only_there.NUMBER - 7)
        return config
    def execute(self, requests):
        seen = {"prefix": sys.prefix, "number": only_there.NUMBER}
        return [self.answer(request, seen) for request in requests]
    def answer(self, request, seen):
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())], parameters=seen)
"""
IN_DIRECTORY = "$$TRITON_MODEL_DIRECTORY/"


def make_environment(folder: Path, number: int) -> Path:
    """With a package that no other environment has."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (packages / "only_there.py").write_text(f"NUMBER = {number}\n")
    return folder


def pack(folder: Path, to: Path) -> None:
    """As conda-pack does: without a folder around it, and with a program that is run in the new place."""
    program = "import pathlib, sys; pathlib.Path(sys.argv[0]).with_name('unpacked').write_text(sys.prefix)\n"
    (folder / "bin/conda-unpack").write_text(program)
    with tarfile.open(to, "w:gz") as archive:
        archive.add(folder, arcname=".")


async def test_models_in_environments_of_their_own(tmp_path: Path) -> None:
    one = make_environment(tmp_path / "one", 7)
    models = tmp_path / "models"
    write_model(models, "m", ECHO_CONFIG + parameter("EXECUTION_ENV_PATH", str(one)), MODEL)
    packed = ECHO_CONFIG + PROCESS + parameter("EXECUTION_ENV_PATH", f"{IN_DIRECTORY}other.tar.gz")
    directory = write_model(models, "packed", packed, MODEL)
    pack(make_environment(tmp_path / "other", 7), directory / "other.tar.gz")
    async with serving(models) as core:
        answer = await single(core, request("m", floats(1, 2)))
        assert answer.parameters == {"prefix": str(one), "number": 7}
        answer = await single(core, request("packed", floats(1, 2)))
        unpacked = Path(str(answer.parameters["prefix"]))
        assert unpacked.name.startswith("llmserve-environment-")
        assert (unpacked / "bin/unpacked").read_text() == str(unpacked)


async def test_what_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8b nonsense")
    (tmp_path / "empty").mkdir()
    (tmp_path / "old/bin").mkdir(parents=True)
    (tmp_path / "old/bin/python").write_text("#!/bin/sh\necho 2.7\n")
    (tmp_path / "old/bin/python").chmod(0o755)
    expected = {
        "nowhere": "does not exist",
        "broken.tar.gz": "cannot be unpacked",
        "empty": "is not a usable environment",
        "old": f"is an environment of Python 2.7; the server's Python is {environments.VERSION}",
    }
    models = tmp_path / "models"
    for name in expected:
        config = ECHO_CONFIG + parameter("EXECUTION_ENV_PATH", str(tmp_path / name))
        write_model(models, name.partition(".")[0], config, MODEL)
    async with serving(models) as core:
        for name, words in expected.items():
            assert words in reason(core, name.partition(".")[0])


async def test_an_environment_needs_a_process(tmp_path: Path) -> None:
    config = ECHO_CONFIG + parameter("EXECUTION_MODE", "thread") + parameter("EXECUTION_ENV_PATH", sys.prefix)
    write_model(tmp_path, "m", config, MODEL)
    async with serving(tmp_path) as core:
        assert "EXECUTION_ENV_PATH requires EXECUTION_MODE process" in reason(core, "m")


@pytest.mark.parametrize("libraries", ["", "/lib"])
def test_variables(libraries: str) -> None:
    given = {"LD_LIBRARY_PATH": libraries, "PATH": "/bin", "PYTHONPATH": "/x", "PYTHONHOME": "/y", "OTHER": "z"}
    made = environments.Environment(Path("/env")).variables(given)
    assert made == {
        "PATH": "/env/bin:/bin",
        "LD_LIBRARY_PATH": "/env/lib:/lib" if libraries else "/env/lib",
        "CONDA_PREFIX": "/env",
        "OTHER": "z",
    }
