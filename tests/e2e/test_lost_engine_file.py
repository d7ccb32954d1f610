"""An engine file that is truncated under a running server: its streams fail, the rest of the server goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmserve.engine.directory.artifact import ENGINE_FILE
from tests.e2e.conftest import ServerProcess, start_server
from tests.e2e.test_engine_process import TEXT, Stream, answer


def status(url: str, body: object = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def engine(demo_engine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo_engine, tmp_path / "engine")


@pytest.fixture
def server(engine: Path) -> Iterator[ServerProcess]:
    server = start_server(str(engine), "--model-control-mode", "explicit", "--load-model", "*")
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0


def test_the_server_outlives_its_engine_file(server: ServerProcess, engine: Path, demo_engine: Path) -> None:
    before = answer(server)
    stream = Stream(server.grpc)
    stream.ask(max_tokens=440, stream=True, end_id=-1)
    assert stream.next()[2] is None
    server.process.send_signal(signal.SIGSTOP)  # so that the answer cannot have ended before
    os.truncate(engine / ENGINE_FILE, 0)
    server.process.send_signal(signal.SIGCONT)
    _, error = stream.rest()
    stream.close()
    assert "was truncated, or cannot be read any more" in error.message()

    assert status(f"{server.http}/v2/health/live") == 200
    assert status(f"{server.http}/v2/models/tensorrt_llm/ready") == 400
    assert status(f"{server.http}/v2/models/preprocessing/ready") == 200
    asked = {"text_input": TEXT, "max_tokens": 4}
    assert status(f"{server.http}/v2/models/ensemble/generate", asked) == 503

    (engine / "whole").write_bytes((demo_engine / ENGINE_FILE).read_bytes())
    (engine / "whole").rename(engine / ENGINE_FILE)
    assert status(f"{server.http}/v2/repository/models/tensorrt_llm/load", {}) == 200
    assert answer(server) == before
