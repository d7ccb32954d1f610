"""Spans of requests, as a collector receives them from OpenTelemetry's own exporter: OTLP over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from llmserve.backends.python.backend import PythonBackend
from llmserve.cli.tracing import make_tracer
from llmserve.errors import InvalidArgument
from llmserve.frontends.shared.api_keys import ApiKeys
from llmserve.frontends.shared.span_export import ExportSettings, SpanExport
from llmserve.frontends.shared.trace_context import parent_of
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.instruments import spans
from tests.frontends.server import HOST, RunningServer, running_server, wait_until
from tests.frontends.text.conftest import serving
from tools.servers import free_ports

KEY = "user-0123456789abcdef"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
SECRET = "hello"  # what is asked must not get out


class Collector(ThreadingHTTPServer):
    """Receives spans; `delay_s` is how long it takes for that."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Receiver)
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.delay_s = 0.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/v1/traces"

    def spans(self) -> list[Span]:
        return [
            span
            for request in list(self.requests)
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans() if span.name == name]

    def wait_for(self, name: str, count: int = 1) -> list[Span]:
        wait_until(lambda: len(self.named(name)) >= count, 20)
        return self.named(name)


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:  # the library's name
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        time.sleep(self.server.delay_s)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.shutdown()
    made.server_close()


@contextmanager
def traced(text_dir: Path, url: str, *more: str, keys: ApiKeys | None = None) -> Iterator[RunningServer]:
    options = ("mode=opentelemetry", f"opentelemetry,url={url}", "opentelemetry,bsp_schedule_delay=50", *more)
    with serving(text_dir, keys, tracer=make_tracer(options)) as running:
        yield running


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def client_of(server: RunningServer, **headers: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http_url}/v1", api_key=KEY, max_retries=0, default_headers=headers)


def names_of(spans: Sequence[Span], parent: Span) -> list[str]:
    return sorted(span.name for span in spans if span.parent_span_id == parent.span_id)


def test_a_chat_as_a_tree_of_spans(text_dir: Path, collector: Collector, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: team-a, key: {KEY}}}]")
    more = ("rate=0", "opentelemetry,resource=deployment.environment=test")
    with traced(text_dir, collector.url, *more, keys=ApiKeys(keys)) as server:
        headers = {"traceparent": SAMPLED, "tracestate": "vendor=1", "x-request-id": "job-1"}
        with client_of(server, **headers) as client:
            stream = client.chat.completions.create(
                model="ensemble", messages=[{"role": "user", "content": SECRET}], max_tokens=20, stream=True,
                temperature=0, extra_body={"ignore_eos": True},
            )  # fmt: skip
            num_pieces = len(list(stream))
        (request,) = collector.wait_for("POST /v1/chat/completions")
    assert num_pieces > 10
    spans = collector.spans()
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert (request.parent_span_id.hex(), request.kind, request.trace_state) == (
        PARENT,
        Span.SPAN_KIND_SERVER,
        "vendor=1",
    )
    assert attributes(request) == {
        "http.request.method": "POST", "url.path": "/v1/chat/completions", "llmserve.request_id": "job-1",
        "llmserve.key": "team-a",
    }  # fmt: skip
    (ensemble,) = collector.named("ensemble")
    (engine,) = collector.named("tensorrt_llm")
    assert names_of(spans, request) == ["ensemble"]
    steps = names_of(spans, ensemble)
    assert set(steps) == {"preprocessing", "tensorrt_llm", "postprocessing"}
    assert names_of(spans, engine) == ["decode", "prefill", "queue"]
    (queue,) = (span for span in collector.named("queue") if span.parent_span_id == engine.span_id)
    (prefill,), (decode,) = collector.named("prefill"), collector.named("decode")
    assert attributes(prefill)["gen_ai.usage.input_tokens"] > 1
    assert attributes(decode) | {"llmserve.sequence_index": 0} == {
        "gen_ai.usage.output_tokens": 20, "llmserve.finish_reason": "length", "llmserve.sequence_index": 0,
    }  # fmt: skip
    assert [attributes(step)["llmserve.num_tokens"] for step in collector.named("step")] == [2, 4, 8, 16]
    moments = [request.start_time_unix_nano, queue.start_time_unix_nano, queue.end_time_unix_nano,
               prefill.end_time_unix_nano, decode.end_time_unix_nano, request.end_time_unix_nano]  # fmt: skip
    slack_ns = 1_000_000  # two clocks
    assert all(after >= before - slack_ns for before, after in itertools.pairwise(moments))
    assert (queue.end_time_unix_nano, prefill.end_time_unix_nano) == (
        prefill.start_time_unix_nano, decode.start_time_unix_nano,
    )  # fmt: skip
    resource = {
        each.key: each.value.string_value for each in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert (resource["service.name"], resource["deployment.environment"]) == ("llmserve", "test")
    assert not any(SECRET.encode() in each.SerializeToString() for each in collector.requests)


@pytest.mark.parametrize("service", ["", "first"])
def test_the_environment_may_name_the_service(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=second,team=a")
    monkeypatch.setenv("OTEL_SERVICE_NAME", service)
    export = SpanExport(ExportSettings(collector.url))
    export.export([spans.Span("x", spans.SpanIds(1, 2), 3, 4)])
    export.close()
    found = {each.key: each.value.string_value for each in collector.requests[0].resource_spans[0].resource.attributes}
    assert (found["service.name"], found["team"]) == (service or "second", "a")


def test_who_decides_what_is_traced(text_dir: Path, collector: Collector) -> None:
    with traced(text_dir, collector.url, "rate=0") as server:
        for header in ({}, {"traceparent": NOT_SAMPLED}, {"traceparent": SAMPLED.replace("-01", "")}):
            with client_of(server, **header) as client:
                client.completions.create(model="ensemble", prompt=SECRET, max_tokens=2)
        with client_of(server, traceparent=SAMPLED) as client:
            asked: dict[str, Any] = {"prompt": [SECRET, SECRET], "max_tokens": 2, "n": 2, "temperature": 1, "seed": 1}
            client.completions.create(model="ensemble", **asked)
        requests = collector.wait_for("POST /v1/completions", 2)
    assert [span.parent_span_id.hex() for span in requests] == [PARENT, PARENT]  # one for each prompt
    assert len(collector.named("decode")) == 4
    assert {attributes(span)["llmserve.sequence_index"] for span in collector.named("prefill")} == {0, 1}


def test_one_in_so_many_without_a_client_that_traces(text_dir: Path, collector: Collector) -> None:
    with traced(text_dir, collector.url, "rate=2") as server, client_of(server) as client:
        for _ in range(4):
            client.completions.create(model="ensemble", prompt=SECRET, max_tokens=2)
        client.completions.create(model="ensemble", prompt=[SECRET] * 4, max_tokens=2)
        requests = collector.wait_for("POST /v1/completions", 4)
        setting = httpx.get(f"{server.http_url}/v2/trace/setting").json()
        assert (setting["trace_mode"], setting["trace_file"], setting["trace_level"]) == (
            "opentelemetry", "", ["TIMESTAMPS"],
        )  # fmt: skip
        refused = httpx.post(f"{server.http_url}/v2/trace/setting", json={"trace_level": ["TENSORS"]})
        assert (refused.status_code, "cannot contain tensors" in refused.text) == (400, True)
    assert [span.parent_span_id for span in requests] == [b""] * 4
    assert len({span.trace_id for span in requests}) == 3  # the last two came together


def test_grpc_and_failures(text_dir: Path, collector: Collector) -> None:
    with traced(text_dir, collector.url, "rate=0") as server:
        answers: list[Any] = []
        arrived = threading.Semaphore(0)

        def take(result: Any, error: Any) -> None:
            answers.append(error or result)
            arrived.release()

        text = triton.InferInput("text_input", (1, 1), "BYTES")
        text.set_data_from_numpy(np.array([[SECRET.encode()]], np.object_))
        length = triton.InferInput("max_tokens", (1, 1), "INT32")
        length.set_data_from_numpy(np.array([[-3]], np.int32))
        with triton.InferenceServerClient(server.grpc) as client:
            client.start_stream(take, headers={"traceparent": SAMPLED})
            client.async_stream_infer("ensemble", [text, length], request_id="own")
            assert arrived.acquire(timeout=20)
            client.stop_stream()
        (request,) = collector.wait_for("inference.GRPCInferenceService/ModelStreamInfer")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes(request)["rpc.method"] == "ModelStreamInfer"
    assert (request.status.code, attributes(request)["error.type"]) == (Status.STATUS_CODE_ERROR, "OTHER")
    (engine,) = collector.named("tensorrt_llm")
    assert attributes(engine)["error.type"] == "BACKEND"
    (encoder,) = collector.named("preprocessing")
    assert encoder.status.code == Status.STATUS_CODE_UNSET


@pytest.mark.parametrize("is_there", [False, True], ids=["away", "asleep"])
def test_a_collector_that_is_away_or_asleep_costs_nothing(text_dir: Path, collector: Collector, is_there: bool) -> None:
    collector.delay_s = 60
    url = collector.url if is_there else f"http://{HOST}:{free_ports(1)[0]}/v1/traces"
    with traced(text_dir, url, "rate=1", "opentelemetry,bsp_max_queue_size=64",
                "opentelemetry,bsp_max_export_batch_size=8") as server, client_of(server) as client:  # fmt: skip
        assert _seconds(client) < 30  # those that wait for it take a minute each, or a second and more to try again
        assert httpx.get(f"{server.http_url}/v2/health/ready", timeout=20).status_code == 200
        began = time.monotonic()
    assert time.monotonic() - began < 20


def _seconds(client: openai.OpenAI) -> float:
    """Of a hundred requests."""
    client.completions.create(model="ensemble", prompt=SECRET, max_tokens=2)
    began = time.monotonic()
    for _ in range(100):
        client.completions.create(model="ensemble", prompt=SECRET, max_tokens=2)
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("header", "is_understood"),
    [
        (SAMPLED, True),
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be-like", True),
        (f"00-{TRACE}-{PARENT}-01-more", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (SAMPLED.upper(), False),
        (f"00-{TRACE}-{PARENT}-1", False),
        (f" {SAMPLED}", False),
        ("", False),
    ],
)
def test_contexts_that_are_none(header: str, is_understood: bool) -> None:
    given = {"traceparent": header, "tracestate": "x" * 513}
    parent = parent_of(given.get)
    assert (parent is not None) == is_understood
    if parent is not None:
        assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}", parent.state) == (TRACE, PARENT, "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["mode=opentelemetry", "file=x"], "spans go to a collector"),
        (["mode=opentelemetry", "level=TENSORS"], "cannot contain tensors"),
        (["mode=opentelemetry", "opentelemetry,bsp_max_queue_size=x"], "bsp_max_queue_size=x: known"),
        (["mode=opentelemetry", "opentelemetry,resource=x"], "resource=x: known"),
        (["mode=opentelemetry", "opentelemetry,bsp_max_queue_size=2"], "cannot be exported with these settings"),
    ],
)
def test_what_is_wrong_with_the_flag(options: list[str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        make_tracer(options)


CONTEXT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        contexts = [np.array([str(request.trace().get_context()).encode()], np.object_) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", context)]) for context in contexts]
"""


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_python_models_pass_the_context_on(collector: Collector, tmp_path: Path, mode: str) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").write_text(CONTEXT)
    (tmp_path / "m/config.pbtxt").write_text(
        f'''backend: "python" output {{ name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }}
        parameters {{ key: "EXECUTION_MODE" value {{ string_value: "{mode}" }} }}'''
    )
    options = ("mode=opentelemetry", f"opentelemetry,url={collector.url}", "rate=0")
    settings = ServerSettings((tmp_path,))
    with running_server(
        lambda: InferenceCore(settings, {"python": PythonBackend()}), tracer=make_tracer(options)
    ) as server:
        core = server.core
        assert isinstance(core, InferenceCore)
        asyncio.run_coroutine_threadsafe(core.start(), server.loop).result(60)
        url, body = f"{server.http_url}/v2/models/m/infer", {"inputs": list[Any]()}
        (known,) = httpx.post(url, json=body, headers={"traceparent": SAMPLED}).json()["outputs"][0]["data"]
        (unknown,) = httpx.post(url, json=body).json()["outputs"][0]["data"]
        (span,) = collector.wait_for("m")
        asyncio.run_coroutine_threadsafe(core.stop(10), server.loop).result(20)
    assert json.loads(known) == {"traceparent": f"00-{TRACE}-{span.span_id.hex()}-01"}
    assert unknown == "None"
