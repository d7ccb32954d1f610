"""What the log says of requests: as JSON, with their ids, models and keys' names, and nothing that is secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.frontends.shared.api_keys import ApiKeys
from llmserve.frontends.shared.log_settings import LogControl, LogSettings
from tests.frontends.grpc.test_inference_service import tensor
from tests.frontends.http.test_inference_api import ADD_TWO, Http, fp32
from tests.frontends.server import RunningServer, running_server, wait_until
from tests.frontends.stub_core import StubCore

Asking: TypeAlias = Callable[[RunningServer], Http]
KEY, ADMIN_KEY = "user-0123456789abcdef", "admin-0123456789abcdef"
BODY = {"inputs": [fp32("INPUT0", [123456.0]), fp32("INPUT1", [2.0])]}


class Log:
    """What is printed."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    def text(self) -> str:
        return self.stream.getvalue()

    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]

    def of(self, request: str) -> list[dict[str, Any]]:
        return [entry for entry in self.documents() if entry.get("request") == request]


@contextmanager
def logged_server(settings: LogSettings, api_keys: ApiKeys | None = None) -> Iterator[tuple[RunningServer, Log]]:
    log = Log()
    handler = logging.StreamHandler(log.stream)
    logger = logging.getLogger("llmserve")
    logger.addHandler(handler)
    level = logger.level
    try:
        control = LogControl(settings, logger=logger, handlers=[handler])
        with running_server(StubCore, logs=control, api_keys=api_keys) as running:
            yield running, log
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ApiKeys:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(f"keys: [{{name: team-a, key: {KEY}}}, {{name: boss, key: {ADMIN_KEY}, admin: true}}]")
    return ApiKeys(file)


@pytest.fixture(scope="module")
def shown(keys: ApiKeys) -> Iterator[tuple[RunningServer, Log]]:
    with logged_server(LogSettings(log_verbose_level=1, log_format="json"), keys) as running:
        yield running


@pytest.fixture
def asking() -> Iterator[Asking]:
    made: list[Http] = []

    def make(server: RunningServer) -> Http:
        made.append(Http(server.http_port))
        return made[-1]

    yield make
    for each in made:
        each.connection.close()


def headers(request_id: str, key: str = KEY) -> dict[str, str]:
    return {"x-request-id": request_id, "authorization": f"Bearer {key}"}


def test_a_line_for_each_request(shown: tuple[RunningServer, Log], asking: Asking) -> None:
    server, log = shown
    call = asking(server)
    call("POST", ADD_TWO, BODY, headers("a"))
    call("POST", "/v2/models/nope/infer", BODY, headers("b"))
    call("POST", ADD_TWO, BODY, headers("c", "wrong-0123456789abcdef"))
    call("GET", "/v2/logging", None, headers("d", ADMIN_KEY))
    call("GET", "/v2/nothing%0ahere", None, {})
    found = {entry.get("request_id"): entry for entry in log.documents()}
    first = found["a"]
    assert {name: first[name] for name in ("level", "logger", "request", "status", "model", "key", "is_complete")} == {
        "level": "INFO", "logger": "llmserve.requests", "request": f"POST {ADD_TWO}", "status": 200,
        "model": "add_two", "key": "team-a", "is_complete": True,
    }  # fmt: skip
    assert first["duration_ms"] > 0
    assert first["time"].endswith("Z")
    assert first["message"].startswith(f"POST {ADD_TWO}: 200 in ")
    assert (found["b"]["status"], found["b"]["key"], found["b"]["model"]) == (404, "team-a", "nope")
    assert found["c"]["status"] == 401
    assert "key" not in found["c"]
    assert found["d"]["key"] == "boss"
    assert log.of("GET /v2/nothing\\nhere")[0]["status"] == 404
    assert not any(secret in log.text() for secret in (KEY, ADMIN_KEY, "wrong-", "123456"))


def test_grpc_calls(shown: tuple[RunningServer, Log]) -> None:
    server, log = shown
    with triton.InferenceServerClient(server.grpc) as client:
        data = np.ones((1, 2), np.float32)
        client.infer("add_two", [tensor("INPUT0", data), tensor("INPUT1", data)], headers=headers("g1"))
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(service_pb2.ModelInferRequest(model_name="nope"), metadata=tuple(headers("g2").items()))
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(service_pb2.ModelInferRequest(model_name="nope"), metadata=(("x-request-id", "g3"),))
        slow = service_pb2.ModelInferRequest(model_name="slow")
        slow.inputs.add(name="X", datatype="INT32", shape=[1]).contents.int_contents.append(1)
        running = stub.ModelInfer.future(slow, metadata=tuple(headers("g4").items()))
        assert isinstance(server.core, StubCore)
        core = server.core
        wait_until(lambda: core.running > 0)
        running.cancel()
    wait_until(lambda: {"g1", "g2", "g3", "g4"} <= {entry.get("request_id") for entry in log.documents()})
    found = {entry.get("request_id"): entry for entry in log.documents()}
    assert found["g1"]["request"] == "/inference.GRPCInferenceService/ModelInfer"
    assert [found[each]["status"] for each in ("g1", "g2", "g3", "g4")] == [
        "OK", "NOT_FOUND", "UNAUTHENTICATED", "CANCELLED",
    ]  # fmt: skip
    assert [found[each].get("model") for each in ("g1", "g2", "g3")] == ["add_two", "nope", None]
    assert (found["g4"]["is_complete"], found["g1"]["is_complete"]) == (False, True)


def test_a_client_that_goes_away(shown: tuple[RunningServer, Log], asking: Asking) -> None:
    server, log = shown
    call = asking(server)
    body = json.dumps({"inputs": [{"name": "X", "datatype": "INT32", "shape": [1], "data": [1]}]})
    call.connection.request("POST", "/v2/models/slow/infer", body, headers("gone"))
    core = server.core
    assert isinstance(core, StubCore)
    wait_until(lambda: core.running > 0)
    call.connection.close()
    wait_until(lambda: bool(log.of("POST /v2/models/slow/infer")))
    (entry,) = log.of("POST /v2/models/slow/infer")
    assert (entry["status"], entry["is_complete"], entry["request_id"]) == (499, False, "gone")


def test_a_fault_has_the_id_of_its_request(shown: tuple[RunningServer, Log], asking: Asking) -> None:
    server, log = shown
    call = asking(server)
    # this core takes that for a valid request
    assert call("POST", ADD_TWO, {"inputs": []}, headers("fault"))[0] == 500
    errors = [entry for entry in log.documents() if entry["level"] == "ERROR"]
    assert [(entry["request_id"], entry["model"], entry["key"]) for entry in errors] == [("fault", "add_two", "team-a")]
    assert "KeyError: 'INPUT0'" in errors[0]["exception"]


def test_no_client_writes_lines_of_its_own(asking: Asking) -> None:
    with logged_server(LogSettings(log_verbose_level=1)) as (server, log):
        call = asking(server)
        call("GET", "/v2/models/a%0aERROR%20forged" + "x" * 5000)
        call("GET", "/%0d%0aERROR%20forged" + "x" * 5000)
        call("GET", "/v2", None, {"x-request-id": "no\tid"})
    lines = log.text().splitlines()
    assert [line.split()[0] for line in lines] == ["INFO"] * 3
    assert max(map(len, lines)) < 800


def test_requests_are_shown_when_they_are_asked_for(asking: Asking) -> None:
    with logged_server(LogSettings()) as (server, log):
        call = asking(server)
        call("GET", "/v2", None, {"x-request-id": "silent"})
        assert log.text() == ""
        call("POST", "/v2/logging", {"log_verbose_level": 1})
        call("GET", "/v2", None, {"x-request-id": "loud"})
        assert log.text().splitlines()[-1].startswith("INFO llmserve.requests: GET /v2: 200 in ")
        assert log.text().endswith(", request_id loud\n")
        call("POST", "/v2/logging", {"log_format": "json"})
        call("GET", "/v2")
        assert json.loads(log.text().splitlines()[-1])["status"] == 200
