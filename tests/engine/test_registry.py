"""Runtimes are found by the manifest's target, and each is imported without the others."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder.targets.registry import TARGETS
from llmserve.engine.open import open_engine
from llmserve.engine.registry import RUNTIMES
from llmserve.errors import Unsupported
from tests.engine.directories import MANIFEST, make_engine_directory, seal


def test_every_target_that_can_be_built_can_be_run() -> None:
    assert TARGETS.keys() == RUNTIMES.keys()


def test_an_engine_of_an_unknown_target_says_what_to_build(tmp_path: Path) -> None:
    path = make_engine_directory(tmp_path / "engine")
    seal(path, replace(MANIFEST, target="npu"))
    with pytest.raises(Unsupported, match=r"built for target 'npu'; this version executes 'cpu'.*run: llmserve build"):
        open_engine(path)


@pytest.mark.parametrize("target", sorted(RUNTIMES))
def test_a_runtime_and_the_backend_bring_no_other_targets_room(target: str) -> None:
    code = (
        "import sys, llmserve.backends.tensorrtllm\n"
        "from llmserve.engine.registry import runtime_for\n"
        f"runtime_for({target!r})\n"
        "print(*sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = [name.split(".") for name in output.split()]
    rooms = {parts[2] for parts in loaded if parts[:2] == ["llmserve", "engine"] and len(parts) > 2}
    assert rooms & RUNTIMES.keys() == {target}
    assert not {parts[0] for parts in loaded} & {"tensorrt_llm", "tensorrt", "torch"}
