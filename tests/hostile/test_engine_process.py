"""An engine in a process of its own that is killed answers again within two seconds."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import demo_engine, start_server  # noqa: F401  a fixture
from tests.hostile.conftest import IS_STRICT

MOST_S = 2.0
REQUEST = {"model": "ensemble", "prompt": "Summarize: x", "max_tokens": 2}


@pytest.mark.skipif(not IS_STRICT, reason="make hostile")
def test_a_killed_engine_answers_again_soon(demo_engine: Path) -> None:  # noqa: F811
    server = start_server(str(demo_engine), "--engine-process", "--max-kv-tokens", "16384")
    try:
        [engine] = psutil.Process(server.process.pid).children()
        engine.kill()
        began = time.monotonic()
        while httpx.post(f"{server.http}/v1/completions", json=REQUEST, timeout=60).status_code != 200:
            assert time.monotonic() - began < MOST_S
        assert time.monotonic() - began < MOST_S
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
