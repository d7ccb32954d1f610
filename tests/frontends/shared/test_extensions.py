"""The protocol's extensions over both protocols: model repository, logging and trace settings."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import grpc
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.errors import InvalidArgument
from llmserve.frontends.http.extension_routes import PIECE_CHARS
from llmserve.frontends.shared.log_settings import LogControl, LogSettings
from llmserve.frontends.shared.trace_settings import TraceSettings
from llmserve.frontends.shared.tracer import Tracer
from tests.frontends.grpc.test_inference_service import failure
from tests.frontends.http.test_inference_api import Http
from tests.frontends.server import RunningServer
from tests.frontends.stub_core import StubCore

Client: TypeAlias = Any  # either of tritonclient's, which have no types
START = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_file": os.devnull,
    "trace_mode": "triton",
}  # fmt: skip


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: RunningServer, core: StubCore) -> Iterator[Client]:
    """tritonclient over one protocol, then over the other."""
    kind = {"grpc": triton_grpc, "http": triton_http}[request.param]
    url = {"grpc": server.grpc, "http": server.http}[request.param]
    with kind.InferenceServerClient(url) as made:
        yield made


@pytest.fixture
def call(server: RunningServer, core: StubCore) -> Iterator[Http]:
    made = Http(server.http_port)
    yield made
    made.connection.close()


@pytest.fixture
def stub(server: RunningServer, core: StubCore) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def settings_of(answer: Any) -> dict[str, Any]:
    """Trace or log settings in the form that the HTTP client gives them."""
    if isinstance(answer, dict):
        return answer
    if isinstance(answer, service_pb2.LogSettingsResponse):
        return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in answer.settings.items()}
    return {
        name: list(entry.value) if name == "trace_level" else entry.value[0] for name, entry in answer.settings.items()
    }


def test_every_rpc_of_the_service_is_there(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert len(methods) == 20
    codes: dict[str, grpc.StatusCode] = {}
    with grpc.insecure_channel(server.grpc) as channel:
        for name in methods:
            path = f"/inference.GRPCInferenceService/{name}"
            if name == "ModelStreamInfer":
                assert list(channel.stream_stream(path)(iter(()), timeout=10)) == []
            else:
                codes[name] = channel.unary_unary(path).future(b"", timeout=10).code()
    refused = {name for name, code in codes.items() if code == grpc.StatusCode.UNIMPLEMENTED}
    assert refused == {"CudaSharedMemoryRegister"}
    assert codes.pop("SystemSharedMemoryRegister") == grpc.StatusCode.INTERNAL  # no object has no name, as in Triton
    assert grpc.StatusCode.INTERNAL not in codes.values()
    assert caplog.records == []


def test_models_are_loaded_and_unloaded(client: Client, core: StubCore) -> None:
    client.load_model("one")
    client.load_model("two", config='{"max_batch_size": 2}', files={"file:1/model.py": b"\x00code"})
    assert core.loaded == {"one": ("", {}), "two": ('{"max_batch_size": 2}', {"1/model.py": b"\x00code"})}
    client.unload_model("one")
    client.unload_model("two", unload_dependents=True)
    assert core.unloaded == [("one", False), ("two", True)]
    with pytest.raises(Exception, match="load failed for model 'wreck'"):
        client.load_model("wreck")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("models/m/load", {"parameters": {"config": 5}}, 500, "non-string as string"),
        ("models/m/load", {"parameters": {"foo": "x"}}, 400, "unrecognized load parameter 'foo'"),
        ("models/m/load", {"parameters": {"file:1/model.py": "!!"}}, 400, "'file:1/model.py' is not base64"),
        ("models/m/load", {"parameters": []}, 500, "non-object as object"),
        ("models/m/load", b"xx", 500, "failed to parse the request JSON buffer"),
        ("models/m/unload", b"xx", 500, "failed to parse the request JSON buffer"),
        ("r1/models/m/load", b"", 501, "'repository_name' specification is not supported"),
        ("r1/models/m/unload", b"", 501, "'repository_name' specification is not supported"),
    ],
)
def test_bad_repository_requests_over_http(call: Http, path: str, body: Any, status: int, words: str) -> None:
    found, text = call.error("POST", f"/v2/repository/{path}", body)
    assert (found, words in text) == (status, True), text


@pytest.mark.parametrize(
    "body", [{"parameters": {"unload_dependents": "x"}}, {"parameters": {}}, {"parameters": 5}, []]
)
def test_an_unload_over_http_has_dependents_only_for_true(call: Http, core: StubCore, body: Any) -> None:
    status, _ = call("POST", "/v2/repository/models/m/unload", body)
    assert (status, core.unloaded) == (200, [("m", False)])


def test_bad_repository_requests_over_grpc(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    value = service_pb2.ModelRepositoryParameter

    def load(**fields: Any) -> tuple[grpc.StatusCode, str]:
        return failure(lambda: stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(**fields)))

    def unload(**fields: Any) -> tuple[grpc.StatusCode, str]:
        return failure(lambda: stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(**fields)))

    invalid, unsupported = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
    for answer, code, words in [
        (load(parameters={"config": value(bytes_param=b"{}")}), invalid, "'config', expected string_param."),
        (load(parameters={"file:a": value(string_param="x")}), invalid, "'file:a', expected bytes_param."),
        (load(parameters={"foo": value(bool_param=True)}), invalid, "unrecognized load parameter 'foo'."),
        (load(repository_name="r"), unsupported, "'repository_name' specification is not supported"),
        (unload(parameters={"unload_dependents": value(string_param="x")}), invalid, "expected bool_param."),
        (unload(repository_name="r"), unsupported, "'repository_name' specification is not supported"),
        (
            failure(lambda: stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(repository_name="r"))),
            unsupported,
            "'repository_name' specification is not supported",
        ),
    ]:
        assert (answer[0], words in answer[1]) == (code, True), answer


def test_log_settings_are_seen_and_changed(client: Client, server: RunningServer) -> None:
    start = {
        "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
        "log_format": "default",
    }  # fmt: skip
    assert settings_of(client.get_log_settings()) == start
    changed = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert settings_of(client.update_log_settings(changed)) == start | changed
    assert server.extensions.logs.describe() == start | changed
    back = {"log_info": True, "log_verbose_level": 0, "log_format": "default"}
    assert settings_of(client.update_log_settings(back)) == start


def test_bad_log_settings(call: Http, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    for body, status, words in [
        ({"log_info": "x"}, 500, "non-boolean as boolean"),
        ({"log_verbose_level": -1}, 500, "non-unsigned-integer as unsigned-integer"),
        ({"log_format": "x"}, 400, "invalid argument for log_format, got: x"),
        ({"log_file": "/x"}, 501, "log file location can not be updated through network protocol"),
        (b"", 500, "failed to parse the request JSON buffer"),
    ]:
        found, text = call.error("POST", "/v2/logging", body)
        assert (found, words in text) == (status, True), text
    assert json.loads(call("POST", "/v2/logging", {"nope": [1]})[1])["log_verbose_level"] == 0
    value = service_pb2.LogSettingsRequest.SettingValue
    for name, setting, code, words in [
        ("log_verbose_level", value(string_param="1"), "INVALID_ARGUMENT", "expect int32 for 'log_verbose_level'"),
        ("log_info", value(uint32_param=1), "INVALID_ARGUMENT", "expect boolean for 'log_info'"),
        ("log_format", value(string_param="x"), "INVALID_ARGUMENT", "invalid argument for log_format, got: x"),
        ("log_file", value(string_param="x"), "UNIMPLEMENTED", "can not be updated through network protocol"),
    ]:
        request = service_pb2.LogSettingsRequest(settings={name: setting})
        found, text = failure(lambda request=request: stub.LogSettings(request))
        assert (found.name, words in text) == (code, True), text


def test_log_settings_decide_what_is_printed() -> None:
    printed: list[str] = []

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            printed.append(self.format(record))

    handler = Printer()
    logger = logging.getLogger("llmserve_log_settings")
    logger.propagate = False
    logger.addHandler(handler)
    logs = LogControl(LogSettings(), logger=logger, handlers=[handler])

    def say() -> list[str]:
        printed.clear()
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "at %d", level)
        return [line.split(":")[-1] for line in printed]

    assert say() == [" at 20", " at 30", " at 40"]
    logs.update({"log_verbose_level": 1, "log_warning": False})
    assert say() == [" at 10", " at 20", " at 40"]
    logs.update({"log_verbose_level": 0, "log_info": False, "log_warning": True})
    assert say() == [" at 30", " at 40"]
    logs.update({"log_warning": False, "log_error": False})
    assert say() == []
    logs.update({"log_error": True, "log_format": "ISO8601"})
    say()
    assert printed[0][10] == "T"
    assert printed[0][23:].startswith("Z ERROR llmserve_log_settings: at 40")
    with pytest.raises(InvalidArgument):
        logs.update({"log_error": False, "log_format": "x"})
    assert say() == [" at 40"]  # all or nothing


def test_trace_settings_of_the_server_and_of_a_model(client: Client) -> None:
    assert settings_of(client.get_trace_settings()) == START
    client.update_trace_settings(settings={"trace_rate": "5", "trace_level": ["TIMESTAMPS", "TENSORS"]})
    server = START | {"trace_rate": "5", "trace_level": ["TIMESTAMPS", "TENSORS"]}
    assert settings_of(client.update_trace_settings("add_two", {"trace_count": "3"})) == server | {"trace_count": "3"}
    assert settings_of(client.get_trace_settings()) == server
    client.update_trace_settings(settings={"trace_rate": "7"})  # what a model has not set follows the server's
    assert settings_of(client.get_trace_settings("add_two")) == server | {"trace_count": "3", "trace_rate": "7"}
    cleared = client.update_trace_settings("add_two", {"trace_count": None})
    assert settings_of(cleared) == server | {"trace_rate": "7"}
    everything = {"trace_rate": None, "trace_level": None}
    assert settings_of(client.update_trace_settings(settings=everything)) == START
    with pytest.raises(Exception, match="Request for unknown model : nope"):
        client.get_trace_settings("nope")


@pytest.mark.parametrize(
    ("name", "value", "status", "words"),
    [
        ("trace_rate", "x", 400, "Unable to parse 'trace_rate', got: x"),
        ("trace_rate", "99999999999999", 400, "value is out of range [ 0, 4294967295 ], got: 99999999999999"),
        ("trace_count", "-2", 400, "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
        ("trace_level", ["OFF", "TENSORS"], 400, "Expect only one trace level 'OFF' is specified"),
        ("trace_level", ["BAD"], 400, "unknown trace level BAD"),
        ("trace_file", "/x", 501, "trace file location can not be updated through network protocol"),
        ("trace_file", None, 501, "trace file location can not be updated through network protocol"),
        ("trace_rate", 5, 500, "non-string as string"),
        ("trace_level", "TENSORS", 500, "non-array as array"),
    ],
)
def test_bad_trace_settings(
    call: Http, stub: service_pb2_grpc.GRPCInferenceServiceStub, name: str, value: Any, status: int, words: str
) -> None:
    found, text = call.error("POST", "/v2/trace/setting", {name: value})
    assert (found, words in text) == (status, True), text
    assert json.loads(call("POST", "/v2/trace/setting", {"nope": 1})[1]) == START
    if status == 500:
        return  # that form does not exist in messages
    request = service_pb2.TraceSettingRequest()
    request.settings[name].value.extend([] if value is None else [value] if isinstance(value, str) else value)
    code, text = failure(lambda: stub.TraceSetting(request))
    assert (code.name, words in text) == ({400: "INVALID_ARGUMENT", 501: "UNIMPLEMENTED"}[status], True), text


def test_sampling_by_rate_and_count() -> None:
    tracer = Tracer(os.devnull, TraceSettings(("TIMESTAMPS",), rate=3))

    def picks(model: str, n: int) -> list[int]:
        return [number for number in range(1, n + 1) if tracer.sample(model) is not None]

    assert picks("m", 7) == [3, 6]
    tracer.update("m", {"trace_rate": "1", "trace_count": "2"})
    assert picks("m", 5) == [1, 2]
    assert tracer.describe("m")["trace_count"] == "0"
    assert picks("other", 2) == [2]  # seven requests of m came before
    with pytest.raises(InvalidArgument, match="sample rate must be non-zero"):
        tracer.update("", {"trace_rate": "0"})
    tracer.update("", {"trace_level": ["OFF"]})
    assert picks("other", 9) == []
    tracer.close()


@pytest.mark.parametrize("size", [10, PIECE_CHARS])
def test_files_are_base64_over_http(call: Http, core: StubCore, size: int) -> None:
    """Large ones are decoded in pieces."""
    text = base64.b64encode(b"\xff" * size).decode()
    assert call("POST", "/v2/repository/models/m/load", {"parameters": {"config": "{}", "file:1/a": text}}) == (
        200,
        b"",
    )
    assert core.loaded.pop("m") == ("{}", {"1/a": b"\xff" * size})


def test_base64_that_goes_on_behind_its_end_is_refused(call: Http) -> None:
    text = base64.b64encode(bytes(PIECE_CHARS // 4 * 3 - 1)).decode() + "AAAA"
    found, words = call.error("POST", "/v2/repository/models/m/load", {"parameters": {"file:1/a": text}})
    assert (found, "'file:1/a' is not base64" in words) == (400, True), words
