"""Formats log records as JSON objects, one per line, for programs that collect them.

    time        UTC, RFC 3339
    level, logger, message
    request_id, model, key, trace_id    of the current request, if known; `key` is the name of the API key
    exception   the traceback
and the record's own `fields`.
"""

from __future__ import annotations

import json
import logging
import time

from llmserve.frontends.shared.request_context import current_request

FIELDS = "fields"  # the attribute of a record with a mapping


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        document = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = current_request()
        if request is not None:
            document |= request.fields()
        document |= getattr(record, FIELDS, {})
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False, default=str)
