"""The HTTP front end: KServe v2 with Triton's extensions, one Starlette application on uvicorn.

Paths are matched exactly, and HEAD is not GET. A client that goes away cancels its request, streaming or not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llmserve.errors import LlmserveError, Unsupported
from llmserve.frontends.delivery import deliver
from llmserve.frontends.door import Core, is_decoupled, single_response
from llmserve.frontends.extensions import Extensions
from llmserve.frontends.headers import accompanied
from llmserve.frontends.http_answers import (
    STATUS,
    Handler,
    answers_errors,
    error_response,
    internal_error,
    json_response,
    retry_headers,
    routing_error,
)
from llmserve.frontends.http_body import compress_for, off_loop, read_body, until_disconnect
from llmserve.frontends.http_extensions import ExtensionApi, extension_routes
from llmserve.frontends.http_generate import (
    data_responses,
    error_event,
    event,
    generated,
    parse_generate,
)
from llmserve.frontends.http_infer import HEADER_LENGTH, parse_infer
from llmserve.frontends.http_outputs import OutputForm, encode_response
from llmserve.frontends.http_traces import traced_answer
from llmserve.frontends.listener import HttpServer, listen
from llmserve.serving.proto_json import message_to_dict
from llmserve.serving.trace import Trace
from llmserve.serving.types import InferResponse

DEFAULT_MAX_INPUT_BYTES = 64 * 1024 * 1024
EVENT_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, slots=True)
class EventStream:
    """Server-sent events, one per response of the core.

    The status waits for the first response: an error before any model has answered is an ordinary JSON error; a model's
    error that comes first sets the status of the stream; a later one is an event.
    """

    responses: AsyncGenerator[InferResponse, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.responses) as responses:
            try:
                first = await anext(responses, None)
            except LlmserveError as error:
                return await error_response(error)(scope, receive, send)
            except Exception as error:  # border: a fault of ours
                return await error_response(internal_error(error))(scope, receive, send)
            failure = None if first is None else first.error
            status = 200 if failure is None else STATUS[failure.code]
            headers = EVENT_STREAM_HEADERS + ([] if failure is None else _raw(retry_headers(failure)))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            if first is not None:
                await send({"type": "http.response.body", "body": event(first), "more_body": True})
                await self._send_rest(send)
            return await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_rest(self, send: Send) -> None:
        try:
            async for response in self.responses:
                await send({"type": "http.response.body", "body": event(response), "more_body": True})
        except LlmserveError as error:
            await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
        except Exception as error:  # border: a fault of ours ends this stream with an event
            await send({"type": "http.response.body", "body": error_event(internal_error(error)), "more_body": True})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


@dataclass(frozen=True, slots=True)
class InferenceApi:
    """One method per route."""

    core: Core
    extensions: Extensions
    max_input_bytes: int

    async def server_metadata(self, request: Request) -> Response:
        core = self.core
        return json_response({"name": core.name, "version": core.version, "extensions": list(core.extensions)})

    async def live(self, request: Request) -> Response:
        return Response(status_code=200 if self.core.live() else 400)

    async def ready(self, request: Request) -> Response:
        return Response(status_code=200 if self.core.ready() else 400)

    async def model_ready(self, request: Request) -> Response:
        if self.core.model_ready(*_model_and_version(request)):
            return Response()
        return json_response({"error": "Model version not ready"}, 400)

    async def model_metadata(self, request: Request) -> Response:
        return json_response(message_to_dict(self.core.model_metadata(*_model_and_version(request))))

    async def model_config(self, request: Request) -> Response:
        return json_response(message_to_dict(self.core.model_config(*_model_and_version(request))))

    async def statistics(self, request: Request) -> Response:
        found = self.core.statistics(*_model_and_version(request))
        return json_response({"model_stats": [message_to_dict(entry) for entry in found]})

    async def infer(self, request: Request) -> ASGIApp:
        return await self._traced(request, self._infer)

    async def generate(self, request: Request) -> ASGIApp:
        return await self._traced(request, self._generate)

    async def generate_stream(self, request: Request) -> ASGIApp:
        return await self._traced(request, self._generate_stream)

    async def _traced(self, request: Request, handle: Callable[[Request, Trace | None], Awaitable[ASGIApp]]) -> ASGIApp:
        model, _ = _model_and_version(request)
        trace = self.extensions.tracer.sample(model)
        if trace is None:
            return await handle(request, None)
        return await traced_answer(self.extensions.tracer, model, trace, handle(request, trace))

    async def _infer(self, request: Request, trace: Trace | None) -> Response:
        model, version = _model_and_version(request)
        config = self.core.model_config(model, version)
        if is_decoupled(config):
            raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        body = await self._body(request, trace)
        header = request.headers.get(HEADER_LENGTH)
        memory = self.extensions.memory
        parsed, form = await off_loop(
            lambda: parse_infer(body, header, config, memory, version=version), size=len(body)
        )
        parsed = accompanied(parsed, trace, self.extensions.http_headers.chosen(request.headers.items))
        response = await until_disconnect(request.receive, single_response(self.core, parsed))
        response = deliver(response, form.delivery, core=self.core, memory=memory, config=config)
        return await _infer_response(request, response, form)

    async def _generate(self, request: Request, trace: Trace | None) -> Response:
        responses = await self._generate_responses(request, trace)
        return json_response(await until_disconnect(request.receive, generated(responses)))

    async def _generate_stream(self, request: Request, trace: Trace | None) -> EventStream:
        return EventStream(await self._generate_responses(request, trace))

    async def _generate_responses(self, request: Request, trace: Trace | None) -> AsyncGenerator[InferResponse, None]:
        model, version = _model_and_version(request)
        config = self.core.model_config(model, version)
        body = await self._body(request, trace)
        parsed = await off_loop(lambda: parse_generate(body, config, model=model, version=version), size=len(body))
        parsed = accompanied(parsed, trace, self.extensions.http_headers.chosen(request.headers.items))
        return data_responses(self.core.infer_stream(parsed), decoupled=is_decoupled(config))

    async def _body(self, request: Request, trace: Trace | None) -> bytes:
        if trace is None:
            return await read_body(request, self.max_input_bytes)
        trace.stamp("HTTP_RECV_START")
        body = await read_body(request, self.max_input_bytes)
        trace.stamp("HTTP_RECV_END")
        return body


def _model_and_version(request: Request) -> tuple[str, str]:
    model: str = request.path_params.get("model", "")
    version: str = request.path_params.get("version", "")
    if version and not (version.isascii() and version.isdigit()):
        raise HTTPException(404)
    return model, version


async def _infer_response(request: Request, response: InferResponse, form: OutputForm) -> Response:
    body, json_length = encode_response(response, form)
    body, headers = await compress_for(request, body)
    if json_length is None:
        return Response(body, headers=headers, media_type="application/json")
    headers[HEADER_LENGTH] = str(json_length)
    return Response(body, headers=headers, media_type="application/octet-stream")


class Shortcut:
    """Inference without Starlette's routing and middleware, which cost as much as a small request itself."""

    def __init__(self, api: InferenceApi, app: ASGIApp) -> None:
        self._app = app
        self._handlers = {
            name: answers_errors(handler)
            for name, handler in (
                ("infer", api.infer),
                ("generate", api.generate),
                ("generate_stream", api.generate_stream),
            )
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._find(scope)
        if handler is None:
            return await self._app(scope, receive, send)
        answer = await handler(Request(scope, receive, send))
        return await answer(scope, receive, send)

    def _find(self, scope: Scope) -> Handler | None:
        """Of `/v2/models/MODEL[/versions/VERSION]/NAME`; None for everything else, bad versions included."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        parts = scope["path"].split("/")
        if len(parts) not in (5, 7) or parts[:3] != ["", "v2", "models"] or not parts[3]:
            return None
        handler = self._handlers.get(parts[-1])
        params = {"model": parts[3]}
        if len(parts) == 7:
            if parts[4] != "versions" or not (parts[5].isascii() and parts[5].isdigit()):
                return None
            params["version"] = parts[5]
        if handler is not None:
            scope["path_params"] = params
        return handler


def _routes(api: InferenceApi) -> list[Route]:
    get: list[tuple[str, Handler]] = [
        ("/v2", api.server_metadata),
        ("/v2/health/live", api.live),
        ("/v2/health/ready", api.ready),
        ("/v2/models/stats", api.statistics),
    ]
    post: list[tuple[str, Handler]] = []
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        post += [
            (f"{model}/infer", api.infer),
            (f"{model}/generate", api.generate),
            (f"{model}/generate_stream", api.generate_stream),
        ]
        get += [
            (model, api.model_metadata),
            (f"{model}/ready", api.model_ready),
            (f"{model}/config", api.model_config),
            (f"{model}/stats", api.statistics),
        ]
    extension_get, extension_post = extension_routes(ExtensionApi(api.core, api.extensions, api.max_input_bytes))
    return [_route(path, "POST", handler) for path, handler in post + extension_post] + [
        _route(path, "GET", handler) for path, handler in get + extension_get
    ]


def _route(path: str, method: str, handler: Handler) -> Route:
    route = Route(path, answers_errors(handler), methods=[method])
    route.methods = {method}  # Starlette adds HEAD to GET
    return route


def http_app(core: Core, extensions: Extensions, *, max_input_bytes: int = DEFAULT_MAX_INPUT_BYTES) -> ASGIApp:
    """The application, for a listener."""
    api = InferenceApi(core, extensions, max_input_bytes)
    app = Starlette(routes=_routes(api), exception_handlers={HTTPException: routing_error})
    app.router.redirect_slashes = False
    return Shortcut(api, app)


async def start_http(
    core: Core,
    host: str,
    port: int,
    *,
    extensions: Extensions | None = None,
    max_input_bytes: int = DEFAULT_MAX_INPUT_BYTES,
) -> HttpServer:
    """Listen on `host:port` (0: any free port); `Unavailable` when the port is taken.

    `extensions` are those of the server's other front ends.
    """
    app = http_app(core, extensions or Extensions(), max_input_bytes=max_input_bytes)
    return await listen(app, host, port, flag="--http-port")
