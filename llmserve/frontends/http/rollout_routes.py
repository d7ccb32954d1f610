"""HTTP routes of rollouts: our addition to the protocol's model repository extension, in the same API group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmserve.errors import InvalidArgument
from llmserve.frontends.http.bodies import off_loop, read_body
from llmserve.frontends.http.error_answers import json_response
from llmserve.frontends.http.json_fields import Json, as_object, as_string, parse_json
from llmserve.frontends.shared.server_core import Core
from llmserve.serving.rollout.rollouts import Asked, AskedAdapter
from llmserve.wire.http1.answers import WholeAnswer
from llmserve.wire.http1.connection import Handler
from llmserve.wire.http1.request import Request

OF_START, OF_ABORT = ("version", "parameters", "rules", "adapter"), ("reason",)
OF_ADAPTER = ("name", "path")


@dataclass(frozen=True, slots=True)
class RolloutApi:
    """One method per route."""

    core: Core
    max_input_bytes: int

    async def all(self, request: Request) -> WholeAnswer:
        return json_response(self.core.rollouts())

    async def status(self, request: Request) -> WholeAnswer:
        return json_response(self.core.rollout(request.path_params["model"]))

    async def start(self, request: Request) -> WholeAnswer:
        given = await self._members(request, OF_START)
        version = given.get("version", "")
        parameters = as_object(given.get("parameters", {}), "parameters")
        asked = Asked(
            str(version) if isinstance(version, int) else as_string(version, "version"),
            {key: as_string(value, f"parameters.{key}") for key, value in parameters.items()},
            as_object(given.get("rules", {}), "rules"),
            _adapter(given["adapter"]) if "adapter" in given else None,
        )
        await self.core.start_rollout(request.path_params["model"], asked)
        return await self.status(request)

    async def promote(self, request: Request) -> WholeAnswer:
        await self._members(request, ())
        await self.core.promote_rollout(request.path_params["model"])
        return await self.status(request)

    async def abort(self, request: Request) -> WholeAnswer:
        given = await self._members(request, OF_ABORT)
        self.core.abort_rollout(request.path_params["model"], as_string(given.get("reason", ""), "reason"))
        return await self.status(request)

    async def _members(self, request: Request, known: tuple[str, ...]) -> Mapping[str, Json]:
        """The members of the body's JSON object; empty if there is no body."""
        body = await read_body(request, self.max_input_bytes)
        if not body:
            return {}
        given = as_object(await off_loop(request, lambda: parse_json(body, request.share), size=len(body)), "request")
        _check_names(given, known, "the request")
        return given


def _adapter(given: Json) -> AskedAdapter:
    members = as_object(given, "adapter")
    _check_names(members, OF_ADAPTER, "adapter")
    if missing := [name for name in OF_ADAPTER if not members.get(name)]:
        raise InvalidArgument(f"adapter needs {' and '.join(missing)}: a name and the path of its directory")
    name, path = (as_string(members[name], f"adapter.{name}") for name in OF_ADAPTER)
    return AskedAdapter(name, Path(path))


def _check_names(given: Mapping[str, Json], known: tuple[str, ...], of: str) -> None:
    if unknown := [name for name in given if name not in known]:
        expected = ", ".join(known) or "none"
        raise InvalidArgument(f"unknown member '{', '.join(unknown)}' of {of}; known: {expected}")


def rollout_routes(api: RolloutApi) -> Iterator[tuple[str, str, Handler]]:
    """Yields method, path and handler."""
    path = "/v2/repository/models/{model}/rollout"
    yield "GET", "/v2/repository/rollouts", api.all
    yield "GET", path, api.status
    yield "POST", f"{path}/start", api.start
    yield "POST", f"{path}/promote", api.promote
    yield "POST", f"{path}/abort", api.abort
