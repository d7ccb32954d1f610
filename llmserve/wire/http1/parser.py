"""Converts bytes to requests. httptools finds their parts; this module limits everything in a request but its body.

| bytes of                                   | at most                                   |
|--------------------------------------------|-------------------------------------------|
| the request line and headers               | `MAX_HEADER_BYTES`                        |
| trailers; a chunk's line; other framing    | `MAX_HEADER_BYTES` without a byte of body |
| all framing after the headers              | the same, and `FRAMING_BYTES` per byte of body |

The limits also apply if nobody reads the body any more.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import NoReturn, Protocol
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url

from llmserve.wire.http1.request import Request

MAX_HEADER_BYTES = 64 * 1024  # request line included
FRAMING_BYTES = 8  # a chunk with one byte of data needs five

logger = logging.getLogger(__name__)


class BadRequest(Exception):
    """The client's data cannot be parsed, nor can anything after it."""

    def __init__(self, status: HTTPStatus, problem: str) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem


class RequestSink(Protocol):
    """Receives requests in parts, one after the other."""

    def begin(self, request: Request) -> None:
        """The headers are complete."""
        ...

    def add(self, data: bytes) -> None:
        """Add a piece of the body."""
        ...

    def end(self) -> None:
        """The body is complete."""
        ...


class RequestParser:
    def __init__(self, sink: RequestSink) -> None:
        self.is_in_headers = False
        self.is_in_body = False  # or its trailers
        self.holds_end = False  # the current slice, or the last one, contains the end of a request
        self._sink = sink
        self._parser = self._make_parser()
        self._num_feeding = 0  # bytes that are being parsed
        self._num_header_bytes = 0  # of the current headers in earlier slices, as far as known
        self._most_header_bytes = 0  # the same, with bytes that may belong to the previous request
        self._num_body_bytes = 0
        self._body_before = 0  # `_num_body_bytes` when this slice came
        self._num_framing_bytes = 0
        self._num_idle_bytes = 0  # framing since the last byte of body
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes | memoryview) -> None:
        """Parse a slice of received data. Raises `BadRequest`; do not call it after that."""
        self.holds_end = False
        self._body_before = self._num_body_bytes
        while data:
            self._num_feeding = len(data)
            try:
                self._parser.feed_data(data)
                break
            except HttpParserUpgrade as upgrade:
                data = self._without_offer(data[upgrade.args[0] :])
            except HttpParserError as error:
                if isinstance(error.__context__, BadRequest):  # raised by our callbacks
                    raise error.__context__ from None
                logger.debug("not HTTP: %r", error)
                raise BadRequest(HTTPStatus.BAD_REQUEST, "Invalid HTTP request received.") from error
        if self.is_in_headers:
            self._most_header_bytes += len(data)
        if self.holds_end:
            return  # how much of it belongs to the current request is unknown
        if self.is_in_headers:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                _refuse_headers()
        elif self.is_in_body:
            self._check_framing(len(data), self._num_body_bytes - self._body_before)

    def _check_framing(self, size: int, body_size: int) -> None:
        """Check a slice of `size` bytes, of which `body_size` are body."""
        self._num_framing_bytes += size - body_size
        self._num_idle_bytes = 0 if body_size else self._num_idle_bytes + size
        allowed = MAX_HEADER_BYTES + FRAMING_BYTES * self._num_body_bytes
        if self._num_idle_bytes > MAX_HEADER_BYTES or self._num_framing_bytes > allowed:
            problem = f"request trailers or chunk headers exceed {MAX_HEADER_BYTES} bytes"
            raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, problem)

    # callbacks of httptools

    def on_message_begin(self) -> None:
        self.is_in_headers = True
        self._num_header_bytes = self._most_header_bytes = 0
        self._num_framing_bytes = self._num_idle_bytes = 0
        self._num_body_bytes = self._body_before = 0
        self._url = b""
        self._fields = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_headers:  # trailers are ignored
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_in_headers = False
        if self._most_header_bytes + self._num_feeding > MAX_HEADER_BYTES:
            sizes = (len(name) + len(value) + len(": \r\n") for name, value in self._fields)
            if len("GET  HTTP/1.1\r\n\r\n") + len(self._url) + sum(sizes) > MAX_HEADER_BYTES:
                _refuse_headers()
        if self._parser.should_upgrade():
            return  # see _without_offer
        is_http10 = self._parser.get_http_version() == "1.0"
        self._sink.begin(
            Request(
                self._parser.get_method().decode("ascii"),
                _path(self._url),
                self._fields,
                keeps_alive=not is_http10 and self._parser.should_keep_alive(),
                is_http10=is_http10,
                query=self._url.partition(b"?")[2],
            )
        )
        self.is_in_body = True

    def on_body(self, data: bytes) -> None:
        self._num_body_bytes += len(data)
        self._sink.add(data)

    def on_message_complete(self) -> None:
        self.holds_end = True
        self.is_in_body = False
        self._sink.end()

    def _make_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # such data is ignored, but is no error
        return parser

    def _without_offer(self, rest: bytes | memoryview) -> bytes:
        """Returns the current request without its offer of another protocol, and the bytes after its headers.

        The offer is ignored, but the parser has stopped at the end of the headers and takes the body for the other
        protocol's.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise BadRequest(HTTPStatus.BAD_REQUEST, "This server is not a proxy.")
        lines = [b"%b: %b\r\n" % field for field in self._fields if field[0] != b"upgrade"]
        version = self._parser.get_http_version().encode()
        self._parser = self._make_parser()
        return b"%b %b HTTP/%b\r\n%b\r\n%b" % (method, self._url, version, b"".join(lines), bytes(rest))


def _refuse_headers() -> NoReturn:
    problem = f"request headers exceed {MAX_HEADER_BYTES} bytes"
    raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, problem)


def _path(url: bytes) -> str:
    """The decoded path of a URL. Raises if `url` is invalid; the parser reports that as its own error."""
    plain = url if url.startswith(b"/") and b"?" not in url and b"#" not in url else parse_url(url).path or b"/"
    path = plain.decode("ascii")
    return unquote(path) if "%" in path else path
