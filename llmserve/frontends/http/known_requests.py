"""The context of each HTTP request from its start, and its log record at the end."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from llmserve.frontends.http.admission import header_of
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.request_context import (
    REQUEST_ID,
    RequestContext,
    current_request,
    enter_request,
    given_id,
    made_id,
)
from llmserve.frontends.shared.request_log import log_request
from llmserve.wire.http1.answers import Answer, Reply
from llmserve.wire.http1.request import ClientGone, Request

ANTHROPIC_PATH, ANTHROPIC_ID = "/v1/messages", "request-id"  # the name of the header in Anthropic's API
CLIENT_GONE = 499  # as in proxies' logs; this status is never sent
SERVER_FAULT = 500


def enter(request: Request, extensions: Extensions, *, needs_id: bool) -> None:
    """Makes `request` the current request of this task. It has an id if the client gave one or it `needs_id`."""
    header = header_of(request)
    request_id = given_id(header) or (made_id() if needs_id else "")
    enter_request(RequestContext(f"{request.method} {request.path}", header, extensions.api_keys, request_id))
    headers = extensions.cross_origin.headers(request)
    if request_id:
        headers[REQUEST_ID] = request_id
        if request.path.startswith(ANTHROPIC_PATH):
            headers[ANTHROPIC_ID] = request_id
    if headers:
        request.answer_headers = headers


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """An answer that is logged when it has been sent."""

    answer: Answer

    async def send(self, reply: Reply) -> None:
        try:
            await self.answer.send(reply)
        finally:
            _log(reply.status or CLIENT_GONE, is_complete=reply.is_complete)


async def logged(handling: Awaitable[Answer]) -> Answer:
    """The answer of a handler. Errors are logged, too."""
    try:
        return LoggedAnswer(await handling)
    except Exception as error:
        _log(CLIENT_GONE if isinstance(error, ClientGone) else SERVER_FAULT, is_complete=False)
        raise
    except BaseException:  # cancelled because the client disconnected
        _log(CLIENT_GONE, is_complete=False)
        raise


def _log(status: int, *, is_complete: bool) -> None:
    context = current_request()
    assert context is not None
    log_request(context, status, is_complete=is_complete)
