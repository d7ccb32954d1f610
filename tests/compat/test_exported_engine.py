"""An exported engine on a real Triton, and on our own server through its Python backend, beside `llmserve serve`.

The same client, the same requests, and texts that are equal. `make compat` starts the real Triton.
"""

from __future__ import annotations

import http.client
import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.compat.conftest import TRITON
from tests.compat.observe import metrics
from tools.servers import HOST, Endpoint, llmserve_server, triton_server

ROOT = Path(__file__).resolve().parents[2]
LLMSERVE = Path(sys.executable).with_name("llmserve")
CHECKPOINT = ROOT / "build/checkpoints/baichuan2-tiny-docsum"
PROMPTS = [json.loads(line)["document"] for line in (ROOT / "eval/data/docstrings.jsonl").read_text().splitlines()[:8]]
MAX_TOKENS, LONG, BATCH = 24, 400, 64
NUM_REQUESTS = 12  # of a client that goes away; all of them fit into the queue
TIMEOUT_S = 60


def llmserve(*arguments: object) -> None:
    subprocess.run([LLMSERVE, *map(str, arguments)], cwd=ROOT, check=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "demo"
    llmserve("build", CHECKPOINT, "--output-dir", path)
    return path


@pytest.fixture(scope="module")
def exported(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "models"
    llmserve("export", "triton", engine, "--output", path)
    return path


@pytest.fixture(scope="module")
def serving(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """What the others are compared with: `llmserve serve ENGINE`."""
    repository, log = ROOT / "pipelines", tmp_path_factory.mktemp("log") / "serve.txt"
    with llmserve_server(repository, log, str(engine)) as endpoint:
        yield endpoint


@pytest.fixture(scope="module", params=["python-backend", "triton"])
def endpoint(
    request: pytest.FixtureRequest, exported: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    log = tmp_path_factory.mktemp("log") / "exported.txt"
    if request.param == "python-backend":
        with llmserve_server(exported, log) as running:
            yield running
        return
    if TRITON is None:
        pytest.skip("the real server is started by `make compat`")
    with triton_server(Path(TRITON).absolute(), exported, log) as running:
        yield running


def tensor(name: str, value: Any, dtype: type) -> triton.InferInput:
    data: NDArray[Any] = np.array([[value]] if np.ndim(value) == 0 else [value], dtype=dtype)
    made = triton.InferInput(name, list(data.shape), np_to_triton_dtype(data.dtype))
    made.set_data_from_numpy(data)
    return made


def text_inputs(prompt: str, *, max_tokens: int = MAX_TOKENS) -> list[triton.InferInput]:
    return [
        tensor("text_input", prompt.encode(), object),
        tensor("max_tokens", max_tokens, np.int32),
        tensor("stream", True, bool),
    ]


def id_inputs(**more: triton.InferInput) -> list[triton.InferInput]:
    """For `tensorrt_llm` itself: a long answer that no end token ends."""
    prompt = [5, 6, 7, 8]
    return [
        tensor("input_ids", prompt, np.int32),
        tensor("input_lengths", len(prompt), np.int32),
        tensor("request_output_len", LONG, np.int32),
        tensor("streaming", True, bool),
        *more.values(),
    ]


class Stream:
    """One ModelStreamInfer call."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.client = triton.InferenceServerClient(endpoint.grpc)
        self.results: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(callback=lambda result, error: self.results.put(error or result))

    def send(self, model: str, inputs: list[triton.InferInput], request_id: str = "") -> None:
        self.client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)

    def next(self) -> Any:
        result = self.results.get(timeout=TIMEOUT_S)
        if isinstance(result, Exception):
            raise result
        return result

    def responses(self) -> Iterator[Any]:
        """Those with tensors, until the final one."""
        while True:
            result = self.next()
            if result.get_response().outputs:
                yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


@contextmanager
def open_stream(endpoint: Endpoint) -> Iterator[Stream]:
    stream = Stream(endpoint)
    try:
        yield stream
    finally:
        stream.client.stop_stream(cancel_requests=True)
        stream.client.close()


def deltas(endpoint: Endpoint, prompt: str) -> list[str]:
    with open_stream(endpoint) as stream:
        stream.send("ensemble", text_inputs(prompt))
        return [result.as_numpy("text_output").item().decode() for result in stream.responses()]


def generate(endpoint: Endpoint, **fields: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(HOST, endpoint.http_port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v2/models/ensemble/generate", json.dumps(fields))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def engine_metric(endpoint: Endpoint, kind: str) -> float:
    samples = metrics(endpoint)
    return next(value for name, value in samples.items() if name.startswith("nv_trt_llm") and f'"{kind}"' in name)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_streams_are_the_same_delta_by_delta(endpoint: Endpoint, serving: Endpoint) -> None:
    expected = deltas(serving, PROMPTS[0])
    assert len(expected) > 3
    assert deltas(endpoint, PROMPTS[0]) == expected


def test_concurrent_streams_share_the_engine_and_keep_their_texts(endpoint: Endpoint, serving: Endpoint) -> None:
    expected = ["".join(deltas(serving, prompt)) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(lambda prompt: "".join(deltas(endpoint, prompt)), PROMPTS))
    assert texts == expected
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    "fields",
    [
        {"text_input": PROMPTS[1]},
        {"text_input": PROMPTS[1], "temperature": 0.8, "top_k": 20, "seed": 7},
        {"messages": json.dumps([{"role": "user", "content": "Hello"}])},
        {"text_input": PROMPTS[2], "stop_words": "the"},
    ],
    ids=["greedy", "drawn", "chat", "stopped"],
)
def test_unary_answers_are_the_same(endpoint: Endpoint, serving: Endpoint, fields: dict[str, Any]) -> None:
    answers = [generate(server, max_tokens=MAX_TOKENS, **fields) for server in (endpoint, serving)]
    assert [status for status, _ in answers] == [200, 200]
    names = ("text_output", "finish_reason", "num_prompt_tokens", "num_completion_tokens")
    assert [answers[0][1][name] for name in names] == [answers[1][1][name] for name in names]


def test_stop_ends_a_running_request_of_the_same_id(endpoint: Endpoint) -> None:
    with open_stream(endpoint) as stream:
        stream.send("tensorrt_llm", id_inputs(), request_id="one")
        stream.next()
        with open_stream(endpoint) as other:
            other.send("tensorrt_llm", id_inputs(stop=tensor("stop", True, bool)), request_id="one")
            assert list(other.responses()) == []
        *_, last = stream.responses()
    assert last.as_numpy("finish_reason").item() == b"cancelled"


def test_a_client_that_goes_away_frees_the_engine(endpoint: Endpoint) -> None:
    """Every request fills the batch: to their ends they would take LONG steps each, and the server notices sooner."""
    sequences = tensor("num_return_sequences", BATCH, np.int32)
    before = engine_metric(endpoint, "iteration_counter")
    with open_stream(endpoint) as stream:
        for _ in range(NUM_REQUESTS):
            stream.send("tensorrt_llm", id_inputs(num_return_sequences=sequences))
        stream.next()
    wait_for(lambda: engine_metric(endpoint, "iteration_counter") > before)
    wait_for(lambda: not engine_metric(endpoint, "active") and not engine_metric(endpoint, "used"))
    assert engine_metric(endpoint, "iteration_counter") < before + NUM_REQUESTS * LONG
    assert generate(endpoint, text_input=PROMPTS[0], max_tokens=2)[0] == 200


def test_a_bad_request_is_refused_with_the_reason_and_the_next_one_works(endpoint: Endpoint, serving: Endpoint) -> None:
    bad = {"text_input": PROMPTS[0], "max_tokens": 8, "beam_width": 3, "temperature": -1.0}
    (status, answer), (_, expected) = generate(endpoint, **bad), generate(serving, **bad)
    assert status == 400
    for problem in ("beam_width must be 1", "temperature must not be negative"):
        assert problem in answer["error"]
        assert problem in expected["error"]
    with open_stream(endpoint) as stream:
        stream.send("ensemble", text_inputs(PROMPTS[0], max_tokens=0))
        with pytest.raises(InferenceServerException, match="max_tokens"):
            stream.next()
    assert generate(endpoint, text_input=PROMPTS[0], max_tokens=2)[0] == 200
