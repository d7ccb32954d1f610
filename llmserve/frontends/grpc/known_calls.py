"""The context of each gRPC call from its start, and its log record at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

from grpc import StatusCode

from llmserve.frontends.grpc.admission import header_of
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.request_context import REQUEST_ID, RequestContext, enter_request, given_id
from llmserve.frontends.shared.request_log import log_request
from llmserve.wire.http2.method import Method, OpenedCall


def known(methods: Mapping[str, Method], extensions: Extensions) -> dict[str, Method]:
    """`methods` by path, each with an `open` that enters and logs its calls."""
    return {path: replace(method, open=partial(_open, extensions)) for path, method in methods.items()}


def _open(extensions: Extensions, call: OpenedCall) -> None:
    """Makes the request current for the call's handler, and returns the client's id in the answer's metadata."""
    header = header_of(call.invocation_metadata())
    context = RequestContext(call.path, header, extensions.api_keys, given_id(header))
    if context.id:
        call.answer_metadata = ((REQUEST_ID, context.id),)
    call.context = copy_context()
    call.context.run(enter_request, context)
    if extensions.logs.shows_requests:
        call.add_done_callback(partial(_log, context))


def _log(context: RequestContext, call: Any) -> None:
    status = call.status or StatusCode.CANCELLED  # without a status, the client cancelled the call
    log_request(context, status.name, is_complete=call.status is not None)
