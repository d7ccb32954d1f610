"""Request and response bodies: size limits, gzip and deflate.

Slow work (parsing or compressing a large body) runs in a worker thread, because the event loop also streams tokens. A
compressed body is sized by the most that it can inflate to. All forms of a body grow the request's share of the memory.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from llmserve.errors import DeadlineExceeded, InvalidArgument, LlmserveError, Unsupported
from llmserve.wire.event_loop import beside_loop
from llmserve.wire.http1.request import Request
from llmserve.wire.inflation import inflated
from llmserve.wire.pieces import Pieces, in_pieces
from llmserve.wire.request_memory import Share

WINDOW_BITS = {"gzip": 31, "deflate": 15}  # zlib's: deflate means the zlib format, as in RFC 9110
COMPRESSION_LEVEL = 1
MIN_COMPRESSED_BYTES = 256
BODY_PAUSE_S = 60  # longest time without a byte of a body
BODY_START_S = 60  # time for every body
BODY_BYTES_PER_S = 1024  # plus one second for each such number of bytes
MAX_INFLATION = 1032  # deflate: 258 bytes from two bits

Result = TypeVar("Result")


class BodyTooLarge(InvalidArgument):
    """The body, or what it decompresses to, is over the server's limit."""


class BodyTooSlow(DeadlineExceeded):
    """The client stopped in the middle of its body, or sends it too slowly."""


async def read_body(request: Request, limit: int) -> bytes | memoryview:
    """The decompressed request body, at most `limit` bytes."""
    encoding = (request.header(b"content-encoding") or "identity").strip().lower()
    if encoding not in ("identity", "", *WINDOW_BITS):
        raise Unsupported(f"Unsupported compression type '{encoding}': use gzip or deflate")
    body = await _read_raw(request, limit)
    if encoding in WINDOW_BITS:
        return await off_loop(
            request, lambda: _decompress(body, encoding, limit, request.share), size=len(body) * MAX_INFLATION
        )
    return body


async def _read_raw(request: Request, limit: int) -> bytes | memoryview:
    """Read up to `limit` bytes; of a larger body, read and drop up to `2 * limit`, so most clients get an answer."""
    began_at = time.monotonic()
    if request.num_bytes <= limit:
        _grow_with(request)
    while not request.has_ended and request.num_bytes <= 2 * limit:
        if time.monotonic() - began_at > BODY_START_S + request.num_bytes / BODY_BYTES_PER_S:
            raise BodyTooSlow(f"the request body arrives at less than {BODY_BYTES_PER_S} bytes per second")
        try:
            async with asyncio.timeout(BODY_PAUSE_S):
                await request.more_body()
        except TimeoutError:
            raise BodyTooSlow(f"the request body stopped arriving: no data for {BODY_PAUSE_S} seconds") from None
        if request.num_bytes > limit:
            request.forget_body()
        else:
            _grow_with(request)
    if request.num_bytes > limit:
        raise _too_large(limit)
    return await request.body()


def _grow_with(request: Request) -> None:
    try:
        request.share.grow(request.num_bytes - request.share.num_bytes)
    except LlmserveError:
        request.forget_body()
        raise


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body exceeds the maximum allowed input size of {limit} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def _decompress(body: bytes | memoryview, encoding: str, limit: int, share: Share) -> bytes | memoryview:
    inflater = zlib.decompressobj(WINDOW_BITS[encoding])
    plain = Pieces()
    try:
        for piece in inflated(inflater, body):
            share.grow(len(piece))
            plain.add(piece)
            if len(plain) > limit:
                raise _too_large(limit)
    except zlib.error as error:
        raise _malformed(encoding, str(error)) from error
    if not inflater.eof or inflater.unused_data:
        raise _malformed(encoding, "it is truncated or has data after its end")
    return plain.taken()


def _malformed(encoding: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"the request body is not valid {encoding} data: {problem}")


def off_loop(request: Request, work: Callable[[], Result], *, size: int) -> Awaitable[Result]:
    """Do `work` on about `size` bytes of `request`: in a worker thread, or here if they are few."""
    return beside_loop(work, size=size, memory=request.memory, share=request.share)


async def compress_for(
    request: Request, parts: Sequence[bytes | memoryview], *, size: int
) -> tuple[Sequence[bytes | memoryview], dict[str, str]]:
    """A body of `size` bytes in the encoding that the client prefers, and its Content-Encoding header."""
    accepted = request.header(b"accept-encoding")
    encoding = preferred_encoding(accepted) if accepted and size >= MIN_COMPRESSED_BYTES else None
    if encoding is None:
        return parts, {}

    def compress() -> list[bytes]:
        compressor = zlib.compressobj(COMPRESSION_LEVEL, wbits=WINDOW_BITS[encoding])
        pieces = (piece for part in parts for piece in in_pieces(part))
        return [*map(compressor.compress, pieces), compressor.flush()]

    return await off_loop(request, compress, size=size), {"Content-Encoding": encoding}


def preferred_encoding(accept: str) -> str | None:
    """gzip, deflate or None (identity) by the q-values of an Accept-Encoding header; gzip wins ties."""
    weights: dict[str, float] = {}
    for item in accept.lower().split(","):
        name, _, parameter = item.partition(";")
        weights[name.strip()] = _quality(parameter)
    wildcard = weights.get("*", 0.0)
    choices = {name: weights.get(name, wildcard) for name in WINDOW_BITS}
    best = max(choices, key=lambda name: choices[name])
    identity = weights.get("identity", 0.0)
    return best if choices[best] > 0 and choices[best] >= identity else None


def _quality(parameter: str) -> float:
    key, _, value = parameter.partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0
