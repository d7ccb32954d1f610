"""The engine behind a `TritonPythonModel`, over response senders of the test's own. Servers: tests/compat."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from numpy.typing import NDArray
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from llmserve.backends.python.errors import TritonError
from llmserve.backends.tensorrtllm import triton_model
from llmserve.backends.tensorrtllm.triton_gauges import TritonGauges
from llmserve.backends.tensorrtllm.triton_model import EngineModel
from llmserve.engine.base import Engine
from llmserve.engine.fake import fake_engine
from llmserve.engine.settings import EngineSettings
from llmserve.errors import Unsupported
from tests.backends.tensorrtllm.models import load_model, read_config

FINAL = 1
UTILS = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    TritonError=TritonError,
    Tensor=lambda name, data: (name, data),
    InferenceResponse=lambda tensors, error=None: SimpleNamespace(tensors=dict(tensors), error=error),
)


@dataclass
class Sender:
    cancelled: bool = False
    sent: queue.Queue[tuple[Any, int]] = field(default_factory=queue.Queue)

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.sent.put((response, flags))

    def is_cancelled(self) -> bool:
        return self.cancelled

    def until_final(self) -> list[Any]:
        responses = []
        while True:
            response, flags = self.sent.get(timeout=10)
            responses.append(response)
            if flags == FINAL:
                return responses


@dataclass
class Request:
    inputs_: dict[str, NDArray[Any]]
    sender: Sender = field(default_factory=Sender)

    def inputs(self) -> list[Any]:
        return [SimpleNamespace(name=lambda n=n: n, as_numpy=lambda a=a: a) for n, a in self.inputs_.items()]

    def request_id(self) -> str:
        return "one"

    def requested_output_names(self) -> list[str]:
        return ["output_ids", "finish_reason"]

    def get_response_sender(self) -> Sender:
        return self.sender


def asking(max_tokens: int, **more: Any) -> Request:
    values = {"input_ids": [4, 5, 6], "input_lengths": 3, "request_output_len": max_tokens, **more}
    arrays = {
        name: np.array([value] if isinstance(value, list) else [[value]], np.int32) for name, value in values.items()
    }
    return Request({**arrays, "streaming": np.array([[True]])})


@pytest.fixture
def engine() -> Engine:
    return fake_engine(step_delay_s=0.01)


@pytest.fixture
def model(engine: Engine) -> Iterator[EngineModel]:
    made = EngineModel(read_config("tensorrt_llm"), "1", load_model(engine), UTILS)
    yield made
    if engine.healthy():
        made.close()


def test_answers_come_token_by_token_and_end_once(model: EngineModel) -> None:
    requests = [asking(4), asking(6)]
    model.start(requests)
    for request, length in zip(requests, (4, 6), strict=True):
        responses = request.sender.until_final()
        assert [response.tensors.keys() for response in responses] == [{"output_ids", "finish_reason"}] * length
        assert responses[-1].tensors["finish_reason"].item() == b"length"
        assert all(array.flags.writeable for response in responses for array in response.tensors.values())
        assert request.sender.sent.empty()


def test_inputs_are_copied_before_the_server_takes_them_back(model: EngineModel) -> None:
    first, second = asking(3), asking(3)
    model.start([first])
    first.inputs_["input_ids"][:] = 0
    model.start([second])
    ids = [[r.tensors["output_ids"].tolist() for r in each.sender.until_final()] for each in (first, second)]
    assert ids[0] == ids[1]


def test_a_client_that_has_gone_frees_the_engine_and_gets_an_end(model: EngineModel, engine: Engine) -> None:
    request = asking(60)
    model.start([request])
    request.sender.sent.get(timeout=10)
    request.sender.cancelled = True
    assert len(request.sender.until_final()) < 59
    deadline = time.monotonic() + 60
    while engine.stats().num_active_requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_bad_request_is_one_error_with_tritons_code(model: EngineModel) -> None:
    request = asking(0, beam_width=2)
    model.start([request])
    (response,) = request.sender.until_final()
    assert response.error.code() == TritonError.INVALID_ARG
    assert "beam_width" in response.error.message()


def test_closing_ends_open_requests_with_an_error(model: EngineModel) -> None:
    request = asking(60)
    model.start([request])
    request.sender.sent.get(timeout=10)
    model.close()
    assert request.sender.until_final()[-1].error.code() == TritonError.UNAVAILABLE


def test_an_engine_that_fails_ends_every_request_once_and_is_no_longer_ready() -> None:
    model = EngineModel(read_config("tensorrt_llm"), "1", load_model(fake_engine(fail_at_step=3)), UTILS)
    assert model.healthy()
    requests = [asking(60), asking(60)]
    model.start(requests)
    errors = [[response.error for response in request.sender.until_final()] for request in requests]
    assert all(error is None for each in errors for error in each[:-1])
    assert all(each[-1] is not None for each in errors)
    assert not model.healthy()
    model.close()


def arguments(config: ModelConfig, kind: str = "CPU", device: int = 0) -> dict[str, str]:
    return {
        "model_config": json.dumps(json_format.MessageToDict(config)),
        "model_repository": "m",
        "model_version": "1",
        "model_instance_kind": kind,
        "model_instance_device_id": str(device),
    }


def test_a_model_that_is_not_decoupled_is_refused() -> None:
    config = read_config("tensorrt_llm")
    config.model_transaction_policy.decoupled = False
    with pytest.raises(Unsupported, match="decoupled: true"):
        EngineModel.open(arguments(config), UTILS)


@pytest.mark.parametrize(("kind", "device", "gpus"), [("CPU", 0, ()), ("GPU", 1, (1,))])
def test_each_instance_opens_the_engine_on_its_own_gpu(
    kind: str, device: int, gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server makes a process for each GPU of the group, and tells all of them the whole group."""
    config = read_config("tensorrt_llm")
    config.parameters["gpt_model_path"].string_value = "/engine"
    del config.instance_group[:]
    config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU, gpus=[0, 1])
    opened: list[EngineSettings] = []

    def opener(path: Path, settings: EngineSettings) -> Engine:
        opened.append(settings)
        return fake_engine()

    monkeypatch.setattr(triton_model, "open_engine", opener)
    EngineModel.open(arguments(config, kind, device), UTILS).close()
    assert [settings.gpu.instance_gpus for settings in opened] == [gpus]


def test_gauges_are_set_when_they_change() -> None:
    class Family:
        GAUGE = "gauge"
        values: list[tuple[str, dict[str, str], float]] = []  # noqa: RUF012

        def __init__(self, name: str, description: str, kind: str) -> None:
            self.name = name

        def Metric(self, labels: dict[str, str]) -> Any:  # noqa: N802 - as in Triton
            return SimpleNamespace(set=lambda value: Family.values.append((self.name, labels, value)))

    gauges = TritonGauges(SimpleNamespace(MetricFamily=Family), {"model": "m"})
    for value in (1.0, 1.0, 2.0):
        gauges.export([("family", {"kind": "used"}, value)])
    labels = {"model": "m", "kind": "used"}
    assert Family.values == [("family", labels, 1.0), ("family", labels, 2.0)]


def test_a_server_without_metrics_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(**arguments: Any) -> None:
        raise RuntimeError("metrics not allowed")

    refuse.GAUGE = 0  # type: ignore[attr-defined]
    gauges = TritonGauges(SimpleNamespace(MetricFamily=refuse), {})
    for _ in range(3):
        gauges.export([("family", {}, 1.0)])
    assert caplog.text.count("metrics not allowed") == 1
