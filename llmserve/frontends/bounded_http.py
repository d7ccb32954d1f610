"""uvicorn's HTTP connection with bounds on request headers: their size, and the time that they may take.

Without them a client holds a connection for ever by never ending its headers, and fills the memory with endless ones.
Bodies have their bounds in `http_body`.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 1024  # request line included
HEADERS_TIMEOUT_S = 60


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    _headers_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    _in_headers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"request headers exceed {MAX_HEADER_BYTES} bytes"
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._num_header_bytes = 0
        if self._headers_timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP; uvicorn's text in the protocol's form."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _start_timer(self) -> None:
        self._headers_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self._time_out)

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _time_out(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # reading is paused while the request before is answered
        elif self._in_headers:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"request headers took more than {HEADERS_TIMEOUT_S} seconds")
        else:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, problem: str) -> None:
        self._in_headers = False
        body = json.dumps({"error": problem}).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
