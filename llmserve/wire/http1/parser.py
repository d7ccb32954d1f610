"""Bytes to requests. httptools finds their parts; what is bounded here is the size of their headers."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url

from llmserve.wire.http1.request import Request

MAX_HEADER_BYTES = 64 * 1024  # request line included

logger = logging.getLogger(__name__)


class BadRequest(Exception):
    """What a client sends cannot be understood; nor can what follows it."""

    def __init__(self, status: HTTPStatus, problem: str) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem


class RequestSink(Protocol):
    """Where requests go, part by part and one after the other."""

    def begin(self, request: Request) -> None:
        """Its headers are complete."""
        ...

    def add(self, data: bytes) -> None:
        """A piece of its body."""
        ...

    def end(self) -> None:
        """Its body is complete."""
        ...


class RequestParser:
    def __init__(self, sink: RequestSink) -> None:
        self.is_in_headers = False
        self.holds_end = False  # what is being parsed, or was last, has the end of a request in it
        self._sink = sink
        self._parser = self._make_parser()
        self._num_header_bytes = 0
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []

    def feed(self, data: bytes) -> None:
        """Raises `BadRequest`, after which there is no more to parse."""
        self.holds_end = False
        while data:
            try:
                self._parser.feed_data(data)
                break
            except HttpParserUpgrade as upgrade:
                data = self._without_offer(data[upgrade.args[0] :])
            except HttpParserError as error:
                logger.debug("no HTTP: %r", error)
                raise BadRequest(HTTPStatus.BAD_REQUEST, "Invalid HTTP request received.") from error
        if self.is_in_headers and not self.holds_end:  # else how much of it is these headers is unknown
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                problem = f"request headers exceed {MAX_HEADER_BYTES} bytes"
                raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, problem)

    # what httptools finds

    def on_message_begin(self) -> None:
        self.is_in_headers = True
        self._num_header_bytes = 0
        self._url = b""
        self._fields = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_headers:  # not behind a body
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_in_headers = False
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
            )
        )

    def on_body(self, data: bytes) -> None:
        self._sink.add(data)

    def on_message_complete(self) -> None:
        self.holds_end = True
        self._sink.end()

    def _make_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # which is not served, but no error
        return parser

    def _without_offer(self, rest: bytes) -> bytes:
        """A request again that offers another protocol, without the offer, which is not taken; and what follows it.

        The parser has left it at the end of the headers, and takes its body for the other protocol's.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise BadRequest(HTTPStatus.BAD_REQUEST, "This server is no proxy.")
        lines = [b"%b: %b\r\n" % field for field in self._fields if field[0] != b"upgrade"]
        version = self._parser.get_http_version().encode()
        self._parser = self._make_parser()
        return b"%b %b HTTP/%b\r\n%b\r\n%b" % (method, self._url, version, b"".join(lines), rest)


def _path(url: bytes) -> str:
    """Raises what the parser turns into an error of its own when `url` is none."""
    plain = url if url.startswith(b"/") and b"?" not in url and b"#" not in url else parse_url(url).path or b"/"
    path = plain.decode("ascii")
    return unquote(path) if "%" in path else path
