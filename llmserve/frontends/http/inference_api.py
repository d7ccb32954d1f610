"""The HTTP front end: KServe v2 with Triton's extensions.

Paths match exactly. Triton's paths do not support HEAD. If a client disconnects, its request is cancelled.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatistics

from llmserve.errors import LlmserveError, Unavailable, Unsupported
from llmserve.frontends.http.admission import guard_of, header_of
from llmserve.frontends.http.bodies import compress_for, off_loop, read_body
from llmserve.frontends.http.error_answers import (
    JSON,
    TEXT,
    answers_errors,
    error_response,
    internal_error,
    json_response,
    refused,
    retry_headers,
    status_of,
)
from llmserve.frontends.http.extension_routes import ExtensionApi, extension_routes
from llmserve.frontends.http.generate_bodies import (
    data_responses,
    error_event,
    event,
    generated,
    parse_generate,
)
from llmserve.frontends.http.infer_bodies import HEADER_LENGTH, HEADER_LENGTH_NAME, parse_infer
from llmserve.frontends.http.infer_outputs import OutputForm, encode_large_response, encode_response, large_cost
from llmserve.frontends.http.json_fields import Json, encode_json
from llmserve.frontends.http.known_requests import enter, logged
from llmserve.frontends.http.mounts import MakeMount, Mount
from llmserve.frontends.http.rollout_routes import RolloutApi, rollout_routes
from llmserve.frontends.http.routes import Routes
from llmserve.frontends.http.traced_answers import traced_answer
from llmserve.frontends.shared.data_source import DataSource
from llmserve.frontends.shared.delivery import deliver
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.forwarded_headers import accompanied
from llmserve.frontends.shared.raw_tensors import Raw, num_bytes
from llmserve.frontends.shared.request_context import name_model
from llmserve.frontends.shared.restrictions import API_OF_PATH, Api
from llmserve.frontends.shared.server_core import Core, is_decoupled, single_response
from llmserve.serving.config.proto_json import message_to_dict
from llmserve.serving.instruments.trace import Trace
from llmserve.serving.types import InferRequest, InferResponse
from llmserve.wire.event_loop import INLINE_BYTES
from llmserve.wire.http1.answers import Answer, Reply, WholeAnswer
from llmserve.wire.http1.connection import Handler
from llmserve.wire.http1.request import NO_HEADERS, Request
from llmserve.wire.http1.server import HttpServer, serve

DEFAULT_MAX_INPUT_BYTES = 64 * 1024 * 1024
DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
EVENT_STREAM = "text/event-stream; charset=utf-8"
METRICS_TEXT = "text/plain; charset=utf-8"
PLAIN_ROUTES = ("/live", "/ready", "/infer")  # whose error 405 has the content type of text


@dataclass(frozen=True, slots=True)
class EventStream:
    """Server-sent events, one per response of the core.

    The status waits for the first response. An error before any model has answered is an ordinary JSON error. If the
    first response is a model's error, it sets the status of the stream; a later error is an event.
    """

    responses: AsyncGenerator[InferResponse, None]

    async def send(self, reply: Reply) -> None:
        await reply.request.while_connected(self._send(reply))

    async def _send(self, reply: Reply) -> None:
        async with aclosing(self.responses) as responses:
            try:
                first = await anext(responses, None)
            except LlmserveError as error:
                return await error_response(error).send(reply)
            except Exception as error:  # border: an internal error
                return await error_response(internal_error(error)).send(reply)
            failure = None if first is None else first.error
            status = 200 if failure is None else status_of(failure)
            reply.begin(status, NO_HEADERS if failure is None else retry_headers(failure), EVENT_STREAM)
            if first is not None:
                await reply.piece(event(first))
                await self._send_rest(reply)
            return reply.end()

    async def _send_rest(self, reply: Reply) -> None:
        try:
            async for response in self.responses:
                await reply.piece(event(response))
        except LlmserveError as error:
            await reply.piece(error_event(error))
        except Exception as error:  # border: an internal error ends this stream with an event
            await reply.piece(error_event(internal_error(error)))


@dataclass(frozen=True, slots=True)
class InOnePiece:
    """The answer of `generate`: a stream of one piece, as Triton sends it."""

    body: bytes

    async def send(self, reply: Reply) -> None:
        reply.begin(200, NO_HEADERS, JSON)
        await reply.piece(self.body)
        reply.end()


@dataclass(frozen=True, slots=True)
class InferenceApi:
    """One method per route."""

    core: Core
    extensions: Extensions
    max_input_bytes: int

    async def server_metadata(self, request: Request) -> WholeAnswer:
        core = self.core
        return json_response({"name": core.name, "version": core.version, "extensions": list(core.extensions)})

    async def live(self, request: Request) -> WholeAnswer:
        return WholeAnswer(status=200 if self.core.live() else 400, content_type=TEXT)

    async def ready(self, request: Request) -> WholeAnswer:
        return WholeAnswer(status=200 if self.core.ready() else 400, content_type=TEXT)

    async def health(self, request: Request) -> WholeAnswer:
        """The health check of servers with OpenAI's API."""
        if not self.core.ready():
            raise Unavailable("the server is not ready: it is starting or stopping, or a model is missing")
        return json_response({"status": "ok"})

    async def program_version(self, request: Request) -> WholeAnswer:
        return json_response({"version": self.core.version})

    async def model_ready(self, request: Request) -> WholeAnswer:
        if self.core.model_ready(*_model_and_version(request)):
            return WholeAnswer(content_type=TEXT)
        return refused("Model version not ready", 400, TEXT)

    async def model_metadata(self, request: Request) -> WholeAnswer:
        return json_response(message_to_dict(self.core.model_metadata(*_model_and_version(request))))

    async def model_config(self, request: Request) -> WholeAnswer:
        return json_response(message_to_dict(self.core.model_config(*_model_and_version(request))))

    async def statistics(self, request: Request) -> WholeAnswer:
        found = self.core.statistics(*_model_and_version(request))
        return json_response({"model_stats": [_statistics_document(entry) for entry in found]})

    async def metrics(self, request: Request) -> WholeAnswer:
        return WholeAnswer(self.core.metrics_text().encode(), content_type=METRICS_TEXT)

    def infer(self, request: Request) -> Awaitable[Answer]:
        return self._traced(request, self._infer)

    def generate(self, request: Request) -> Awaitable[Answer]:
        return self._traced(request, self._generate)

    def generate_stream(self, request: Request) -> Awaitable[Answer]:
        return self._traced(request, self._generate_stream)

    def _traced(
        self, request: Request, handle: Callable[[Request, Trace | None], Awaitable[Answer]]
    ) -> Awaitable[Answer]:
        model, _ = _model_and_version(request)
        trace = self.extensions.tracer.sample(model)
        if trace is None:
            return handle(request, None)
        return traced_answer(self.extensions.tracer, model, trace, handle(request, trace))

    async def _infer(self, request: Request, trace: Trace | None) -> WholeAnswer:
        model, version = _model_and_version(request)
        try:
            config = self.core.model_config(model, version)
        except LlmserveError as error:
            return error_response(error, TEXT)
        if is_decoupled(config):
            return error_response(Unsupported(DECOUPLED), TEXT)
        body = await self._body(request, trace)
        header = request.header(HEADER_LENGTH_NAME)
        memory = self.extensions.memory
        parsed, form = await off_loop(
            request,
            lambda: parse_infer(body, header, config, DataSource(memory, request.share), version=version),
            size=len(body),
        )
        parsed = self._accompanied(parsed, trace, request)
        response = await request.while_connected(single_response(self.core, parsed))
        if response.error is not None:
            return error_response(response.error, TEXT)
        try:
            if num_bytes(response.outputs) > INLINE_BYTES:
                return await self._large_answer(request, response, form, config)
            delivered = deliver(response, form.delivery, core=self.core, memory=memory, config=config)
            encoded, json_length = encode_response(delivered, form)
            return await _infer_answer(request, [encoded], json_length, size=len(encoded))
        except LlmserveError as error:
            return error_response(error, TEXT)

    async def _large_answer(
        self, request: Request, response: InferResponse, form: OutputForm, config: ModelConfig
    ) -> WholeAnswer:
        """An answer in parts. Its memory is counted until the client has read it."""
        cost, memory = large_cost(response, form), self.extensions.memory
        request.share.grow(cost)
        parts, json_length = await off_loop(
            request,
            lambda: encode_large_response(
                deliver(response, form.delivery, core=self.core, memory=memory, config=config), form
            ),
            size=cost,
        )
        size = sum(map(len, parts))
        request.share.grow(max(size - cost, 0))
        return await _infer_answer(request, parts, json_length, size=size)

    async def _generate(self, request: Request, trace: Trace | None) -> InOnePiece:
        responses = await self._generate_responses(request, trace)
        return InOnePiece(encode_json(await request.while_connected(generated(responses))))

    async def _generate_stream(self, request: Request, trace: Trace | None) -> EventStream:
        return EventStream(await self._generate_responses(request, trace))

    async def _generate_responses(self, request: Request, trace: Trace | None) -> AsyncGenerator[InferResponse, None]:
        model, version = _model_and_version(request)
        config = self.core.model_config(model, version)
        body = await self._body(request, trace)
        memory = self.extensions.memory
        parsed = await off_loop(
            request,
            lambda: parse_generate(body, config, DataSource(memory, request.share), model=model, version=version),
            size=len(body),
        )
        parsed = self._accompanied(parsed, trace, request)
        return data_responses(self.core.infer_stream(parsed), decoupled=is_decoupled(config))

    def _accompanied(self, parsed: InferRequest, trace: Trace | None, request: Request) -> InferRequest:
        headers = self.extensions.http_headers.chosen(request.header_items)
        return accompanied(parsed, trace, headers, self.extensions.tenant(header_of(request)))

    async def _body(self, request: Request, trace: Trace | None) -> bytes | memoryview:
        if trace is None:
            return await read_body(request, self.max_input_bytes)
        trace.stamp("HTTP_RECV_START")
        body = await read_body(request, self.max_input_bytes)
        trace.stamp("HTTP_RECV_END")
        return body


def _model_and_version(request: Request) -> tuple[str, str]:
    return request.path_params.get("model", ""), request.path_params.get("version", "")


def _statistics_document(entry: ModelStatistics) -> Mapping[str, Json]:
    """In Triton's order: newer fields of the protocol come before the batches."""
    fields = message_to_dict(entry)
    return {name: fields[name] for name in sorted(fields, key=lambda name: name in ("batch_stats", "memory_usage"))}


async def _infer_answer(request: Request, parts: Sequence[Raw], json_length: int | None, *, size: int) -> WholeAnswer:
    parts, headers = await compress_for(request, parts, size=size)
    content_type = JSON
    if json_length is not None:
        headers[HEADER_LENGTH] = str(json_length)
        content_type = "application/octet-stream"
    return WholeAnswer(bytes(parts[0]), content_type=content_type, headers=headers, more=parts[1:])


def triton_routes(api: InferenceApi) -> Iterator[tuple[str, str, Handler]]:
    """Yields method, path and handler."""
    yield "GET", "/v2", api.server_metadata
    yield "GET", "/v2/health/live", api.live
    yield "GET", "/v2/health/ready", api.ready
    yield "GET", "/v2/models/stats", api.statistics
    yield "GET", "/metrics", api.metrics
    yield "GET", "/health", api.health
    yield "GET", "/ping", api.health
    yield "GET", "/version", api.program_version
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        yield "POST", f"{model}/infer", api.infer
        yield "POST", f"{model}/generate", api.generate
        yield "POST", f"{model}/generate_stream", api.generate_stream
        yield "GET", model, api.model_metadata
        yield "GET", f"{model}/ready", api.model_ready
        yield "GET", f"{model}/config", api.model_config
        yield "GET", f"{model}/stats", api.statistics
    yield from extension_routes(ExtensionApi(api.core, api.extensions, api.max_input_bytes))
    yield from rollout_routes(RolloutApi(api.core, api.max_input_bytes))


def http_handler(
    core: Core,
    extensions: Extensions,
    *,
    max_input_bytes: int = DEFAULT_MAX_INPUT_BYTES,
    mounts: Sequence[MakeMount] = (),
) -> Handler:
    """The handler of all requests."""
    routes = Routes()
    guards = {api: guard_of(api, extensions.http_restrictions, extensions.api_keys) for api in Api}
    for method, path, handler in triton_routes(InferenceApi(core, extensions, max_input_bytes)):
        handler = answers_errors(handler, TEXT if path.endswith("/ready") else JSON)
        routes.add(method, path, handler, guards[API_OF_PATH[path]])
    mounted = [make(core, extensions, max_input_bytes) for make in mounts]
    for mount in mounted:
        for method, path in mount.paths:
            for each in (method, "HEAD") if method == "GET" else (method,):
                routes.add(each, path, mount.handler, mount.guard(path, extensions))
    prefixes = tuple(prefix for mount in mounted for prefix in mount.prefixes)

    def answer(request: Request) -> Awaitable[Answer]:
        if extensions.root_path and request.path.startswith(f"{extensions.root_path}/"):
            request.path = request.path.removeprefix(extensions.root_path)
        if routes.find(request.method, request.path) is None:
            for mount in mounted:
                request.path = mount.canonical(request.path)
        enter(request, extensions, needs_id=request.path.startswith(prefixes))
        handling = routed(request)
        return logged(handling) if extensions.logs.shows_requests else handling

    def routed(request: Request) -> Awaitable[Answer]:
        if (permission := extensions.cross_origin.preflight(request)) is not None:
            return _at_once(permission)
        found = routes.find(request.method, request.path)
        if found is None:
            return _at_once(_not_found(request, mounted))
        if found.guard is not None and (refusal := found.guard(request)) is not None:
            return _at_once(refusal)
        if found.handler is None:
            return _at_once(_not_allowed(request, mounted, found.methods))
        request.path_params = found.params
        name_model(found.params.get("model", ""))
        return found.handler(request)

    return answer


def _not_found(request: Request, mounted: Sequence[Mount]) -> WholeAnswer:
    for mount in mounted:
        if request.path.startswith(mount.prefixes):
            return mount.refuse(request, 404, f"unknown route: {request.method} {request.path}")
    return refused("Not Found", 404, TEXT)


def _not_allowed(request: Request, mounted: Sequence[Mount], methods: Sequence[str]) -> WholeAnswer:
    answer = refused("Method Not Allowed", 405, TEXT if request.path.endswith(PLAIN_ROUTES) else JSON)
    for mount in mounted:
        if request.path.startswith(mount.prefixes):
            answer = mount.refuse(request, 405, f"{request.path} does not support {request.method}")
    return replace(answer, headers={**answer.headers, "Allow": ", ".join(methods)})


async def _at_once(answer: Answer) -> Answer:
    return answer


async def start_http(
    core: Core,
    host: str,
    port: int,
    *,
    extensions: Extensions | None = None,
    max_input_bytes: int = DEFAULT_MAX_INPUT_BYTES,
    tls: ssl.SSLContext | None = None,
    mounts: Sequence[MakeMount] = (),
    shared: bool = False,
) -> HttpServer:
    """Listen on `host:port` (0: any free port); `Unavailable` when the port is taken.

    `extensions` are shared with the server's other front ends; with `tls`, connections are encrypted.
    `mounts` answer other paths. `shared`: whether other processes listen on the same port.
    """
    extensions = extensions or Extensions()
    handler = http_handler(core, extensions, max_input_bytes=max_input_bytes, mounts=mounts)
    return await serve(handler, host, port, flag="--http-port", memory=extensions.requests, tls=tls, shared=shared)
