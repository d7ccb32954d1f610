"""`llmserve inspect`: what keeps an engine from running on a machine, and what can be verified there.

More on engines for GPUs: tests/engine/tensorrt_llm.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.cli.main import main
from llmserve.engine.cpu import runtime
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.build_time import BuildTime
from llmserve.engine.native.library import Library
from llmserve.engine.registry import runtime_for
from llmserve.errors import ResourceExhausted
from tests.engine.directories import MANIFEST, make_engine_directory, seal

GPU = {"mode": "engine", "tensorrt_llm": "1.2.1", "compute_capability": "9.0", "gpu": "NVIDIA H100", "world_size": 1}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_engine_directory(tmp_path / "engine")


def inspected(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    monkeypatch.setattr(sys, "argv", ["llmserve", "inspect", str(path), *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def test_a_cpu_engine_that_has_kernels_and_memory_fits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "pool_sizes", lambda *arguments: (4, 0))
    assert runtime_for("cpu").problems_here(EngineDirectory.open(directory)) == []


def test_what_a_cpu_engine_lacks_is_listed_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*arguments: object) -> tuple[int, int]:
        raise ResourceExhausted("no room; free some memory")

    monkeypatch.setattr(runtime, "pool_sizes", no_room)
    monkeypatch.setattr(runtime, "load_library", lambda: Library(directory / "nothing.so"))
    no_library, no_memory = runtime_for("cpu").problems_here(EngineDirectory.open(directory))
    assert "pip install" in no_library
    assert no_memory == "no room; free some memory"


def test_how_long_the_build_took_is_told_where_it_is_known(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = inspected(directory, monkeypatch, capsys)
    assert "built in" not in told
    assert "tokens' digest" not in told, "it has no tokenizer"
    BuildTime(1234.5, "EPYC, 2 cores").save(directory)
    assert "built in 1,234.5 s on EPYC, 2 cores" in " ".join(inspected(directory, monkeypatch, capsys).split())


def test_an_engine_for_another_machine_is_explained(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seal(directory, replace(MANIFEST, target="tensorrt_llm", device=GPU))
    monkeypatch.setenv("PATH", str(tmp_path))
    text = " ".join(inspected(directory, monkeypatch, capsys).split())
    assert "runs here no: the tensorrt_llm target requires tensorrt-llm" in text
    assert "pip install 'llmserve[tensorrt]'" in text  # and not taken for markup
    assert "nvidia-smi was not found" in text


def test_an_engine_for_an_unknown_target_is_explained(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seal(directory, replace(MANIFEST, target="tpu"))
    (problem,) = json.loads(inspected(directory, monkeypatch, capsys, "--json"))["problems_here"]
    assert "'tpu'" in problem


def test_verify_hashes_the_files_of_an_engine_without_a_self_test(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seal(directory, replace(MANIFEST, target="tensorrt_llm", device=GPU))
    text = " ".join(inspected(directory, monkeypatch, capsys, "--verify", "--tactics").split())
    assert "verified every file is unchanged; engines for tensorrt_llm have no self-test" in text
    assert "tactics: those of a tensorrt_llm engine were chosen when it was compiled" in text
    found = json.loads(inspected(directory, monkeypatch, capsys, "--verify", "--json"))
    assert (found["files_verified"], found["selftest"]) == (True, None)
    monkeypatch.setattr("llmserve.engine.directory.artifact.HASHED_AT_OPEN_BYTES", 0)  # as with a large file
    (directory / "rank0.engine").write_bytes(bytes(4096))
    with pytest.raises(AssertionError):
        inspected(directory, monkeypatch, capsys, "--verify")
    assert "rank0.engine was changed" in capsys.readouterr().err
