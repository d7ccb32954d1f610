"""`make check-gpu` over the fakes, on a machine without a GPU, and where things fail, hang or crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gpu_machine import ROOT, altered, environment
from tools.gpu_check import checks, tensorrt_llm
from tools.gpu_check.checks import Plan
from tools.gpu_check.page import page_of
from tools.gpu_check.program import run
from tools.gpu_check.steps import Details, NotRun, State, StepFailed, run_steps

STEPS = ["environment", "names", "build", "contract", "evaluation", "parity", "benchmark"]
INNER_TIMEOUT = "--timeout=120"  # seconds, of a test of the contract: one that hangs then says where, in the report
QUICK = ("--suite", "eval/suites/docstrings-smoke.yaml", "--batches", "1,2")


def check_gpu(release: str, output: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, the report, the page), with a libmpi that can be found and that nothing calls."""
    (output.parent / "libmpi.so.40").touch()
    command = [sys.executable, "-m", "tools.check_gpu", "--output", str(output), *QUICK, *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280,
        env=environment(release, LD_LIBRARY_PATH=str(output.parent), PYTEST_ADDOPTS=INNER_TIMEOUT),
    )  # fmt: skip
    assert (output / "check-gpu.json").is_file(), done.stderr
    return done.returncode, json.loads((output / "check-gpu.json").read_text()), (output / "check-gpu.md").read_text()


def test_everything_passes_on_a_machine_that_has_everything(tmp_path: Path) -> None:
    code, report, page = check_gpu("1.2", tmp_path / "report")
    steps = report["steps"]
    assert {name: step["state"] for name, step in steps.items()} == dict.fromkeys(STEPS, "passed"), steps
    assert (code, report["passed"]) == (0, True)
    assert steps["environment"]["details"]["machine"]["GPUs"][0]["name"] == "NVIDIA Fake 80GB"
    assert steps["names"]["details"]["problems"] == []
    assert steps["build"]["details"]["device"]["mode"] == "engine"
    assert len(steps["contract"]["details"]["passed"]) > 10
    assert steps["evaluation"]["details"]["verdict"] == "pass"
    assert steps["parity"]["details"]["exact_match_rate"] > 0.9
    rows = steps["benchmark"]["details"]["rows"]
    assert [row["batch"] for row in rows] == [1, 2]
    assert rows[1]["ratio"] == rows[1]["tokens_per_s"]["median"] / rows[0]["tokens_per_s"]["median"]
    for words in ("| contract | passed |", "NVIDIA Fake 80GB", "0 differences", "| rougeL |", "the same answer in"):
        assert words in page


def test_a_name_that_differs_is_found_and_the_rest_is_checked_all_the_same(tmp_path: Path) -> None:
    change = {"llmapi/llm_args.py": ("host_cache_size: int", "host_cache_bytes: int")}  # passed only when it is set
    release, chosen = altered("1.3", tmp_path / "altered", change), ["environment", "names", "build", "benchmark"]
    code, report, page = check_gpu(release, tmp_path / "report", "--steps", ",".join(chosen))
    states = {name: step["state"] for name, step in report["steps"].items()}
    passed = dict.fromkeys(STEPS, "not run") | dict.fromkeys(chosen, "passed")
    assert states == passed | {"names": "failed"}, report["steps"]
    assert (code, report["passed"]) == (1, False)
    difference = "tensorrt_llm.llmapi.KvCacheConfig takes no parameter host_cache_size"
    assert report["steps"]["names"]["reason"] == difference
    assert f"| names | failed | {report['steps']['names']['seconds']:.1f} | {difference} |" in page


def test_make_finds_the_python_that_has_tensorrt_llm(tmp_path: Path) -> None:
    python = tmp_path / "python3.12"
    python.write_text("#!/bin/sh\necho $0\n")
    python.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    shown = subprocess.run(
        ["make", "-n", "check-gpu"],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{python} -m tools.check_gpu" in shown.stdout
    assert "pip" not in shown.stdout.replace(f"{python} -m pip", "")


def test_without_a_gpu_there_is_one_clear_message_and_a_report(tmp_path: Path) -> None:
    output = tmp_path / "report"
    command = ["make", "-s", "check-gpu", f"GPU_PYTHON={sys.executable}", f"CHECK_ARGS=--output {output}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    _, _, message = done.stdout.partition("check-gpu cannot run on this machine:\n")
    assert message.count("pip install 'llmserve[tensorrt]'") == done.stdout.count("pip install") == 1
    assert "nvidia-smi was not found" in message
    report = json.loads((output / "check-gpu.json").read_text())
    states = {name: step["state"] for name, step in report["steps"].items()}
    assert states == dict.fromkeys(STEPS, "not run") | {"environment": "failed"}
    assert "nvidia-smi was not found" in (output / "check-gpu.md").read_text()


def test_a_step_that_fails_does_not_stop_the_others() -> None:
    def passes() -> Details:
        return {"found": 1}

    def fails() -> Details:
        raise StepFailed("it is wrong\nand so is this", {"output": "its last words"})

    def is_not_run() -> Details:
        raise NotRun("nothing to run it on")

    def breaks() -> Details:
        raise KeyError("unforeseen")

    said: list[str] = []
    steps = {"environment": fails, "names": is_not_run, "build": breaks, "contract": passes}
    results = run_steps(steps, said.append)
    assert [each.state for each in results.values()] == [State.FAILED, State.NOT_RUN, State.FAILED, State.PASSED]
    assert results["build"].reason == "KeyError: 'unforeseen'"
    assert results["contract"].details == {"found": 1}
    assert "   it is wrong\n   and so is this" in "\n".join(said)


def test_the_page_shows_the_last_words_of_what_failed() -> None:
    def fails() -> Details:
        raise StepFailed("llmserve build ended with exit code 1: | no |", {"output": "its last words"})

    page = page_of(tensorrt_llm.SUBJECT, run_steps({"environment": dict, "build": fails}, lambda text: None))
    assert "| build | failed | 0.0 | llmserve build ended with exit code 1: \\| no \\| |" in page
    assert "```\nits last words\n```" in page


def test_a_program_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    done = run([sys.executable, "-c", code], timeout_s=1.5)
    assert done.code is None
    state = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 60
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_how_a_program_ended_is_said() -> None:
    for code, timeout_s, words in (
        ("raise SystemExit('no room')", 60, "it ended with exit code 1: no room"),
        ("import os; print('so far', flush=True); os.abort()", 60, "it was ended by signal 6: so far"),
        ("import time; time.sleep(60)", 0.1, "it did not end in time"),
    ):
        done = run([sys.executable, "-c", code], timeout_s=timeout_s)
        assert str(checks.failed("it", done)) == words


def plan(folder: Path) -> Plan:
    return Plan(tensorrt_llm.SUBJECT, folder, Path("unused"), None)


def test_an_answer_that_leaves_the_baseline_where_it_was_sure_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(NotRun, match="wrote no answers"):
        checks.parity(plan(tmp_path))
    near, sure = ({"id": name, "position": 3, "margin": margin} for name, margin in (("near", 0.09), ("sure", 0.5)))
    found = {"exact_match_rate": 0.9, "largest_margin": 0.5, "divergences": [near]}
    plan(tmp_path).eval_report.write_text(json.dumps({"parity": found}))
    assert checks.parity(plan(tmp_path)) == found
    plan(tmp_path).eval_report.write_text(json.dumps({"parity": found | {"divergences": [near, sure]}}))
    with pytest.raises(StepFailed, match=r"1 answers leave .*\nsure: token 3, 0\.500 nat"):
        checks.parity(plan(tmp_path))


def test_why_the_contract_is_not_kept_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with engines that cannot be opened: no library is installed."""
    monkeypatch.setattr(checks, "require_machine", lambda plan: None)
    with pytest.raises(StepFailed) as caught:
        checks.contract(plan(tmp_path))
    headline, reason = str(caught.value).splitlines()
    num_failed, num_skipped = (len(caught.value.details[outcome]) for outcome in ("error", "skipped"))
    assert headline == f"{num_failed} of {num_failed + num_skipped} tests"
    assert f" and {num_failed - 1} others: " in reason
    assert "tensorrt-llm, which is not installed" in reason
