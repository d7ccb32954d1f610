"""W3C trace context: the client's span that a request belongs to, and the request's own span.

If a request has a client's span, its sampled flag decides whether the request is traced. Other requests are sampled.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from llmserve.frontends.shared.api_keys import HeaderOf
from llmserve.frontends.shared.request_context import RequestContext
from llmserve.serving.instruments.spans import RequestSpan, SpanIds, new_id

TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_STATE = 512  # characters
SAMPLED = 1  # a flag
UNKNOWN = "request"  # the name of a request without a context


@dataclass(frozen=True, slots=True)
class Parent:
    """A client's span."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str


def parent_of(header: HeaderOf) -> Parent | None:
    """The client's span; None if it sends none, or an invalid one."""
    given = header("traceparent")
    found = TRACEPARENT.fullmatch(given) if isinstance(given, str) else None
    if found is None or (found[1] == "00" and found[5]):  # only later versions may have more fields
        return None
    trace_id, span_id, flags = (int(found[number], 16) for number in (2, 3, 4))
    if not trace_id or not span_id:
        return None
    state = header("tracestate")
    kept = state if isinstance(state, str) and len(state) <= MAX_STATE else ""
    return Parent(trace_id, span_id, bool(flags & SAMPLED), kept)


def request_span(context: RequestContext | None, parent: Parent | None) -> RequestSpan:
    """The span of the current request. `context` keeps the trace's id, so all inferences of a request share it."""
    if parent is not None:
        ids, state = SpanIds(parent.trace_id, new_id(64), parent.span_id), parent.state
    else:
        known = int(context.trace_id, 16) if context is not None and context.trace_id else 0
        ids, state = SpanIds(known or new_id(128), new_id(64)), ""
    if context is None:
        return RequestSpan(UNKNOWN, ids, time.monotonic_ns(), {}, state)
    context.trace_id = f"{ids.trace_id:032x}"
    return RequestSpan(context.name.lstrip("/"), ids, context.began_ns, _attributes(context), state)


def _attributes(context: RequestContext) -> dict[str, str | int]:
    method, space, path = context.name.partition(" ")
    if space:
        said = {"http.request.method": method, "url.path": path}
    else:
        service, _, rpc = method.strip("/").rpartition("/")
        said = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": rpc}
    known = {"llmserve.request_id": context.id, "llmserve.key": context.key}
    return {**said, **{name: value for name, value in known.items() if value}}
