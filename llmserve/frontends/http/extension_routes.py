"""HTTP routes of the protocol's extensions: model repository, logging, tracing, shared memory."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmserve.errors import InternalError, InvalidArgument, NotFound, Unsupported
from llmserve.frontends.http.bodies import off_loop, read_body
from llmserve.frontends.http.error_answers import done, json_response
from llmserve.frontends.http.json_fields import (
    Json,
    as_array,
    as_bool,
    as_object,
    as_string,
    as_unsigned,
    parse_json,
)
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.log_settings import FLAGS, MAX_UINT32, LogValue
from llmserve.frontends.shared.model_control import (
    CONFIG_PARAMETER,
    FILE_PREFIX,
    UNLOAD_DEPENDENTS,
    check_repository_name,
    unknown_load_parameter,
)
from llmserve.frontends.shared.request_parameters import is_unsigned
from llmserve.frontends.shared.server_core import Core, check_known_model
from llmserve.frontends.shared.shared_memory import CUDA_REFUSAL
from llmserve.frontends.shared.trace_settings import SETTINGS
from llmserve.wire.http1.answers import WholeAnswer
from llmserve.wire.http1.connection import Handler
from llmserve.wire.http1.request import Request
from llmserve.wire.request_memory import Share

ROW_MEMBERS = ("name", "version", "state", "reason")
PIECE_CHARS = 256 * 1024  # of base64, decoded in one call, which holds the GIL


@dataclass(frozen=True, slots=True)
class ExtensionApi:
    """One method per route."""

    core: Core
    extensions: Extensions
    max_input_bytes: int

    async def repository_index(self, request: Request) -> WholeAnswer:
        document = await self._document(request, empty={}, lenient=True)
        rows = self.core.repository_index(ready=as_bool(document.get("ready", False), "ready"))
        return json_response([{key: value for key in ROW_MEMBERS if (value := getattr(row, key))} for row in rows])

    async def load_model(self, request: Request) -> WholeAnswer:
        check_repository_name(request.path_params.get("repository", ""))
        document = await self._document(request, empty={})
        parameters = as_object(document.get("parameters", {}), "parameters")
        config, files = await off_loop(
            request, lambda: _load_parameters(parameters, request.share), size=request.share.num_bytes
        )
        await self.core.load_model(request.path_params["model"], config, files)
        return done()

    async def unload_model(self, request: Request) -> WholeAnswer:
        check_repository_name(request.path_params.get("repository", ""))
        document = await self._document(request, empty={}, lenient=True)
        parameters = document.get("parameters")  # invalid values are ignored, as in Triton
        dependents = isinstance(parameters, dict) and parameters.get(UNLOAD_DEPENDENTS) is True
        await self.core.unload_model(request.path_params["model"], unload_dependents=dependents)
        return done()

    async def log_settings(self, request: Request) -> WholeAnswer:
        return json_response(self.extensions.logs.describe())

    async def set_log_settings(self, request: Request) -> WholeAnswer:
        document = await self._document(request)
        self.extensions.logs.update({name: _log_value(name, value) for name, value in document.items()})
        return json_response(self.extensions.logs.describe())

    async def trace_settings(self, request: Request) -> WholeAnswer:
        model = self._traced_model(request)
        return json_response(self.extensions.tracer.describe(model))

    async def set_trace_settings(self, request: Request) -> WholeAnswer:
        model = self._traced_model(request)
        document = await self._document(request)
        update = {name: _trace_value(name, value) for name, value in document.items() if name in SETTINGS}
        self.extensions.tracer.update(model, update)
        return json_response(self.extensions.tracer.describe(model))

    async def shared_memory_status(self, request: Request) -> WholeAnswer:
        regions = self.extensions.memory.status(request.path_params.get("region", ""))
        return json_response(
            [
                {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
                for region in regions
            ]
        )

    async def register_shared_memory(self, request: Request) -> WholeAnswer:
        self.extensions.memory.check_allowed()
        document = await self._document(request)
        for member in ("key", "byte_size"):
            if member not in document:
                raise InvalidArgument(f"Shared memory register request has no '{member}' field")
        self.extensions.memory.register(
            request.path_params["region"],
            as_string(document["key"], "key"),
            offset=as_unsigned(document.get("offset", 0), "offset"),
            byte_size=as_unsigned(document["byte_size"], "byte_size"),
        )
        return done()

    async def unregister_shared_memory(self, request: Request) -> WholeAnswer:
        self.extensions.memory.unregister(request.path_params["region"])
        return done()

    async def unregister_all_shared_memory(self, request: Request) -> WholeAnswer:
        self.extensions.memory.unregister_all()
        return done()

    async def cuda_memory_status(self, request: Request) -> WholeAnswer:
        if region := request.path_params.get("region", ""):
            raise NotFound(f"Unable to find cuda shared memory region: '{region}'")
        return json_response([])

    async def register_cuda_memory(self, request: Request) -> WholeAnswer:
        self.extensions.memory.check_allowed()
        raise Unsupported(CUDA_REFUSAL)

    async def unregister_cuda_memory(self, request: Request) -> WholeAnswer:
        """Succeeds without effect: no CUDA region can be registered."""
        self.extensions.memory.check_allowed()
        return done()

    def _traced_model(self, request: Request) -> str:
        """The model whose settings are requested; "" for the server's settings."""
        model: str = request.path_params.get("model", "")
        check_known_model(self.core, model)
        return model

    async def _document(self, request: Request, empty: Json = None, *, lenient: bool = False) -> Mapping[str, Json]:
        """The body's JSON object; `empty` if there is no body or, if `lenient`, for JSON of another type."""
        body = await read_body(request, self.max_input_bytes)
        if not body and empty is not None:
            return as_object(empty, "request")
        document = await off_loop(request, lambda: parse_json(body, request.share), size=len(body))
        return empty if lenient and not isinstance(document, dict) else as_object(document, "request")


def _load_parameters(parameters: Mapping[str, Json], share: Share) -> tuple[str, dict[str, bytes]]:
    """The config that replaces the model's own ("": none), and decoded files by their path in its directory."""
    config = ""
    files: dict[str, bytes] = {}
    for name, value in parameters.items():
        if name == CONFIG_PARAMETER:
            config = as_string(value, name)
        elif name.startswith(FILE_PREFIX):
            text = as_string(value, name)
            share.grow(len(text))
            try:
                files[name.removeprefix(FILE_PREFIX)] = b"".join(_decoded(text))
            except ValueError as error:
                raise InvalidArgument(f"load parameter '{name}' is not base64: {error}") from error
        else:
            unknown_load_parameter(name)
    return config, files


def _decoded(text: str) -> Iterator[bytes]:
    """Decodes base64 in pieces. Raises `ValueError`."""
    for start in range(0, len(text), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        if piece.endswith("=") and start + PIECE_CHARS < len(text):
            raise ValueError("there is data after its end")
        yield base64.b64decode(piece, validate=True)


def _log_value(name: str, value: Json) -> LogValue:
    if name in FLAGS:
        if not isinstance(value, bool):
            raise InternalError("attempt to access JSON non-boolean as boolean")
        return value
    if name == "log_verbose_level":
        if not is_unsigned(value):
            raise InternalError("attempt to access JSON non-unsigned-integer as unsigned-integer")
        return min(value, MAX_UINT32)
    return as_string(value, name) if name in ("log_file", "log_format") else ""


def _trace_value(name: str, value: Json) -> str | list[str] | None:
    """null clears a setting."""
    if value is None:
        return None
    if name == "trace_level":
        return [as_string(level, name) for level in as_array(value, name)]
    return as_string(value, name)


def extension_routes(api: ExtensionApi) -> Iterator[tuple[str, str, Handler]]:
    """Yields method, path and handler."""
    system, cuda = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
    yield "GET", "/v2/logging", api.log_settings
    yield "POST", "/v2/logging", api.set_log_settings
    for setting in ("/v2/trace/setting", "/v2/models/{model}/trace/setting"):
        yield "GET", setting, api.trace_settings
        yield "POST", setting, api.set_trace_settings
    for status in ("/status", "/region/{region}/status"):
        yield "GET", f"{system}{status}", api.shared_memory_status
        yield "GET", f"{cuda}{status}", api.cuda_memory_status
    yield "POST", f"{system}/region/{{region}}/register", api.register_shared_memory
    yield "POST", f"{system}/region/{{region}}/unregister", api.unregister_shared_memory
    yield "POST", f"{system}/unregister", api.unregister_all_shared_memory
    yield "POST", f"{cuda}/region/{{region}}/register", api.register_cuda_memory
    yield "POST", f"{cuda}/region/{{region}}/unregister", api.unregister_cuda_memory
    yield "POST", f"{cuda}/unregister", api.unregister_cuda_memory
    for repository in ("/v2/repository", "/v2/repository/{repository}"):
        yield "POST", f"{repository}/index", api.repository_index
        yield "POST", f"{repository}/models/{{model}}/load", api.load_model
        yield "POST", f"{repository}/models/{{model}}/unload", api.unload_model
