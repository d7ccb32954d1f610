"""`llmserve eval` on the demo engine, in process and through a running server, against the stored baseline."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import CHECKPOINT, LLMSERVE, ROOT, ServerProcess, llmserve

CHOICES = ROOT / "eval" / "suites" / "multiple-choice.yaml"
STRUCTURED = ROOT / "eval" / "suites" / "json-structured.yaml"
SMOKE = ROOT / "eval" / "suites" / "docstrings-smoke.yaml"


def evaluate(output: Path, *arguments: str, suite: Path = SMOKE) -> dict[str, Any]:
    done = llmserve(
        "eval", *arguments, "--hf-model-dir", str(CHECKPOINT), "--suite", str(suite), "--output", str(output)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stored, computed on" in done.stdout
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def test_server_and_process_give_the_same_answers(demo_engine: Path, server: ServerProcess, tmp_path: Path) -> None:
    inside = evaluate(tmp_path / "inside.json", str(demo_engine), "--concurrency", "1")
    outside = evaluate(tmp_path / "outside.json", "--url", server.grpc, "--concurrency", "16")
    texts = [[sample["engine"]["text"] for sample in report["samples"]] for report in (inside, outside)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 25
    counts = [[sample["engine"]["num_tokens"] for sample in report["samples"]] for report in (inside, outside)]
    assert counts[0] == counts[1]
    assert inside["evidence"]["positions"] > 500
    assert inside["evidence"] == outside["evidence"]  # to the bit: alone, and served among fifteen others
    assert inside["parity"]["exact_match_rate"] >= 0.9
    assert inside["metrics"]["rougeL"]["engine"] > 15
    assert abs(inside["metrics"]["rougeL"]["difference"]) < 1


def test_choices_are_as_likely_through_a_server(demo_engine: Path, server: ServerProcess, tmp_path: Path) -> None:
    inside = evaluate(tmp_path / "inside.json", str(demo_engine), suite=CHOICES)
    outside = evaluate(tmp_path / "outside.json", "--url", server.grpc, "--concurrency", "16", suite=CHOICES)
    told = [[sample["engine"]["log_likelihoods"] for sample in report["samples"]] for report in (inside, outside)]
    assert told[0] == told[1]  # to the bit
    assert len(told[0]) == 500
    assert inside["metrics"] == outside["metrics"]
    assert inside["metrics"]["acc_norm"]["engine"] > 50


def test_structured_output_is_json_in_process_and_through_a_server(
    demo_engine: Path, server: ServerProcess, tmp_path: Path
) -> None:
    """The demo network knows no JSON, and writes nothing else when it is held to it."""
    inside = evaluate(tmp_path / "inside.json", str(demo_engine), suite=STRUCTURED)
    outside = evaluate(tmp_path / "outside.json", "--url", server.grpc, suite=STRUCTURED)
    for report in (inside, outside):
        assert report["metrics"]["json_valid"]["engine"] == 100.0
        assert report["metrics"]["json_valid"]["baseline"] < 5
    texts = [[sample["engine"]["text"] for sample in report["samples"]] for report in (inside, outside)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("signal", ["kill", "terminate"])
def test_a_run_that_was_killed_goes_on_where_it_stopped(demo_engine: Path, tmp_path: Path, signal: str) -> None:
    report, partial = tmp_path / "report.json", tmp_path / "report.partial.jsonl"
    suite = ROOT / "eval" / "suites" / "docstrings.yaml"
    arguments = ["eval", str(demo_engine), "--hf-model-dir", str(CHECKPOINT), "--suite", str(suite), "--no-record"]
    arguments += ["--output", str(report), "--concurrency", "1"]
    process = subprocess.Popen([LLMSERVE, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not partial.exists() or partial.read_bytes().count(b"\n") < 60):
        time.sleep(0.02)
    getattr(process, signal)()
    assert process.wait(timeout=30) != 0
    assert not report.exists()
    num_lines = partial.read_bytes().count(b"\n")
    done = llmserve(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(report.read_text())
    assert int(content["engine"]["kept_answers"]) >= min(num_lines - 2, 400)
    assert "answers are of this run before it was interrupted" in done.stdout
    assert not partial.exists()
    assert content["parity"]["exact_match_rate"] > 0.98
