"""An engine that takes traffic only with a record of its own: `llmserve serve --require-gate`."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from llmserve.engine.directory.gate_record import RECORDS_FILE
from tests.e2e.conftest import CHECKPOINT, ROOT, llmserve, start_server

SMOKE = ROOT / "eval" / "suites" / "docstrings-smoke.yaml"


@pytest.fixture
def engine(demo_engine: Path, tmp_path: Path) -> Path:
    """Without a record."""
    return shutil.copytree(demo_engine, tmp_path / "engine", ignore=shutil.ignore_patterns(RECORDS_FILE))


def test_an_engine_serves_after_its_gate_and_not_before(engine: Path, tmp_path: Path) -> None:
    unjudged = llmserve("serve", "--require-gate", str(engine))
    assert unjudged.returncode == 2
    assert f"the gate refuses {engine}: no suite has a record for this engine" in unjudged.stderr
    gated = ("serve", str(engine), "--require-gate", "docstrings-smoke", "--http-port", "0", "--grpc-port", "0")
    refused = llmserve(*gated)
    assert refused.returncode == 2
    assert "suite docstrings-smoke has no complete record for its digest" in refused.stderr
    assert f"llmserve eval {engine} --hf-model-dir CHECKPOINT --suite docstrings-smoke" in refused.stderr

    output = str(tmp_path / "report.json")
    given = ("--hf-model-dir", str(CHECKPOINT), "--suite", str(SMOKE), "--output", output, "--served-samples", "4")
    judged = llmserve("eval", str(engine), *given)
    assert judged.returncode == 0, judged.stdout + judged.stderr
    shown = llmserve("inspect", str(engine))
    assert "docstrings-smoke: passed" in shown.stdout
    server = start_server(str(engine), "--require-gate", "docstrings-smoke")
    try:
        assert llmserve("chat", "--url", server.grpc, "--once", "Hello", "--max-tokens", "4").returncode == 0
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


def test_a_rule_that_says_nothing_is_refused(engine: Path, tmp_path: Path) -> None:
    both = llmserve("serve", str(engine), "--require-gate", "any", "--require-gate", "docs")
    assert both.returncode == 2
    assert "any names no suite" in both.stderr
    alone = llmserve("serve", str(engine), "--gate-key", str(tmp_path / "key.pub"))
    assert alone.returncode == 2
    assert "add --require-gate SUITE" in alone.stderr
