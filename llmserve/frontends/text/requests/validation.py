"""Parses bodies to pydantic models, and reports all problems at once, in the protocol's words.

FastAPI derives the schema of these routes from the endpoints' signatures. Bodies are read here: within the server's
limits, and off the event loop if they are large. A client decides how many problems its body has, and each costs far
more than its bytes. So a list stops at its first problem, and a document with very many values is not parsed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import copy_context
from functools import cache, partial
from typing import Any, NoReturn, TypeVar, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails

from llmserve.core import Tenant
from llmserve.errors import InvalidArgument, nearest
from llmserve.frontends.http import asgi
from llmserve.frontends.http.bodies import off_loop
from llmserve.frontends.http.json_fields import ENCODER, Json
from llmserve.frontends.text.answers.event_stream import error_response
from llmserve.frontends.text.answers.failures import Refused, failure_of
from llmserve.frontends.text.requests.notes import begin_notes, note
from llmserve.frontends.text.requests.problem_words import place_of, problem_of
from llmserve.stages.json_values import MAX_VALUES, may_have_many, num_values
from llmserve.wire.http1 import request as wire

MOST_PROBLEMS = 10  # in one message
MOST_UNKNOWN = 16  # unknown fields of an object that are reported by name
MOST_SHOWN = 50  # characters of an unknown field's name
HINTS = ("cache_control",)  # clients add them to any part of a request; the prefix cache does not need them
EXPANSION = 32  # most memory for each byte of a document: as Python objects, then as models
TEXT_EXPANSION, VALUE_BYTES = 8, 256  # memory for each byte and each value of a larger document
BODY = "body"  # name of the endpoints' parameter
Body = TypeVar("Body", bound=BaseModel)


def _stop_at_first_problem(schema: Any) -> None:
    """Make every list in a schema stop at its first problem, as `pydantic.FailFast` does for one list."""
    if isinstance(schema, list):
        for each in schema:
            _stop_at_first_problem(each)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for each in schema.values():
            _stop_at_first_problem(each)


class Strict(BaseModel):
    """A model without type conversion. An unknown field is noted and removed, or is a problem: see `notes`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first_problem(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() <= (known := _known_names(cls)):
            return value
        if len(value) > len(known) + MOST_UNKNOWN:
            raise ValueError(f"an object of {len(value)} fields; at most {len(known)} are known")
        return {
            name: each
            for name, each in value.items()
            if name in known or not (name in HINTS or note(f"{name[:MOST_SHOWN]}: unknown field{_near(name, known)}"))
        }


@cache
def _known_names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(each.alias or name for name, each in model.model_fields.items())


def _near(name: str, known: Collection[str]) -> str:
    return nearest(name, known) or ", ignored"


def refused(reason: str, *harmless: Any) -> AfterValidator:
    """Validates a known field that is not supported: only null and the `harmless` values are accepted."""

    def check(value: Any) -> Any:
        if value is not None and value not in harmless:
            raise ValueError(reason)
        return None

    return AfterValidator(check)


def ignored(reason: str, *harmless: Any) -> AfterValidator:
    """Validates a known field without effect on the answer: noted, unless it is null or one of `harmless`."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value is not None and value not in harmless and not note(f"{info.field_name}: {reason}"):
            raise ValueError(reason)
        return None

    return AfterValidator(check)


def at_most(count: int) -> BeforeValidator:
    """Limits a list, or an object with names of the client's choice, before its entries are validated.

    The limit is not in the routes' schema, because clients' tests would generate lists of that length from it.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > count:
            raise ValueError(f"has {len(value)} entries, more than {count}")
        return value

    return BeforeValidator(check)


def wire_request(request: Request) -> wire.Request:
    found: wire.Request = request.scope["extensions"][asgi.REQUEST]["request"]
    return found


def given_tenant(request: Request) -> Tenant | None:
    """The tenant of a request that the server sends to itself; None for other requests."""
    found: Tenant | None = request.scope["extensions"][asgi.REQUEST]["tenant"]
    return found


class BodyRoute(APIRoute):
    """A route whose endpoint takes the validated body, and the request."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        endpoint = self.endpoint
        hints = get_type_hints(endpoint)
        model = hints.get(BODY)

        async def handle(request: Request) -> Response:
            begin_notes(request.app.state.refuses_unknown_fields)
            try:
                if model is None:
                    asked = {"request": request} if "request" in hints else {}
                    answer: Response = await endpoint(**request.path_params, **asked)
                else:
                    answer = await endpoint(await _validated(request, model), request)
            except Exception as error:  # border: the client gets any error in its protocol
                return error_response(request.url.path, failure_of(error))
            return answer

        return handle


async def _validated(request: Request, model: type[Body]) -> Body:
    """The validated body. Raises `LlmserveError`."""
    raw = await request.body()
    asked = wire_request(request)
    is_counted = may_have_many(len(raw))
    asked.share.grow((TEXT_EXPANSION if is_counted else EXPANSION) * len(raw))

    def work() -> Body:
        if is_counted:
            asked.share.grow(VALUE_BYTES * _num_values(raw))
        try:
            return model.model_validate(_document(raw))
        except ValidationError as error:
            raise _refusal(error, model) from None

    return await off_loop(asked, partial(copy_context().run, work), size=len(raw))


def _document(raw: bytes) -> Json:
    try:
        text = raw.decode()
        document = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if "\\u" in text:
            ENCODER.encode(document).encode()  # raises for unpaired surrogates, which have no UTF-8 form
    except RecursionError:
        raise InvalidArgument("the request body is nested too deeply") from None
    except ValueError as error:
        raise InvalidArgument(f"the request body is not JSON in UTF-8: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgument("the request body must be a JSON object")
    return document


def _num_values(raw: bytes) -> int:
    """The number of JSON values in a body. Raises `InvalidArgument` for too many."""
    if (count := num_values(raw)) > MAX_VALUES:
        raise InvalidArgument(
            f"the request body has {count} JSON values, more than {MAX_VALUES}: send less at once, or long lists of "
            "numbers as binary tensors over /v2"
        )
    return count


def _finite(text: str) -> float:
    """Parse a number. Infinity is refused here, because models would report every occurrence of it."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large for a number")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[str]:
    return _distinct(error.errors(include_url=False, include_input=False), model)


def _distinct(problems: Sequence[ErrorDetails], model: type[BaseModel]) -> list[str]:
    return list(dict.fromkeys(_told(problem, model) for problem in problems))


def _refusal(error: ValidationError, model: type[BaseModel]) -> Refused:
    problems = error.errors(include_url=False, include_input=False)
    distinct = _distinct(problems, model)
    more = f"; and {len(distinct) - MOST_PROBLEMS} more" if len(distinct) > MOST_PROBLEMS else ""
    field = next((str(part) for part in problems[0]["loc"] if not str(part).startswith("[")), None)  # not a union's tag
    return Refused("; ".join(distinct[:MOST_PROBLEMS]) + more, field)


def _told(problem: ErrorDetails, model: type[BaseModel]) -> str:
    name = place_of(problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = nearest(name, model.model_fields)
        return f"{name}: unknown field{near}" if near else f"{name}: unknown field; remove it"
    text = problem_of(problem["type"], problem["msg"], problem.get("ctx", {}))
    return f"{name}: {text}" if name else text
