"""`llmserve serve --engine-process`: an engine that crashes does not take the server with it."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton

from tests.e2e.conftest import ROOT, ServerProcess, start_server
from tests.frontends.server import wait_until

TEXT = "Summarize: The connection is closed. Any pending data is sent before."


@pytest.fixture
def server(demo_engine: Path) -> Iterator[ServerProcess]:
    server = start_server(str(demo_engine), "--engine-process", "--max-kv-tokens", "16384")
    children = psutil.Process(server.process.pid).children()
    assert len(children) == 1
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0
    assert [child for child in children if child.is_running()] == []


def inputs(**more: Any) -> list[triton.InferInput]:
    values: dict[str, np.ndarray[Any, Any]] = {
        "text_input": np.array([[TEXT.encode()]], dtype=object),
        "max_tokens": np.array([[more.pop("max_tokens", 24)]], np.int32),
        "stream": np.array([[more.pop("stream", False)]]),
        **({"end_id": np.array([[more.pop("end_id")]], np.int32)} if "end_id" in more else {}),
        **{name: np.array([[value.encode()]], dtype=object) for name, value in more.items()},
    }
    made = []
    for name, value in values.items():
        kind = {"O": "BYTES", "i": "INT32", "b": "BOOL"}[value.dtype.kind]
        made.append(triton.InferInput(name, list(value.shape), kind))
        made[-1].set_data_from_numpy(value)
    return made


class Stream:
    """One stream of a real client: texts, then an error or the end."""

    def __init__(self, address: str) -> None:
        self._client = triton.InferenceServerClient(address)
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def ask(self, **more: Any) -> None:
        self._client.async_stream_infer("ensemble", inputs(**more), enable_empty_final_response=True)

    def next(self) -> tuple[str, bool, Any]:
        """A text, whether it is the last, and an error."""
        result, error = self._answers.get(timeout=60)
        if error is not None:
            return "", True, error
        response = result.get_response()
        text = result.as_numpy("text_output")
        final = response.parameters["triton_final_response"].bool_param
        return ("" if text is None else text.reshape(-1)[0].decode()), final, None

    def rest(self) -> tuple[str, Any]:
        whole, is_last, error = "", False, None
        while not is_last:
            text, is_last, error = self.next()
            whole += text
        return whole, error

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()


def answer(server: ServerProcess, **more: Any) -> str:
    stream = Stream(server.grpc)
    stream.ask(**more)
    text, error = stream.rest()
    stream.close()
    assert error is None
    return text


def metric(server: ServerProcess, name: str) -> float:
    with urllib.request.urlopen(server.metrics, timeout=30) as response:
        text = response.read().decode()
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_killed_engine_ends_its_answers_and_comes_back(server: ServerProcess) -> None:
    before = answer(server)
    assert before
    assert metric(server, "llmserve_engine_restarts_total") == 0
    (child,) = psutil.Process(server.process.pid).children()
    streams = [Stream(server.grpc) for _ in range(8)]
    for stream in streams[:4]:
        stream.ask(max_tokens=440, stream=True, end_id=-1)
    begun = [stream.next() for stream in streams[:4]]
    assert [error for _, _, error in begun] == [None] * 4
    os.kill(child.pid, signal.SIGSTOP)  # whoever asks now is certainly not answered before it dies
    for stream in streams[4:]:
        stream.ask(max_tokens=440, stream=True, end_id=-1)
    os.kill(child.pid, signal.SIGKILL)
    ends = [stream.rest()[1] for stream in streams]
    for stream in streams:
        stream.close()
    assert all(isinstance(error, triton.InferenceServerException) for error in ends[4:])
    failed = [error for error in ends if error is not None]  # on a slow machine some of the first four have ended
    assert all("the engine's process ended" in error.message() for error in failed)

    client = triton.InferenceServerClient(server.grpc)
    assert client.is_server_live()
    wait_until(lambda: bool(client.is_model_ready("ensemble")))
    client.close()
    assert answer(server) == before
    assert metric(server, "llmserve_engine_restarts_total") == 1


def test_a_guide_is_compiled_where_the_engine_is(server: ServerProcess) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(red|green) [0-9]{3}"}
    assert re.fullmatch("(red|green) [0-9]{3}", answer(server, **guide).strip())


def test_its_cost_can_be_measured(demo_engine: Path) -> None:
    command = (sys.executable, "-m", "tools.bench_engine_process", str(demo_engine))
    sizes = ("--streams", "2", "--tokens", "4", "--rounds", "1")
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    here, there, message = done.stdout.splitlines()
    assert here.startswith("in this process")
    assert there.startswith("own process")
    assert message.startswith("a step of 2: ")
