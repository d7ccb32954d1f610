"""Errors as HTTP answers: the status of each neutral code, and the form of an error body."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from llmserve.errors import Code, InternalError, LlmserveError, RateLimited
from llmserve.frontends.http.bodies import BodyTooLarge, BodyTooSlow
from llmserve.frontends.http.json_fields import Json, encode_json
from llmserve.wire.http1.answers import Answer, WholeAnswer
from llmserve.wire.http1.connection import Handler
from llmserve.wire.http1.request import NO_HEADERS, ClientGone, Request
from llmserve.wire.request_memory import RequestTooLarge

TOO_MANY_REQUESTS, UNAVAILABLE = 429, 503
STATUS: Mapping[Code, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 400,
    Code.UNIMPLEMENTED: 501,
    Code.FAILED_PRECONDITION: 400,
    Code.RESOURCE_EXHAUSTED: UNAVAILABLE,
    Code.UNAVAILABLE: UNAVAILABLE,
    Code.DEADLINE_EXCEEDED: 504,
    Code.CANCELLED: 400,
    Code.INTERNAL: 500,
    Code.UNKNOWN: 400,
}
REQUEST_TIMEOUT = 408
CONTENT_TOO_LARGE = 413
LAST_OF_CONNECTION: Mapping[type[LlmserveError], int] = {
    BodyTooLarge: CONTENT_TOO_LARGE,
    BodyTooSlow: REQUEST_TIMEOUT,
}
RETRY_AFTER_S = 1
JSON = "application/json"
TEXT = "text/plain"  # Triton's type for some errors and for empty answers; the body of an error is still JSON

logger = logging.getLogger(__name__)


def json_response(document: Json) -> WholeAnswer:
    return WholeAnswer(encode_json(document), content_type=JSON)


def done() -> WholeAnswer:
    """An empty answer."""
    return WholeAnswer(content_type=JSON)


def refused(
    problem: str, status: int, content_type: str = JSON, headers: Mapping[str, str] = NO_HEADERS
) -> WholeAnswer:
    return WholeAnswer(encode_json({"error": problem}), status, content_type, headers)


def error_response(error: LlmserveError, content_type: str = JSON) -> WholeAnswer:
    for kind, status in LAST_OF_CONNECTION.items():
        if isinstance(error, kind):  # the rest of the body may still arrive, so the connection cannot be reused
            return refused(str(error), status, headers={"Connection": "close"})
    if isinstance(error, RequestTooLarge):
        return refused(str(error), CONTENT_TOO_LARGE)
    return refused(str(error), status_of(error), content_type, retry_headers(error))


def status_of(error: LlmserveError) -> int:
    return TOO_MANY_REQUESTS if isinstance(error, RateLimited) else STATUS[error.code]


def retry_headers(error: LlmserveError) -> dict[str, str]:
    """Retry-After for every 429 and 503: a full queue empties, a starting server becomes ready, a stopping one is
    replaced."""
    if isinstance(error, RateLimited):
        return {"Retry-After": str(math.ceil(error.retry_after_s))}
    return {"Retry-After": str(RETRY_AFTER_S)} if STATUS[error.code] == UNAVAILABLE else {}


def internal_error(error: Exception) -> InternalError:
    """Logs the traceback of an internal error, and returns the error for the client."""
    logger.exception("a request failed")
    return InternalError(f"internal error: {error!r}")


def answers_errors(handler: Handler, content_type: str = JSON) -> Handler:
    """Turn the core's errors into error bodies."""

    async def answered(request: Request) -> Answer:
        try:
            return await handler(request)
        except LlmserveError as error:
            return error_response(error, content_type)
        except ClientGone:
            raise
        except Exception as error:  # border: an internal error must not reach the client as a broken connection
            return error_response(internal_error(error), content_type)

    return answered
