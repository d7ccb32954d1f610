"""`llmserve eval` on the demo engine, in process and through a running server, against the stored baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.conftest import CHECKPOINT, ROOT, ServerProcess, llmserve

SMOKE = ROOT / "eval" / "suites" / "docstrings-smoke.yaml"


def evaluate(output: Path, *arguments: str) -> dict[str, Any]:
    done = llmserve(
        "eval", *arguments, "--hf-model-dir", str(CHECKPOINT), "--suite", str(SMOKE), "--output", str(output)
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
