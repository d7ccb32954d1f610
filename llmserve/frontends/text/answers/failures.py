"""Errors in the formats of OpenAI's, Anthropic's and Ollama's APIs. The status decides whether a client retries."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.errors import Code, InternalError, InvalidArgument, LlmserveError, PromptTooLong, RateLimited
from llmserve.frontends.http.bodies import BodyTooLarge, BodyTooSlow
from llmserve.frontends.http.error_answers import JSON, RETRY_AFTER_S
from llmserve.frontends.http.json_fields import Json, encode_json
from llmserve.wire.http1.answers import WholeAnswer
from llmserve.wire.request_memory import RequestTooLarge

UNAUTHORIZED, FORBIDDEN, NOT_FOUND, METHOD_NOT_ALLOWED = 401, 403, 404, 405
TOO_MANY_REQUESTS, UNAVAILABLE, FIRST_OF_OURS = 429, 503, 500
# Clients retry after 408, 409, 429 and 5xx, so unsupported requests must have another status.
STATUS: Mapping[Code, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: NOT_FOUND,
    Code.ALREADY_EXISTS: 400,
    Code.UNIMPLEMENTED: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.RESOURCE_EXHAUSTED: TOO_MANY_REQUESTS,
    Code.UNAVAILABLE: UNAVAILABLE,
    Code.DEADLINE_EXCEEDED: 504,
    Code.CANCELLED: UNAVAILABLE,
    Code.INTERNAL: FIRST_OF_OURS,
    Code.UNKNOWN: FIRST_OF_OURS,
}
NO_THREADS = "thread_unsupported_request"  # tells Anthropic's client to send whole conversations
# Fields of these APIs become a grammar, so errors about a grammar name the fields instead.
GRAMMAR, ASKED = "the ebnf_grammar guide", "what tools, response_format or a grammar require"
KINDS: Mapping[type[LlmserveError], int] = {BodyTooLarge: 413, RequestTooLarge: 413, BodyTooSlow: 408}
OPENAI_TYPES = {
    UNAUTHORIZED: "authentication_error",
    FORBIDDEN: "permission_error",
    TOO_MANY_REQUESTS: "rate_limit_error",
}
ANTHROPIC_TYPES = {
    UNAUTHORIZED: "authentication_error", FORBIDDEN: "permission_error", NOT_FOUND: "not_found_error",
    413: "request_too_large", TOO_MANY_REQUESTS: "rate_limit_error", UNAVAILABLE: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip

logger = logging.getLogger(__name__)


class Refused(InvalidArgument):
    """A field of the request cannot be honoured."""

    def __init__(self, problem: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(problem)
        self.param = param
        self.code_name = code


class ModelNotFound(Refused):
    """The requested model does not exist."""

    code = Code.NOT_FOUND


@dataclass(frozen=True, slots=True)
class Failure:
    """An error for a client, independent of the API's format."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int = RETRY_AFTER_S

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (TOO_MANY_REQUESTS, UNAVAILABLE):
            return {"Retry-After": str(self.retry_after_s)}
        # the rest of the body may still arrive
        return {"Connection": "close"} if self.status in (408, 413) else {}


def failure_of(error: Exception) -> Failure:
    """The failure of an error. An internal error is logged; the client does not see its traceback."""
    if not isinstance(error, LlmserveError):
        logger.error("a request failed", exc_info=error)
        error = InternalError(f"internal error: {error!r}")
    status = next((status for kind, status in KINDS.items() if isinstance(error, kind)), STATUS[error.code])
    message = str(error).replace(GRAMMAR, ASKED)
    if isinstance(error, Refused):
        return Failure(status, message, error.param, error.code_name)
    if isinstance(error, RateLimited):
        return Failure(status, message, code="rate_limit_exceeded", retry_after_s=math.ceil(error.retry_after_s))
    return Failure(status, message, code="context_length_exceeded" if isinstance(error, PromptTooLong) else None)


def openai_error(failure: Failure) -> Json:
    kind = OPENAI_TYPES.get(
        failure.status, "server_error" if failure.status >= FIRST_OF_OURS else "invalid_request_error"
    )
    return {"error": {"message": failure.message, "type": kind, "param": failure.param, "code": failure.code}}


def anthropic_error(failure: Failure) -> Json:
    usual = "api_error" if failure.status >= FIRST_OF_OURS else "invalid_request_error"
    kind = ANTHROPIC_TYPES.get(failure.status, usual)
    error: dict[str, Json] = {"type": kind, "message": failure.message}
    if failure.code == NO_THREADS:
        error["details"] = {"error_code": NO_THREADS, "unsupported": [failure.param]}
    return {"type": "error", "error": error}


def ollama_error(failure: Failure) -> Json:
    return {"error": failure.message}


def error_document(path: str, failure: Failure) -> Json:
    """The failure in the format of the API that `path` belongs to."""
    if path.startswith("/v1/messages"):
        return anthropic_error(failure)
    return ollama_error(failure) if path.startswith("/api/") else openai_error(failure)


def failed(path: str, failure: Failure) -> WholeAnswer:
    """The answer to a request that does not reach the application."""
    return WholeAnswer(encode_json(error_document(path, failure)), failure.status, JSON, failure.headers)
