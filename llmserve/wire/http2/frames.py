"""Frames as bytes, and the errors of RFC 9113."""

from __future__ import annotations

import struct

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = range(2, 7)  # settings

NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED = 0, 1, 3, 5
FRAME_SIZE_ERROR, REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 7, 9, 11

OF_STREAMS = frozenset((DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION))
OF_CONNECTIONS = frozenset((SETTINGS, PING, GOAWAY))
SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}  # bytes

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW = 65_535
DEFAULT_MAX_FRAME = 16_384
LARGEST_FRAME = 2**24 - 1
LARGEST_WINDOW = 2**31 - 1
MAX_SETTINGS = 64  # in one frame; RFC 9113 has six

HEAD = struct.Struct(">HBBBI")  # length in 24 bits, type, flags, stream
WORD = struct.Struct(">I")
SETTING = struct.Struct(">HI")


class ConnectionFailed(Exception):
    """The peer broke the protocol or exceeded a limit: the connection ends after a GOAWAY with `code`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    length = len(payload)
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, WORD.pack(increment))


def reset(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream, WORD.pack(code))


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in values.items()))


def check_form(kind: int, flags: int, stream: int, size: int) -> None:
    """Check the rules that depend on a frame's kind but not on its payload (RFC 9113, section 6)."""
    if (kind in OF_STREAMS and stream == 0) or (kind in OF_CONNECTIONS and stream != 0):
        raise ConnectionFailed(PROTOCOL_ERROR, f"a frame of kind {kind} on stream {stream}")
    if size != SIZES.get(kind, size):
        raise ConnectionFailed(FRAME_SIZE_ERROR, f"a frame of kind {kind} with {size} bytes")
    if kind == SETTINGS and (size % SETTING.size or (flags & ACK and size)):
        raise ConnectionFailed(FRAME_SIZE_ERROR, f"settings of {size} bytes")
    if kind == SETTINGS and size > MAX_SETTINGS * SETTING.size:
        raise ConnectionFailed(ENHANCE_YOUR_CALM, f"{size // SETTING.size} settings in one frame")


def word(payload: bytes) -> int:
    """The 31-bit number in a frame's payload; the bit before it is reserved."""
    (number,) = WORD.unpack(payload)
    return int(number) & LARGEST_WINDOW


def without_padding(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFailed(PROTOCOL_ERROR, "the padding is longer than the frame")
    return payload[1 : len(payload) - payload[0]]


def without_priority(flags: int, payload: bytes) -> bytes:
    if not flags & HAS_PRIORITY:
        return payload
    if len(payload) < 5:
        raise ConnectionFailed(FRAME_SIZE_ERROR, "a HEADERS frame without room for its priority")
    return payload[5:]
