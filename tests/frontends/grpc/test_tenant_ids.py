"""Ids that clients choose name nothing of another API key's: `stop` of a stranger ends no answer and tells nothing."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton

from llmserve.backends.tensorrtllm import TensorrtLlmBackend
from llmserve.engine.fake import fake_engine
from llmserve.frontends.shared.api_keys import ApiKeys, owner_of_key
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.settings import ControlMode
from tests.backends.tensorrtllm.models import PIPELINES, tensors
from tests.frontends.server import RunningServer, running_server

OWNER, STRANGER = "owner-0123456789abcdef", "stranger-0123456789abcdef"


@pytest.fixture(params=[True, False], ids=["keys", "no keys"])
def has_keys(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def server(has_keys: bool, tmp_path: Path) -> Iterator[RunningServer]:
    owners = [owner_of_key(key.split("-")[0], key, is_admin=False, source="test") for key in (OWNER, STRANGER)]
    settings = ServerSettings(
        (PIPELINES,),
        control_mode=ControlMode.EXPLICIT,
        load_at_start=("tensorrt_llm",),
        parameter_overrides={"tensorrt_llm": {"gpt_model_path": str(tmp_path)}},
    )
    engine = fake_engine(step_delay_s=0.01)
    backend = TensorrtLlmBackend(lambda path, limits: engine)
    api_keys = ApiKeys(None, owners) if has_keys else None
    with running_server(lambda: InferenceCore(settings, {"tensorrtllm": backend}), api_keys=api_keys) as running:
        core = running.core
        assert isinstance(core, InferenceCore)
        asyncio.run_coroutine_threadsafe(core.start(), running.loop).result(60)
        assert core.ready(), core.repository_index()
        yield running
        asyncio.run_coroutine_threadsafe(core.stop(10), running.loop).result(20)


class Stream:
    def __init__(self, client: triton.InferenceServerClient, key: str) -> None:
        self._client = client
        self._answers: queue.Queue[Any] = queue.Queue()
        headers = {"authorization": f"Bearer {key}"}
        client.start_stream(lambda result, error: self._answers.put(error or result), headers=headers)

    def send(self, request_id: str, **values: Any) -> None:
        inputs = []
        for given in tensors({"input_ids": [1, 2, 3], "input_lengths": 3, **values}).values():
            inputs.append(triton.InferInput(given.name, given.shape, given.datatype))
            inputs[-1].set_data_from_numpy(given.data)
        self._client.async_stream_infer("tensorrt_llm", inputs, request_id=request_id, enable_empty_final_response=True)

    def next(self) -> Any:
        answer = self._answers.get(timeout=60)
        assert isinstance(answer, triton.InferResult), answer
        return answer.get_response()

    def last(self) -> Any:
        while not (answer := self.next()).parameters["triton_final_response"].bool_param:
            pass
        return answer

    def stop(self, request_id: str) -> Any:
        self.send(request_id, request_output_len=1, stop=True)
        return self.next()


@contextmanager
def streams(server: RunningServer, *keys: str) -> Iterator[list[Stream]]:
    clients = [triton.InferenceServerClient(server.grpc) for _ in keys]
    yield [Stream(client, key) for client, key in zip(clients, keys, strict=True)]
    for client in clients:
        client.stop_stream(cancel_requests=True)
        client.close()


def finish_reason(answer: Any) -> bytes:
    result = triton.InferResult(answer)
    return bytes(result.as_numpy("finish_reason").item())


def test_stop_ends_answers_of_the_same_key_only(server: RunningServer, has_keys: bool) -> None:
    with streams(server, OWNER, OWNER, STRANGER) as (owner, same_owner, stranger):
        owner.send("guessed", request_output_len=100, streaming=True)
        owner.next()  # it runs
        told, of_nothing = stranger.stop("guessed"), stranger.stop("nothing")
        assert finish_reason(owner.last()) == (b"length" if has_keys else b"cancelled")
        of_nothing.id = told.id
        assert told == of_nothing
        owner.send("mine", request_output_len=200, streaming=True)
        owner.next()
        same_owner.stop("mine")
        assert finish_reason(owner.last()) == b"cancelled"
