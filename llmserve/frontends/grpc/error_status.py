"""Converts errors to the status of a gRPC call."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from llmserve.errors import InternalError, LlmserveError

Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
logger = logging.getLogger(__name__)


def status_of(error: LlmserveError) -> grpc.StatusCode:
    """The status with the name of the error's neutral code."""
    return grpc.StatusCode[error.code.value]


def answers_errors(handler: Handler) -> Handler:
    """Turn the core's errors into the call's status."""

    async def answered(request: Any, context: Any) -> Any:
        try:
            return await handler(request, context)
        except LlmserveError as error:
            failure = error
        except Exception as error:  # border: the client sees INTERNAL, the log has the traceback
            logger.exception("%s failed", handler.__name__)
            failure = InternalError(f"internal error: {error!r}")
        await context.abort(status_of(failure), str(failure))
        raise AssertionError("abort raises")

    return answered
