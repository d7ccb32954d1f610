"""Existing streaming clients, written for tensorrtllm_backend with tritonclient, against a real server process."""

from __future__ import annotations

import json
import queue
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from tests.e2e.conftest import ROOT, ServerProcess

DOCUMENTS = [
    json.loads(line)["document"] for line in (ROOT / "eval/data/docstrings.jsonl").read_text().splitlines()[:32]
]


def tensor(name: str, value: Any, dtype: type) -> triton.InferInput:
    data: NDArray[Any] = np.array([[value]], dtype=dtype)
    made = triton.InferInput(name, list(data.shape), np_to_triton_dtype(data.dtype))
    made.set_data_from_numpy(data)
    return made


def client_inputs(text: str, *, max_tokens: int = 24, stream: bool = True) -> list[triton.InferInput]:
    """The inputs that upstream's end-to-end client sends, empty word lists included."""
    return [
        tensor("text_input", text.encode(), object),
        tensor("max_tokens", max_tokens, np.int32),
        tensor("bad_words", b"", object),
        tensor("stop_words", b"", object),
        tensor("stream", stream, bool),
        tensor("beam_width", 1, np.int32),
        tensor("temperature", 1.0, np.float32),
        tensor("repetition_penalty", 1.0, np.float32),
        tensor("presence_penalty", 0.0, np.float32),
        tensor("random_seed", 7, np.uint64),
        tensor("length_penalty", 1.0, np.float32),
    ]


class Stream:
    """One `start_stream` client: what upstream's UserData queue does."""

    def __init__(self, url: str) -> None:
        self.client = triton.InferenceServerClient(url)
        self.results: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(callback=lambda result, error: self.results.put(error or result))

    def send(self, model: str, inputs: list[triton.InferInput], request_id: str = "") -> None:
        self.client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)

    def responses(self) -> Iterator[Any]:
        """Until the final response of one request."""
        while True:
            result = self.results.get(timeout=60)
            if isinstance(result, Exception):
                raise result
            yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return

    def close(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def streamed_text(url: str, prompt: str, **options: Any) -> list[str]:
    stream = Stream(url)
    try:
        stream.send("ensemble", client_inputs(prompt, **options))
        outputs = [result.as_numpy("text_output") for result in stream.responses()]
        return [output.reshape(-1)[0].decode() for output in outputs if output is not None]
    finally:
        stream.close()


def metric(server: ServerProcess, family: str, *labels: str) -> float:
    lines = urllib.request.urlopen(server.metrics, timeout=10).read().decode().splitlines()
    found = (line for line in lines if line.startswith(f"{family}{{") and all(label in line for label in labels))
    return float(next(found).split()[-1])


def used_blocks(server: ServerProcess) -> float:
    return metric(server, "nv_trt_llm_kv_cache_block_metrics", 'kv_cache_block_type="used"')


def wait_for_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while metric(server, "nv_trt_llm_request_metrics", 'request_type="active"') or used_blocks(server):
        assert time.monotonic() < deadline, "blocks are still held"
        time.sleep(0.05)


def test_tokens_arrive_one_by_one_and_join_to_the_whole_answer(server: ServerProcess) -> None:
    prompt = f"Summarize:\n{DOCUMENTS[0]}"
    deltas = streamed_text(server.grpc, prompt)
    assert len(deltas) > 3
    assert "".join(deltas) == "".join(streamed_text(server.grpc, prompt, stream=False))


def column(name: str, values: list[Any], dtype: type) -> triton.InferInput:
    data: NDArray[Any] = np.array([[value] for value in values], dtype=dtype)
    made = triton.InferInput(name, list(data.shape), np_to_triton_dtype(data.dtype))
    made.set_data_from_numpy(data)
    return made


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_is_answered_row_by_row(server: ServerProcess, stream: bool) -> None:
    prompts, lengths = [f"Summarize:\n{document}" for document in DOCUMENTS[:4]], [24, 3, 16, 9]
    inputs = [
        column("text_input", [prompt.encode() for prompt in prompts], object),
        column("max_tokens", lengths, np.int32),
        column("stream", [stream] * 4, bool),
        column("temperature", [1.0, 0.5, 1.0, 1.0], np.float32),
        column("stop_words", [b""] * 4, object),
        column("random_seed", [1, 2, 3, 4], np.uint64),
    ]
    texts = dict.fromkeys(range(4), "")
    client = Stream(server.grpc)
    try:
        client.send("ensemble", inputs)
        results = list(client.responses())
    finally:
        client.close()
    for result in results:
        if (text := result.as_numpy("text_output")) is not None:
            texts[result.as_numpy("batch_index").item()] += text.item().decode()
    alone = [
        "".join(streamed_text(server.grpc, prompt, max_tokens=length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    assert list(texts.values()) == alone
    finals = [result.get_response().parameters["triton_final_response"].bool_param for result in results]
    assert finals == [False] * (len(results) - 1) + [True]
    wait_for_idle(server)


def test_lists_are_a_batch_over_http(server: ServerProcess) -> None:
    prompts = [f"Summarize:\n{document}" for document in DOCUMENTS[:2]]
    asked = {"text_input": prompts, "max_tokens": [8, 12], "stream": [True, True]}
    with httpx.Client(base_url=f"{server.http}/v2/models/ensemble", timeout=60) as client:
        answer = client.post("/generate_stream", json=asked).raise_for_status().text
        refused = client.post("/generate", json=asked)
        uneven = client.post("/generate", json={**asked, "max_tokens": 8})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]
    texts = ["".join(event["text_output"] for event in events if event["batch_index"] == row) for row in range(2)]
    assert texts == [
        "".join(streamed_text(server.grpc, prompt, max_tokens=length))
        for prompt, length in zip(prompts, (8, 12), strict=True)
    ]
    assert "exactly 1 response" in refused.json()["error"]
    assert "batch size does not match" in uneven.json()["error"]
    wait_for_idle(server)


def test_a_batch_that_its_client_leaves_is_cancelled(server: ServerProcess) -> None:
    client = Stream(server.grpc)
    inputs = [
        column("text_input", [DOCUMENTS[0].encode()] * 3, object),
        column("max_tokens", [450] * 3, np.int32),
        column("end_id", [-1] * 3, np.int32),
        column("stream", [True] * 3, bool),
    ]
    client.send("ensemble", inputs)
    next(client.responses())
    client.close()
    wait_for_idle(server)


def test_32_concurrent_clients_get_what_they_get_alone(server: ServerProcess) -> None:
    prompts = [f"Summarize:\n{document}" for document in DOCUMENTS]
    alone = ["".join(streamed_text(server.grpc, prompt)) for prompt in prompts]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda prompt: "".join(streamed_text(server.grpc, prompt)), prompts))
    assert together == alone
    assert len(set(alone)) > 20
    wait_for_idle(server)


def test_a_request_is_stopped_by_its_id(server: ServerProcess, demo_engine: Path) -> None:
    stream, stopper = Stream(server.grpc), Stream(server.grpc)
    ids = np.array([[195, *range(300, 330), 196]], dtype=np.int32)
    input_ids = triton.InferInput("input_ids", list(ids.shape), "INT32")
    input_ids.set_data_from_numpy(ids)
    inputs = [
        input_ids,
        tensor("input_lengths", ids.size, np.int32),
        tensor("request_output_len", 450, np.int32),
        tensor("end_id", -1, np.int32),
        tensor("streaming", True, bool),
    ]
    try:
        stream.send("tensorrt_llm", inputs, request_id="long-answer")
        responses = stream.responses()
        next(responses)
        stopper.send("tensorrt_llm", [*inputs, tensor("stop", True, bool)], request_id="long-answer")
        assert sum(1 for _ in responses) < 449
    finally:
        stream.close()
        stopper.close()
    wait_for_idle(server)


def num_cancelled(server: ServerProcess) -> float:
    return metric(server, "nv_inference_request_failure", 'model="tensorrt_llm"', 'reason="CANCELED"')


def test_a_client_that_goes_away_frees_its_blocks(server: ServerProcess) -> None:
    """Because its request is cancelled, not because it came to its end."""
    before = num_cancelled(server)
    stream = Stream(server.grpc)
    inputs = [*client_inputs("Tell me everything.", max_tokens=450), tensor("end_id", -1, np.int32)]
    stream.send("ensemble", inputs)
    next(stream.responses())
    assert used_blocks(server) > 0
    stream.close()
    wait_for_idle(server)
    assert num_cancelled(server) == before + 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (tensor("beam_width", 4, np.int32), "beam_width"),
        (tensor("max_tokens", 0, np.int32), "max_tokens"),
        (tensor("temperature", float("nan"), np.float32), "temperature"),
        (tensor("text_input", b"", object), "empty"),
        (tensor("text_input", b"\xff\xfe", object), "UTF-8"),
        (tensor("text_input", b"word " * 2000, object), "long"),
    ],
    ids=["beam", "max_tokens", "nan", "empty", "utf8", "long"],
)
def test_a_bad_request_is_refused_and_the_stream_goes_on(
    server: ServerProcess, change: triton.InferInput, words: str
) -> None:
    inputs = [given if given.name() != change.name() else change for given in client_inputs("Summarize:\nx y z.")]
    stream = Stream(server.grpc)
    try:
        stream.send("ensemble", inputs)
        with pytest.raises(Exception, match=words):
            list(stream.responses())
        stream.send("ensemble", client_inputs("Summarize:\nReturn the sum of two numbers."))
        assert any(result.as_numpy("text_output") is not None for result in stream.responses())
    finally:
        stream.close()


def test_generate_over_http_as_with_curl(server: ServerProcess) -> None:
    text = f"Summarize:\n{DOCUMENTS[1]}"
    body = {"text_input": text, "max_tokens": 24, "bad_words": "", "stop_words": ""}
    request = urllib.request.Request(f"{server.http}/v2/models/ensemble/generate", json.dumps(body).encode())
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    assert answer["model_name"] == "ensemble"
    assert answer["text_output"] == "".join(streamed_text(server.grpc, text))


def test_generate_stream_sends_events(server: ServerProcess) -> None:
    body: dict[str, Any] = {"text_input": f"Summarize:\n{DOCUMENTS[2]}", "max_tokens": 24, "stream": True}
    request = urllib.request.Request(f"{server.http}/v2/models/ensemble/generate_stream", json.dumps(body).encode())
    lines = urllib.request.urlopen(request, timeout=60).read().decode().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert len(events) > 3
    assert "".join(event["text_output"] for event in events) == "".join(streamed_text(server.grpc, body["text_input"]))
