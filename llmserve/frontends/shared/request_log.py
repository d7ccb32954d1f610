"""Logs a record for each answered request, if the log settings request it (verbose level 1)."""

from __future__ import annotations

import logging
import time

from llmserve.frontends.shared.json_logs import FIELDS
from llmserve.frontends.shared.request_context import RequestContext, shown

logger = logging.getLogger("llmserve.requests")


def log_request(context: RequestContext, status: int | str, *, is_complete: bool) -> None:
    """`status`: of HTTP, or the name of gRPC's. Not complete: the client disconnected, or the answer was cut off."""
    duration_ms = round((time.monotonic_ns() - context.began_ns) / 1e6, 3)
    name = shown(context.name)
    known = context.fields()
    words = "".join(f", {field} {value}" for field, value in known.items())
    broken = "" if is_complete else ", interrupted"
    fields = {"request": name, "status": status, "duration_ms": duration_ms, "is_complete": is_complete}
    logger.info("%s: %s in %.1f ms%s%s", name, status, duration_ms, broken, words, extra={FIELDS: {**fields, **known}})
