"""`make check-cuda` without a GPU, and how a check that was cut off goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gpu_machine import ROOT
from tools import check_gpu
from tools.benchmark.hybrids import HYBRIDS
from tools.gpu_check import checks, cuda
from tools.gpu_check.checks import Plan, Step
from tools.gpu_check.page import page_of
from tools.gpu_check.program import Finished
from tools.gpu_check.speed_of_networks import CELLS, LAYER_PRECISIONS, NETWORKS, PRECISIONS
from tools.gpu_check.steps import Details, NotRun, Result, State, StepFailed

SPEEDS = [
    name
    for network in NETWORKS
    for name in (f"peer-{network}", *(f"speed-{network}-{precision}" for precision in PRECISIONS))
]
STEPS = [
    "environment", "build", "law", "bandwidth", *(f"layers-{name}" for name in LAYER_PRECISIONS),
    *(f"states-{name}" for name in HYBRIDS), "memcheck", "tune", "contract", "evaluation", "parity", "serving",
    "racecheck", *SPEEDS,
]  # fmt: skip


def report_in(output: Path) -> dict[str, Any]:
    return dict(json.loads((output / "check-cuda.json").read_text()))


def states_in(output: Path) -> dict[str, str]:
    return {name: step["state"] for name, step in report_in(output)["steps"].items()}


def test_without_a_gpu_there_is_one_clear_message_and_a_report(tmp_path: Path) -> None:
    output = tmp_path / "report"
    command = ["make", "-s", "check-cuda", f"GPU_PYTHON={sys.executable}", f"CHECK_ARGS=--output {output}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    _, _, message = done.stdout.partition("check-cuda cannot run on this machine:\n")
    assert message.startswith("* NVIDIA GPU and driver: "), done.stdout + done.stderr
    assert "nvidia-smi was not found" in message
    assert states_in(output) == dict.fromkeys(STEPS, "not run") | {"environment": "failed"}
    page = (output / "check-cuda.md").read_text()
    assert "# llmserve's CUDA engines" in page
    assert "| memcheck | not run |" in page


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The check of made-up steps, on a machine that lacks nothing: `check({name: step}, *flags)`."""

    def run(steps: dict[str, Callable[[Plan], Details]], *flags: str) -> int:
        made: list[Step] = []
        for name, step in steps.items():
            step.__name__ = name
            made.append(step)
        monkeypatch.setattr(check_gpu, "TARGETS", {"cuda": (cuda.SUBJECT, made)})
        return check_gpu.main(["--target", "cuda", "--output", str(tmp_path), *flags])

    return run


def passes(plan: Plan) -> Details:
    (plan.folder / "kept").touch()
    return {}


def test_what_passed_is_kept_and_the_rest_is_done_again(check: Callable[..., int], tmp_path: Path) -> None:
    asked: list[str] = []

    def step(name: str, *, fails: bool = False) -> Callable[[Plan], Details]:
        def run(plan: Plan) -> Details:
            asked.append(name)
            (plan.folder / name).touch()
            if fails:
                raise StepFailed("it is wrong")
            return {"output": name} if name == "memcheck" else {}

        return run

    def steps(fails: bool) -> dict[str, Callable[[Plan], Details]]:
        made = {name: step(name) for name in ("environment", "memcheck", "build", "parity")}
        return made | {"build": step("build", fails=fails)}

    assert check(steps(fails=True), "--steps", "environment,memcheck,build") == 1
    assert asked == ["environment", "memcheck", "build"]
    states = {"environment": "passed", "memcheck": "passed", "build": "failed", "parity": "not run"}
    assert states_in(tmp_path) == states
    assert (tmp_path / "check-cuda-work/memcheck").is_file(), "what a step made is there for the next run"
    assert check(steps(fails=False), "--resume") == 0
    assert asked[3:] == ["build", "parity"]
    assert report_in(tmp_path)["steps"]["memcheck"]["details"] == {"output": "memcheck"}
    assert "```\nmemcheck\n```" in (tmp_path / "check-cuda.md").read_text()
    assert not (tmp_path / "check-cuda-work").exists(), "nothing is left to do"
    assert check(steps(fails=False)) == 0
    assert asked[5:] == ["environment", "memcheck", "build", "parity"], "without --resume all of it is done again"


def test_a_check_that_is_cut_off_leaves_a_report_to_go_on_with(check: Callable[..., int], tmp_path: Path) -> None:
    def is_cut_off(plan: Plan) -> Details:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check({"environment": passes, "build": is_cut_off})
    assert states_in(tmp_path) == {"environment": "passed", "build": "not run"}
    assert report_in(tmp_path)["steps"]["build"]["reason"] == "not begun yet"
    assert not report_in(tmp_path)["passed"]


def test_the_report_of_another_version_is_not_gone_on_with(check: Callable[..., int], tmp_path: Path) -> None:
    check({"environment": passes})
    path = tmp_path / "check-cuda.json"
    path.write_text(json.dumps(report_in(tmp_path) | {"llmserve": "0.0.1"}))
    with pytest.raises(SystemExit, match=r"llmserve 0\.0\.1, not .*: leave out --resume"):
        check({"environment": passes}, "--resume")


def test_a_step_that_does_not_exist_is_refused(check: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check({"environment": passes}, "--steps", "enviroment")
    assert "no step is called enviroment; there are environment" in capsys.readouterr().err


def test_what_a_sanitizer_finds_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(cuda.SUBJECT, tmp_path, Path("unused"), None)
    with pytest.raises(NotRun, match="wrote no engine"):
        cuda.memcheck(plan)
    plan.engine.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRun, match="compute-sanitizer was not found"):
        cuda.memcheck(plan)
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    flags = f"--tool racecheck --error-exitcode {cuda.ERROR_CODE} --target-processes all {sys.executable} "
    assert cuda.racecheck(plan)["output"].startswith(flags)
    program.write_text(f"#!/bin/sh\necho 'ERROR SUMMARY: 1 error' >&2\nexit {cuda.ERROR_CODE}\n")
    with pytest.raises(StepFailed, match=r"--tool memcheck ended with exit code 86: ERROR SUMMARY: 1 error"):
        cuda.memcheck(plan)


def test_the_contract_is_asked_of_engines_on_this_machines_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here there is none to build for."""
    monkeypatch.setattr(checks, "require_machine", lambda plan: None)
    with pytest.raises(StepFailed, match=r"nvidia\] and \d+ others: .*gpu: this machine has no GPU to build for"):
        checks.contract(Plan(cuda.SUBJECT, tmp_path, Path("unused"), None))


def test_a_network_is_measured_and_what_was_made_for_it_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a worker that says what one on a GPU would say."""
    tuned: list[str] = []

    def worker(command: list[str], *, timeout_s: float, environment: object = None) -> Finished:
        if "tools.gpu_check.idle" in command:
            assert command[-1] == "1,4,16,64,256"
            waits = [{"batch": 4, "device_ms": 60.0, "engine_ms": 80.0, "idle_share": 0.25}]
            Path(command[-2]).write_text(json.dumps(waits))
            return Finished(0, "", "")
        if "tune" in command:
            assert Path(command[-1]).is_dir()
            tuned.append(command[-1])
            return Finished(0, "", "")
        if command[1] == "-c":
            return Finished(0, "", "")  # there is a torch with CUDA
        _, _, _, action, job, report = command
        is_peer = "torch_compiled" in job
        engine = tmp_path / f"tiny-cuda-{json.loads(job)['precision']}"
        if action == "prepare":
            engine.mkdir()
            return Finished(0, "", "")
        assert engine.is_dir() is not is_peer
        opened = {"kind": "opened", "seconds": 1.5, "weight_bytes": 1e6, "kv_bytes_per_token": 0, "versions": {}}
        samples = [
            {"kind": "sample", "cell": cell.name, "tokens": 10, "seconds": seconds, "ids": []}
            for cell in CELLS
            for seconds in ([0.4] if is_peer else [0.1, 0.2, 0.9])
        ]
        Path(report).write_text("".join(f"{json.dumps(line)}\n" for line in (opened, *samples)))
        return Finished(0, "", "")

    monkeypatch.setattr(cuda, "require_machine", lambda plan: None)
    monkeypatch.setattr(checks, "run", worker)
    plan = Plan(cuda.SUBJECT, tmp_path, Path("unused"), None)
    limits = {"copied_bytes_per_s": 1e9, "products_per_s": {}}
    (tmp_path / "bandwidth.json").write_text(json.dumps(limits))
    peer = cuda.peer_of("tiny")(plan)
    beside_it = cuda.speed_of("tiny", PRECISIONS[0])(plan)
    assert [row["of_the_peer"] for row in beside_it["rows"]] == pytest.approx([2.0] * len(CELLS))
    for precision in (PRECISIONS[1], PRECISIONS[-1]):
        assert (tmp_path / "checkpoint-tiny").exists()
        found = cuda.speed_of("tiny", precision)(plan)
        assert not (tmp_path / f"tiny-cuda-{precision}").exists()
    assert not (tmp_path / "checkpoint-tiny").exists()
    assert len(tuned) == 3
    rows = {row["cell"]: row for row in found["rows"]}
    assert rows["batch 4"] == {"cell": "batch 4", "tokens_per_s": 50, "step_ms": 80, "of_the_bound": 1e-3 / 0.08}
    assert rows["prefill 512"]["of_the_bound"] is None
    results = {
        "environment": Result(State.PASSED, 0.0),
        "bandwidth": Result(State.PASSED, 0.0, details=limits | {"products_per_s": {"float16": 4e14}}),
        "peer-tiny": Result(State.PASSED, 0.0, details=peer),
        "speed-tiny-float16": Result(State.PASSED, 0.0, details=beside_it),
        "speed-tiny-int8": Result(State.PASSED, 0.0, details=found),
    }
    page = page_of(cuda.SUBJECT, results)
    assert "0.00 TB/s copied (read and written), 800 TFLOP/s in float16" in page
    assert "| batch 4 | 50 | 80.00 | 0.01 |  |" in page
    assert "| batch 4 | 50 | 80.00 | 0.01 | 2.00 |" in page
    assert "| batch 4 | 25 | 160.00 | 0.01 |  |" in page
    assert "opened in 1.5 s" in page
    assert "| 4 | 60.00 | 80.00 | 25 % |" in page


def test_the_demo_engine_is_tuned_served_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's stands for the GPU's: what is asked of it, and of the server, is the same."""
    monkeypatch.setattr(cuda, "SERVED_REQUESTS", 6)
    monkeypatch.setattr(checks, "require_machine", lambda plan: None)
    plan = Plan(replace(cuda.SUBJECT, target="cpu"), tmp_path, Path("unused"), None, "1,2")
    checks.build(plan)
    assert "us; default" in str(cuda.tune(plan)["output"]) or "no other is faster" in str(cuda.tune(plan)["output"])
    found = cuda.serving(plan)
    assert [row["concurrency"] for row in found["rows"]] == [1, 2]
    assert all(row["tokens_per_s"] > 0 and row["errors"] == 0 for row in found["rows"])
    results = {"environment": Result(State.PASSED, 0.0), "serving": Result(State.PASSED, 0.0, details=found)}
    assert "| streams over gRPC | tokens/s | first token, ms |" in page_of(cuda.SUBJECT, results)
