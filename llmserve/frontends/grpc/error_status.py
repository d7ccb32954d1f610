"""Errors as the status of a gRPC call."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from llmserve.errors import InternalError, LlmserveError

Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
logger = logging.getLogger(__name__)


def status_of(error: LlmserveError) -> grpc.StatusCode:
    """The neutral codes are gRPC's, by name."""
    return grpc.StatusCode[error.code.value]


def answers_errors(handler: Handler) -> Handler:
    """Turn the core's errors into the call's status."""

    async def answered(request: Any, context: Any) -> Any:
        try:
            return await handler(request, context)
        except LlmserveError as error:
            failure = error
        except Exception as error:  # border: a fault of ours is INTERNAL to the client, a traceback in the log
            logger.exception("%s failed", handler.__name__)
            failure = InternalError(f"internal error: {error!r}")
        await context.abort(status_of(failure), str(failure))
        raise AssertionError("abort raises")

    return answered
