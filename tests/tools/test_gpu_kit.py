"""What is carried to a GPU's machine: that it has what the check asks for, and how the check takes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.targets.cuda import target
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.engine.directory.artifact import EngineDirectory
from tests.engine.cuda.engines import WIDE_TILES
from tests.engine.cuda.fake_device import FakeCompiler, FakeDevice
from tests.engine.cuda.hybrids import CONFIGS
from tools import gpu_kit
from tools.benchmark import ours_cuda
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.hybrids import HYBRIDS, Hybrid
from tools.benchmark.shapes import SHAPES
from tools.gpu_check import __main__ as beginning
from tools.gpu_check import checks, cuda, law, layers, states
from tools.gpu_check.checks import Plan
from tools.gpu_check.page import page_of
from tools.gpu_check.program import Finished
from tools.gpu_check.speed_of_networks import LAYER_PRECISIONS, LAYERS
from tools.gpu_check.steps import NotRun, Result, State, StepFailed, run_steps


def test_a_kit_has_the_kernels_that_the_check_builds_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "TritonCompiler", FakeCompiler)
    assert gpu_kit.main(["--output", str(tmp_path), "--only-kernels"]) == 0
    plan = Plan(cuda.SUBJECT, tmp_path, Path("unused"), None, kit=tmp_path)
    asked: list[list[str]] = []

    def program(command: list[str], *, timeout_s: float, environment: object = None) -> Finished:
        asked.append(command)
        return Finished(1, "", "nothing runs here")

    monkeypatch.setattr(checks, "run", program)
    monkeypatch.setattr(checks, "require_machine", lambda plan: None)
    monkeypatch.setattr(cuda, "require_machine", lambda plan: None)
    with pytest.raises(StepFailed, match="nothing runs here"):
        checks.build(plan)
    for precision in LAYER_PRECISIONS:
        with pytest.raises(StepFailed, match="nothing runs here"):
            cuda.layers_of(precision)(plan)
    for name in HYBRIDS:
        with pytest.raises(StepFailed, match="nothing runs here"):
            cuda.states_of(name)(plan)
    files = [Path(argument) for command in asked for argument in command if argument.endswith(".zip")]
    names = "demo", *(f"{LAYERS}-{name}" for name in LAYER_PRECISIONS), *(f"states-{name}" for name in HYBRIDS)
    assert [file.stem for file in files] == list(names)
    assert all(file.is_file() for file in files)

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(SHAPES[LAYERS].config()))
    options = replace(ours_cuda.build_options("int8"), given={"gpu": "sm_90", "kernels": str(files[2])})
    with pytest.raises(Exception, match="no weights"):  # all that is missing
        build_engine(checkpoint, tmp_path / "engine", options)


def test_packages_of_a_kit_are_found_by_the_check_and_by_what_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, site = tmp_path / "kit", tmp_path / "site"
    (kit / "wheels").mkdir(parents=True)
    with ZipFile(kit / "wheels/lacking-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lacking_package.py", "WORD = 'here'\n")
    (kit / "METADATA").write_text("Metadata-Version: 2.1\nName: llmserve\nVersion: 7\n")
    monkeypatch.setattr(beginning, "SITE", site)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    beginning.unpack(kit)
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(site), str(beginning.ROOT), "elsewhere"])
    program = (
        "from importlib.metadata import version; from lacking_package import WORD; print(WORD, version('llmserve'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout == "here 7\n", done.stderr


def test_when_the_time_is_up_the_rest_is_left_for_another_run(tmp_path: Path) -> None:
    plan = Plan(cuda.SUBJECT, tmp_path, Path("unused"), None, ends=time.monotonic() - 1)
    with pytest.raises(NotRun, match="the time limit was reached during a long step; continue with --resume"):
        plan.run("a long step", [sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=60)
    times = iter([True, False])
    results = run_steps({"first": dict, "second": dict}, lambda text: None, is_time=lambda: next(times))
    assert [result.state for result in results.values()] == [State.PASSED, State.NOT_RUN]


def test_a_few_layers_are_measured_and_held_to_the_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device that interprets kernels."""
    options = replace(
        ours_cuda.build_options("int8"), given={"gpu": "sm_90"}, max_seq_len=64, max_num_tokens=32, max_batch_size=4
    )
    checkpoint = make_checkpoint(tmp_path / "checkpoint", SHAPES["tiny"])
    build_engine(checkpoint, tmp_path / "engine", options, target=CudaTarget(FakeCompiler(), WIDE_TILES))
    for name, value in {"PROMPTS": (8,), "BATCHES": (2,), "REPLAYS": 1, "PROMPT_STEPS": 1, "TRIALS": 1}.items():
        monkeypatch.setattr(layers, name, value)
    monkeypatch.setattr(law, "NUM_TOKENS", 9)
    found = layers.measure(EngineDirectory.open(tmp_path / "engine"), 4, FakeDevice)
    assert {row["differ"] for row in found["law"]} == {0}
    (decode,), (prompt,) = found["decode"], found["prompts"]
    assert decode["whole_ms"] == pytest.approx(2 * decode["body_ms"] + decode["head_ms"])
    assert prompt["tokens"] == 8
    shape = SHAPES["tiny"]
    assert decode["body_bytes"] > shape.layer_products, "a byte for each weight, scales and caches"
    details = found | {"layer_products": shape.layer_products}
    results = {"environment": Result(State.PASSED, 0.0), "layers-int8": Result(State.PASSED, 0.0, details=details)}
    assert "A network of 4 is extrapolated" in page_of(cuda.SUBJECT, results)


def test_layers_with_states_are_tested_and_held_to_the_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(
        ours_cuda.build_options("float16"), given={"gpu": "sm_90"}, max_seq_len=32, max_num_tokens=16,
        max_batch_size=2, tokens_per_block=4,
    )  # fmt: skip
    checkpoint = make_checkpoint(tmp_path / "checkpoint", Hybrid("tiny", CONFIGS["granite4-h"]))
    build_engine(checkpoint, tmp_path / "engine", options, target=CudaTarget(FakeCompiler(), WIDE_TILES))
    for name, value in {"PROMPTS": (4,), "BATCHES": (2,), "REPLAYS": 1, "PROMPT_STEPS": 1}.items():
        monkeypatch.setattr(states, name, value)
    monkeypatch.setattr(layers, "TRIALS", 1)
    monkeypatch.setattr(law, "NUM_TOKENS", 3)
    found = states.measure(EngineDirectory.open(tmp_path / "engine"), FakeDevice)
    assert found["passed"], found["selftest"]
    assert {row["case"]: row["differ"] for row in found["law"]}["from a state that was kept"] == 0
    assert {row["differ"] for row in found["law"]} == {0}
    results = {"environment": Result(State.PASSED, 0.0), "states-tiny": Result(State.PASSED, 0.0, details=found)}
    assert "self-test passed" in page_of(cuda.SUBJECT, results)
    failed = found | {"passed": False, "selftest": "it FAILED"}
    monkeypatch.setattr(cuda, "_reported", lambda *arguments: failed)
    with pytest.raises(StepFailed, match="it FAILED"):
        cuda.states_of("tiny")(Plan(cuda.SUBJECT, tmp_path, Path("unused"), None))


def test_a_row_that_depends_on_its_company_fails_the_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"case": "with 5 others", "rows": 100, "differ": 3, "largest": 0.5, "of": 9.0}]

    def program(command: list[str], *, timeout_s: float, environment: object = None) -> Finished:
        Path(command[-1]).write_text(json.dumps(rows))
        return Finished(0, "", "")

    monkeypatch.setattr(checks, "run", program)
    plan = Plan(cuda.SUBJECT, tmp_path, Path("unused"), None)
    plan.engine.mkdir()
    with pytest.raises(StepFailed, match="with 5 others: 3 of 100 rows differ"):
        cuda.law(plan)
