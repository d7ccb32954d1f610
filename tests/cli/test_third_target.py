"""A target that the program has never heard of: two folders and a line in each registry, and every command knows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint

WITH_A_THIRD_TARGET = """
from llmserve.builder.targets.registry import TARGETS, BuildRoom
from llmserve.engine.registry import RUNTIMES
from tests.builder.fake_options import FakeOptions

TARGETS["fake"] = BuildRoom(FakeOptions, "tests.builder.fake_target")
RUNTIMES["fake"] = "llmserve.engine.fake.runtime"
from llmserve.cli.main import main
main()
"""


def llmserve(*arguments: object, code: int = 0) -> str:
    """What it printed, on both streams."""
    command = [sys.executable, "-c", WITH_A_THIRD_TARGET, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", "llama")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("third")
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"checkpoint: {checkpoint}\ntarget: fake\nlevel: 3\noutput_dir: engine\n")
    llmserve("build", "--recipe", recipe, "--effort", "high")
    return folder / "engine"


def manifest(engine: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((engine / "manifest.json").read_text())
    return content


def test_what_cannot_be_tuned_says_so(engine: Path) -> None:
    shown = llmserve("tune", engine, code=2)
    assert "this engine cannot be tuned on this machine: there is nothing to choose" in shown


def test_its_options_are_flags_and_keys_of_recipes(checkpoint: Path, engine: Path) -> None:
    assert manifest(engine)["target"] == "fake"
    assert manifest(engine)["options"]["fake"] == {"level": 3, "effort": "high"}
    shown = llmserve("build", checkpoint, "--target", "fake", "--level", "-1", "--effort", "none", code=2)
    assert "level must be at least 0, got -1" in shown
    assert "effort must be one of low, high, got 'none'" in shown
    assert "With --target fake" in llmserve("build", "--help")


def test_its_options_belong_to_it(checkpoint: Path) -> None:
    shown = llmserve("build", checkpoint, "--level", "1", "--tp-size", "2", code=2)
    assert "level 1 is for the fake target; leave it out, or build with --target fake" in shown
    assert "tp_size 2 is for the tensorrt_llm target; leave it out, or build with --target tensorrt_llm" in shown
    shown = llmserve("build", checkpoint, "--effort", "high", "--dry-run")
    assert "without effect on the cpu target: effort high" in shown


def test_a_plan_says_what_its_machine_can_do(checkpoint: Path) -> None:
    shown = llmserve("build", checkpoint, "--target", "fake", "--dry-run")
    for part in ("target fake, float16", "1,024.0 GiB available", "1.0 GB/s"):
        assert part in shown


def test_inspect_and_doctor_ask_its_room(engine: Path) -> None:
    shown = llmserve("inspect", engine, "--verify", "--tactics")
    for part in ("runs here yes", "engines for fake have no self-test", "tactics: there is nothing to choose"):
        assert part in shown
    assert "target fake: works here" in llmserve("doctor", "--target", "fake")


def test_it_answers_and_is_exported(engine: Path, tmp_path: Path) -> None:
    assert "1 prompts, " in llmserve("run", engine, "--input-text", "ab", "--max-output-len", "3")
    shown = llmserve("export", "triton", engine, "--output", tmp_path / "m", "--backend", "tensorrtllm", code=2)
    assert "is a fake engine; --backend tensorrtllm needs one that TensorRT-LLM" in shown
