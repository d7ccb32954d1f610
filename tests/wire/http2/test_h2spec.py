"""The cases of h2spec 2 (github.com/summerwind/h2spec), by its numbers, asked by a client of our own.

h2spec is written for RFC 7540 and for servers of pages; `DIFFERENT` says where we do something else, and why.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pytest
from hpack import Encoder

from llmserve.wire.http2 import frames
from llmserve.wire.http2.connection import MAX_CALLS
from llmserve.wire.http2.frames import frame
from llmserve.wire.http2.messages import framed
from llmserve.wire.http2.reader import MAX_FRAME
from tests.frontends.server import RunningServer
from tests.wire.http2.raw_client import SERVICE, RawClient
from tests.wire.http2.test_connection import OK, READY, still_works

Data: TypeAlias = bytes | Callable[[RawClient], bytes]
END, WHOLE = frames.END_STREAM, frames.END_HEADERS
HEADERS, DATA, CONTINUATION, PRIORITY = frames.HEADERS, frames.DATA, frames.CONTINUATION, frames.PRIORITY
LAST = 101  # a stream that no case has
FIELDS = {":method": "POST", ":scheme": "http", ":path": f"{SERVICE}ServerReady", ":authority": "x"}
MORE = {"content-type": "application/grpc", "te": "trailers"}
STATIC_POST, STATIC_HTTP, LITERAL = b"\x83", b"\x86", b"\x00"
CHANGED = frames.settings({frames.INITIAL_WINDOW_SIZE: 1})


@dataclass(frozen=True)
class Works:
    """It is answered, or ignored: a call afterwards is answered. `stream`: so is the one that was made."""

    stream: int = 0


@dataclass(frozen=True)
class Ends:
    """The connection is closed with this code."""

    code: int


@dataclass(frozen=True)
class Resets:
    """The stream is; the connection goes on."""

    code: int
    stream: int = 1


@dataclass(frozen=True)
class Case:
    number: str
    title: str
    data: Data
    outcome: Works | Ends | Resets


def block(client: RawClient, fields: Sequence[tuple[str, str]] = ()) -> bytes:
    return bytes(client.encoder.encode(list(fields) or [*FIELDS.items(), *MORE.items()]))


def opens(flags: int = 0, stream: int = 1, before: bytes = b"", after: bytes = b"") -> Callable[[RawClient], bytes]:
    """HEADERS of a call, in a frame with these flags."""
    return lambda client: frame(HEADERS, WHOLE | flags, stream, before + block(client) + after)


def then(first: Data, *rest: Data) -> Callable[[RawClient], bytes]:
    return lambda client: b"".join(part(client) if callable(part) else part for part in (first, *rest))


def message(stream: int = 1, flags: int = END) -> bytes:
    return frame(DATA, flags, stream, framed(READY))


def split(*cuts: int, flags: int = WHOLE, between: bytes = b"") -> Callable[[RawClient], bytes]:
    """A header block in HEADERS and CONTINUATION; the last of these has `flags`."""

    def data(client: RawClient) -> bytes:
        whole = block(client)
        pieces = [whole[a:b] for a, b in zip((0, *cuts), (*cuts, len(whole)), strict=True)]
        middle = [frame(CONTINUATION, 0, 1, piece) for piece in pieces[1:-1]]
        return b"".join([frame(HEADERS, 0, 1, pieces[0]), between, *middle, frame(CONTINUATION, flags, 1, pieces[-1])])

    return data


def request(
    *more: tuple[str, str], without: str = "", first: Mapping[str, str] | None = None
) -> Callable[[RawClient], bytes]:
    """HEADERS with other fields; `first` goes before the regular ones."""

    def data(client: RawClient) -> bytes:
        fields = [(name, value) for name, value in {**FIELDS, **(first or {})}.items() if name != without]
        return frame(HEADERS, WHOLE | END, 1, block(client, [*fields, *MORE.items(), *more]))

    return data


def raw(*representations: bytes) -> bytes:
    """HEADERS of these representations, behind a method and a scheme."""
    return frame(HEADERS, WHOLE, 1, STATIC_POST + STATIC_HTTP + b"".join(representations))


def doubled(name: str) -> Callable[[RawClient], bytes]:
    fields = [*FIELDS.items(), (name, FIELDS[name]), *MORE.items()]
    return lambda client: frame(HEADERS, WHOLE | END, 1, block(client, fields))


def sized(size: int) -> Callable[[RawClient], bytes]:
    """A call whose length says `size`, and that has another."""
    fields = [*FIELDS.items(), *MORE.items(), ("content-length", str(size))]
    return lambda client: frame(HEADERS, WHOLE, 1, block(client, fields))


def indexed(prefix: int, name: int, value: bytes) -> Callable[[RawClient], bytes]:
    """A literal field with the name at a place of the static table, or with a new one (0), behind a whole request."""
    named = bytes((prefix | name,)) if name else bytes((prefix,)) + b"\x01x"
    return then(opens(after=named + value), message())


PLAIN, HUFFMAN = b"\x01y", b"\x81\xf5"  # "y"; and in Huffman's code
PRIORITIES = {
    "1": b"\0\0\0\0\0",
    "256": b"\0\0\0\0\xff",
    "of a stream": b"\0\0\0\x07\x10",
    "exclusive": b"\x80\0\0\x07\x10",
}
CLOSED = then(opens(), message())
PROTOCOL, CLOSED_CODE = frames.PROTOCOL_ERROR, frames.STREAM_CLOSED
SIZE, COMPRESSION, FLOW = frames.FRAME_SIZE_ERROR, frames.COMPRESSION_ERROR, frames.FLOW_CONTROL_ERROR
UPDATE_OF_NOTHING = frames.window_update(1, 0)
MAX_WINDOW = 2**31 - 1


def generic() -> Iterator[Case]:
    unary = then(opens(), message())
    yield Case("generic/1/1", "a client connection preface", b"", Works())
    yield Case("generic/2/1", "PRIORITY on an idle stream", frame(PRIORITY, 0, 1, bytes(5)), Works())
    yield Case(
        "generic/2/2", "WINDOW_UPDATE on a half-closed stream", then(unary, frames.window_update(1, 1)), Works(1)
    )
    yield Case(
        "generic/2/3", "PRIORITY on a half-closed stream", then(unary, frame(PRIORITY, 0, 1, bytes(5))), Works(1)
    )
    yield Case("generic/2/4", "RST_STREAM on a half-closed stream", then(unary, frames.reset(1, 8)), Works())
    yield Case(
        "generic/2/5",
        "PRIORITY on a closed stream",
        then(unary, frames.reset(1, 8), frame(PRIORITY, 0, 1, bytes(5))),
        Works(),
    )
    halves = framed(READY)[:2], framed(READY)[2:]
    yield Case("generic/3.1/1", "DATA", unary, Works(1))
    yield Case(
        "generic/3.1/2",
        "several DATA",
        then(opens(), frame(DATA, 0, 1, halves[0]), frame(DATA, END, 1, halves[1])),
        Works(1),
    )
    padded = frame(DATA, END | frames.PADDED, 1, b"\x03" + framed(READY) + bytes(3))
    yield Case("generic/3.1/3", "DATA with padding", then(opens(), padded), Works(1))
    yield Case("generic/3.2/1", "HEADERS", unary, Works(1))
    yield Case(
        "generic/3.2/2",
        "HEADERS with padding",
        then(opens(frames.PADDED, before=b"\x02", after=bytes(2)), message()),
        Works(1),
    )
    yield Case(
        "generic/3.2/3", "HEADERS with priority", then(opens(frames.HAS_PRIORITY, before=bytes(5)), message()), Works(1)
    )
    for number, (kind, priority) in enumerate(PRIORITIES.items(), 1):
        yield Case(f"generic/3.3/{number}", f"PRIORITY, {kind}", then(frame(PRIORITY, 0, 1, priority), unary), Works(1))
    yield Case(
        "generic/3.3/5",
        "PRIORITY for an idle stream, HEADERS for a lower one",
        then(frame(PRIORITY, 0, 7, bytes(5)), unary),
        Works(1),
    )
    yield Case("generic/3.4/1", "RST_STREAM", then(opens(), frames.reset(1, 8)), Works())
    yield Case("generic/3.5/1", "SETTINGS", frames.settings({3: 100}), Works())
    yield Case("generic/3.7/1", "PING", frame(frames.PING, 0, 0, bytes(8)), Works())
    yield Case("generic/3.8/1", "GOAWAY", frame(frames.GOAWAY, 0, 0, bytes(8)), Works())
    yield Case("generic/3.9/1", "WINDOW_UPDATE of the connection", frames.window_update(0, 1), Works())
    yield Case(
        "generic/3.9/2", "WINDOW_UPDATE of a stream", then(opens(), frames.window_update(1, 1), message()), Works(1)
    )
    yield Case("generic/3.10/1", "CONTINUATION", then(split(4), message()), Works(1))
    yield Case("generic/3.10/2", "several CONTINUATION", then(split(4, 6), message()), Works(1))
    yield Case("generic/4/1", "GET", request(first={":method": "GET"}), Works())
    yield Case("generic/4/2", "HEAD", request(first={":method": "HEAD"}), Works())
    yield Case("generic/4/3", "POST", unary, Works(1))
    ended = lambda client: frame(HEADERS, WHOLE | END, 1, block(client, [("x-sum", "1")]))  # noqa: E731
    yield Case("generic/4/4", "POST with trailers", then(opens(), message(flags=0), ended), Works(1))
    yield Case("generic/5/1", "an indexed field", then(opens(after=b"\x90"), message()), Works(1))
    number = 2
    for kind, prefix in (("with incremental indexing", 0x40), ("without indexing", 0x00), ("never indexed", 0x10)):
        for name, place in (("an indexed name", 4 if prefix == 0x40 else 0x0F), ("a new name", 0)):
            for code, value in (("plain", PLAIN), ("in Huffman's code", HUFFMAN)):
                named = value if place != 0x0F else b"\x00" + value  # accept-charset, 15: four bits, and none above
                yield Case(
                    f"generic/5/{number}", f"a field {kind}, {name}, {code}", _literal(prefix, place, named), Works(1)
                )
                number += 1
    yield Case("generic/5/14", "a table size update", then(opens(before=b"\x3f\x61"), message()), Works(1))
    yield Case("generic/5/15", "several table size updates", then(opens(before=b"\x20\x3f\x61"), message()), Works(1))


def _literal(prefix: int, place: int, value: bytes) -> Callable[[RawClient], bytes]:
    if place == 4:  # :path is not what may come again
        place = 15  # accept-charset
    return indexed(prefix, place, value)


def connections() -> Iterator[Case]:
    big = frame(DATA, END, 1, framed(bytes(2**14 - 5)))
    yield Case("http2/3.5/1", "a client connection preface", b"", Works())
    yield Case("http2/4.1/1", "a frame of unknown type", frame(0xFF, 0, 0, bytes(8)), Works())
    yield Case("http2/4.1/2", "an undefined flag", frame(frames.PING, 0xFE, 0, bytes(8)), Works())
    yield Case(
        "http2/4.1/3", "the reserved bit", struct.pack(">HBBBI", 0, 8, frames.PING, 0, 1 << 31) + bytes(8), Works()
    )
    yield Case("http2/4.2/1", "DATA of 2^14 octets", then(opens(), big), Works())
    yield Case("http2/4.2/2", "DATA over SETTINGS_MAX_FRAME_SIZE", then(opens(), _longer(DATA)), Ends(SIZE))
    yield Case("http2/4.2/3", "HEADERS over SETTINGS_MAX_FRAME_SIZE", _longer(HEADERS), Ends(SIZE))
    yield Case("http2/4.3/1", "an invalid header block", raw(b"\x40"), Ends(COMPRESSION))
    yield Case(
        "http2/4.3/2", "PRIORITY among header blocks", split(4, between=frame(PRIORITY, 0, 1, bytes(5))), Ends(PROTOCOL)
    )
    yield Case("http2/4.3/3", "HEADERS of another stream among header blocks", split(4, between=raw()), Ends(PROTOCOL))
    yield Case("http2/5.1/1", "idle: DATA", message(), Ends(PROTOCOL))
    yield Case("http2/5.1/2", "idle: RST_STREAM", frames.reset(1, 8), Ends(PROTOCOL))
    yield Case("http2/5.1/3", "idle: WINDOW_UPDATE", frames.window_update(1, 100), Ends(PROTOCOL))
    yield Case("http2/5.1/4", "idle: CONTINUATION", frame(CONTINUATION, WHOLE, 1, b""), Ends(PROTOCOL))
    slow = then(opens(END, 1), b"")
    for number, (kind, late) in enumerate(_late(), 5):
        yield Case(f"http2/5.1/{number}", f"half-closed: {kind}", then(CLOSED, late), _after_the_end(kind))
    for number, (kind, late) in enumerate(_late(), 8):
        outcome: Works | Ends = Ends(PROTOCOL) if kind == "CONTINUATION" else Works()
        yield Case(f"http2/5.1/{number}", f"reset: {kind}", then(opens(), frames.reset(1, 8), late), outcome)
    for number, (kind, late) in enumerate(_late(), 11):
        outcome = Ends(PROTOCOL) if kind == "CONTINUATION" else Works()
        yield Case(f"http2/5.1/{number}", f"closed: {kind}", then(slow, late), outcome)
    yield Case("http2/5.1.1/1", "an even number", opens(stream=2), Ends(PROTOCOL))
    yield Case("http2/5.1.1/2", "a smaller number", then(opens(stream=5), message(5), opens(stream=3)), Works())
    many = then(
        opens(stream=1), *(opens(stream=stream) for stream in range(3, 2 * MAX_CALLS + 3, 2)), frames.reset(1, 8)
    )
    yield Case("http2/5.1.2/1", "more calls than allowed", many, Resets(frames.REFUSED_STREAM, 2 * MAX_CALLS + 1))
    yield Case(
        "http2/5.3.1/1",
        "HEADERS that depend on themselves",
        then(opens(frames.HAS_PRIORITY, before=b"\0\0\0\1\0"), message()),
        Works(1),
    )
    yield Case("http2/5.3.1/2", "PRIORITY that depends on itself", frame(PRIORITY, 0, 1, b"\0\0\0\1\0"), Works())
    yield Case(
        "http2/5.4.1/1", "an invalid PING closes the connection", frame(frames.PING, 0, 3, bytes(8)), Ends(PROTOCOL)
    )
    yield Case("http2/5.4.1/2", "an invalid PING is told in GOAWAY", frame(frames.PING, 0, 3, bytes(8)), Ends(PROTOCOL))
    yield Case("http2/5.5/1", "an unknown extension frame", frame(0x20, 0, 0, bytes(4)), Works())
    yield Case("http2/5.5/2", "one in a header block", split(4, between=frame(0x20, 0, 1, bytes(4))), Ends(PROTOCOL))


def _longer(kind: int) -> bytes:
    return (MAX_FRAME + 1).to_bytes(3, "big") + bytes((kind, 0)) + (1).to_bytes(4, "big")


def _late() -> Iterator[tuple[str, Data]]:
    yield "DATA", frame(DATA, END, 1, b"x")
    yield "HEADERS", opens(END)
    yield "CONTINUATION", frame(CONTINUATION, WHOLE, 1, b"\x90")


def _after_the_end(kind: str) -> Works | Ends:
    return Ends(PROTOCOL) if kind == "CONTINUATION" else Ends(CLOSED_CODE)


def definitions() -> Iterator[Case]:
    yield Case("http2/6.1/1", "DATA on stream 0", message(0), Ends(PROTOCOL))
    yield Case("http2/6.1/2", "DATA on a stream that is not open", message(3), Ends(PROTOCOL))
    yield Case(
        "http2/6.1/3",
        "DATA with too much padding",
        then(opens(), frame(DATA, frames.PADDED, 1, b"\x09abc")),
        Ends(PROTOCOL),
    )
    yield Case(
        "http2/6.2/1",
        "HEADERS without END_HEADERS, and PRIORITY",
        split(4, between=frame(PRIORITY, 0, 1, bytes(5))),
        Ends(PROTOCOL),
    )
    yield Case(
        "http2/6.2/2",
        "HEADERS without END_HEADERS, and those of another stream",
        split(4, between=raw()),
        Ends(PROTOCOL),
    )
    yield Case("http2/6.2/3", "HEADERS on stream 0", opens(stream=0), Ends(PROTOCOL))
    yield Case(
        "http2/6.2/4",
        "HEADERS with too much padding",
        frame(HEADERS, WHOLE | frames.PADDED, 1, b"\xff\x83"),
        Ends(PROTOCOL),
    )
    yield Case("http2/6.3/1", "PRIORITY on stream 0", frame(PRIORITY, 0, 0, bytes(5)), Ends(PROTOCOL))
    yield Case("http2/6.3/2", "PRIORITY of another length", frame(PRIORITY, 0, 1, bytes(4)), Ends(SIZE))
    yield Case("http2/6.4/1", "RST_STREAM on stream 0", frames.reset(0, 8), Ends(PROTOCOL))
    yield Case("http2/6.4/2", "RST_STREAM on an idle stream", frames.reset(1, 8), Ends(PROTOCOL))
    yield Case(
        "http2/6.4/3",
        "RST_STREAM of another length",
        then(opens(), frame(frames.RST_STREAM, 0, 1, bytes(3))),
        Ends(SIZE),
    )
    yield Case(
        "http2/6.5/1", "SETTINGS: ACK with a payload", frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), Ends(SIZE)
    )
    yield Case("http2/6.5/2", "SETTINGS on a stream", frame(frames.SETTINGS, 0, 1, b""), Ends(PROTOCOL))
    yield Case("http2/6.5/3", "SETTINGS of another length", frame(frames.SETTINGS, 0, 0, bytes(3)), Ends(SIZE))
    yield Case("http2/6.5.2/1", "ENABLE_PUSH", frames.settings({frames.ENABLE_PUSH: 2}), Ends(PROTOCOL))
    yield Case(
        "http2/6.5.2/2",
        "INITIAL_WINDOW_SIZE too large",
        frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}),
        Ends(FLOW),
    )
    yield Case(
        "http2/6.5.2/3", "MAX_FRAME_SIZE too small", frames.settings({frames.MAX_FRAME_SIZE: 2**14 - 1}), Ends(PROTOCOL)
    )
    yield Case(
        "http2/6.5.2/4", "MAX_FRAME_SIZE too large", frames.settings({frames.MAX_FRAME_SIZE: 2**24}), Ends(PROTOCOL)
    )
    yield Case("http2/6.5.2/5", "an unknown setting", frames.settings({0xFF: 1}), Works())
    twice = frame(frames.SETTINGS, 0, 0, struct.pack(">HLHL", 4, 100, 4, 65535))
    yield Case("http2/6.5.3/1", "a setting twice", then(twice, CLOSED), Works(1))
    yield Case("http2/6.5.3/2", "SETTINGS without ACK", frames.settings({}), Works())
    yield Case("http2/6.7/1", "PING", frame(frames.PING, 0, 0, b"h2spec\0\0"), Works())
    yield Case("http2/6.7/2", "PING with ACK", frame(frames.PING, frames.ACK, 0, bytes(8)), Works())
    yield Case("http2/6.7/3", "PING on a stream", frame(frames.PING, 0, 1, bytes(8)), Ends(PROTOCOL))
    yield Case("http2/6.7/4", "PING of another length", frame(frames.PING, 0, 0, bytes(6)), Ends(SIZE))
    yield Case("http2/6.8/1", "GOAWAY on a stream", frame(frames.GOAWAY, 0, 1, bytes(8)), Ends(PROTOCOL))
    yield Case("http2/6.9/1", "WINDOW_UPDATE by nothing", frames.window_update(0, 0), Ends(PROTOCOL))
    yield Case("http2/6.9/2", "WINDOW_UPDATE of a stream by nothing", then(opens(), UPDATE_OF_NOTHING), Ends(PROTOCOL))
    yield Case(
        "http2/6.9/3", "WINDOW_UPDATE of another length", frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), Ends(SIZE)
    )
    open_again = frames.window_update(1, 1000)
    yield Case(
        "http2/6.9.1/1",
        "a window of one octet",
        then(CHANGED, CLOSED, open_again, frames.settings({4: 65535})),
        Works(1),
    )
    yield Case(
        "http2/6.9.1/2", "a connection's window over its limit", frames.window_update(0, MAX_WINDOW) * 2, Ends(FLOW)
    )
    yield Case(
        "http2/6.9.1/3",
        "a stream's window over its limit",
        then(opens(), frames.window_update(1, MAX_WINDOW) * 2),
        Ends(FLOW),
    )
    yield Case(
        "http2/6.9.2/1",
        "INITIAL_WINDOW_SIZE changed after HEADERS",
        then(opens(), CHANGED, message(), open_again, frames.settings({4: 65535})),
        Works(1),
    )
    shrunk = frames.settings({4: 3}), frames.settings({4: 2}), open_again, frames.settings({4: 65535})
    yield Case("http2/6.9.2/2", "a window below nothing", then(shrunk[0], opens(), message(), *shrunk[1:]), Works(1))
    yield Case("http2/6.9.2/3", "INITIAL_WINDOW_SIZE over its limit", frames.settings({4: 2**31}), Ends(FLOW))
    yield Case("http2/6.10/1", "several CONTINUATION", then(split(4, 6), message()), Works(1))
    yield Case("http2/6.10/2", "another frame behind CONTINUATION", split(4, 6, between=message()), Ends(PROTOCOL))
    yield Case(
        "http2/6.10/3",
        "CONTINUATION on stream 0",
        then(frame(HEADERS, 0, 1, b"\x83"), frame(CONTINUATION, WHOLE, 0, b"")),
        Ends(PROTOCOL),
    )
    yield Case(
        "http2/6.10/4",
        "CONTINUATION behind END_HEADERS",
        then(opens(), frame(CONTINUATION, WHOLE, 1, b"\x90")),
        Ends(PROTOCOL),
    )
    yield Case(
        "http2/6.10/5",
        "CONTINUATION behind the last one",
        then(split(4), frame(CONTINUATION, WHOLE, 1, b"\x90")),
        Ends(PROTOCOL),
    )
    yield Case(
        "http2/6.10/6",
        "CONTINUATION behind DATA",
        then(opens(), message(flags=0), frame(CONTINUATION, WHOLE, 1, b"\x90")),
        Ends(PROTOCOL),
    )
    yield Case(
        "http2/7/1", "GOAWAY with an unknown code", frame(frames.GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff"), Works()
    )
    yield Case("http2/7/2", "RST_STREAM with an unknown code", then(opens(), frames.reset(1, 0xFF)), Works())


def exchanges() -> Iterator[Case]:
    yield Case("http2/8.1/1", "HEADERS again without END_STREAM", then(opens(), opens()), Resets(PROTOCOL))
    yield Case("http2/8.1.2/1", "an upper-case name", request(("X-TEST", "ok")), Resets(PROTOCOL))
    yield Case("http2/8.1.2.1/1", "an unknown pseudo-header", request(first={":test": "ok"}), Resets(PROTOCOL))
    yield Case("http2/8.1.2.1/2", "a response's pseudo-header", request(first={":status": "200"}), Resets(PROTOCOL))
    late = lambda client: frame(HEADERS, WHOLE | END, 1, block(client, [(":method", "200")]))  # noqa: E731
    yield Case("http2/8.1.2.1/3", "a pseudo-header as a trailer", then(opens(), message(flags=0), late), Works())
    yield Case(
        "http2/8.1.2.1/4",
        "a pseudo-header behind regular ones",
        request((":authority", "x"), without=":authority"),
        Resets(PROTOCOL),
    )
    yield Case("http2/8.1.2.2/1", "a header of connections", request(("connection", "keep-alive")), Resets(PROTOCOL))
    yield Case("http2/8.1.2.2/2", "TE other than trailers", request(("te", "trailers, deflate")), Resets(PROTOCOL))
    yield Case("http2/8.1.2.3/1", "an empty :path", request(first={":path": ""}), Resets(PROTOCOL))
    for number, name in enumerate((":method", ":scheme", ":path"), 2):
        yield Case(f"http2/8.1.2.3/{number}", f"no {name}", request(without=name), Resets(PROTOCOL))
    for number, name in enumerate((":method", ":scheme", ":path"), 5):
        yield Case(f"http2/8.1.2.3/{number}", f"{name} twice", doubled(name), Resets(PROTOCOL))
    yield Case("http2/8.1.2.6/1", "a content-length that is not that of DATA", then(sized(1), message()), Works(1))
    parts = frame(DATA, 0, 1, framed(READY)[:2]), frame(DATA, END, 1, framed(READY)[2:])
    yield Case("http2/8.1.2.6/2", "nor that of several DATA", then(sized(1), *parts), Works(1))
    yield Case("http2/8.2/1", "PUSH_PROMISE", frame(frames.PUSH_PROMISE, WHOLE, 1, bytes(4)), Ends(PROTOCOL))


def hpack() -> Iterator[Case]:
    yield Case("hpack/2.3.3/1", "an index that is in no table", raw(b"\xc6"), Ends(COMPRESSION))
    yield Case("hpack/2.3.3/2", "a name that is in no table", raw(b"\x7f\x07\x01y"), Ends(COMPRESSION))
    yield Case("hpack/4.2/1", "a table size update at the end of a block", opens(after=b"\x20"), Ends(COMPRESSION))
    yield Case(
        "hpack/5.2/1", "Huffman's code, padded by more than 7 bits", raw(b"\x00\x01x\x82\xf5\xff"), Ends(COMPRESSION)
    )
    yield Case("hpack/5.2/2", "Huffman's code, padded by zeros", raw(b"\x00\x01x\x81\xf4"), Ends(COMPRESSION))
    yield Case(
        "hpack/5.2/3",
        "Huffman's code with the end of strings",
        raw(b"\x00\x01x\x84\xff\xff\xff\xff"),
        Ends(COMPRESSION),
    )
    yield Case("hpack/6.1/1", "index 0", raw(b"\x80"), Ends(COMPRESSION))
    yield Case("hpack/6.3/1", "a table larger than the setting", opens(before=b"\x3f\xe2\x1f"), Ends(COMPRESSION))


CASES = [*generic(), *connections(), *definitions(), *exchanges(), *hpack()]
LATE = "what is on its way to a call that has ended here is no error, and ended calls are not remembered"
DIFFERENT = {
    "http2/5.1/8": LATE,
    "http2/5.1/9": LATE,
    "http2/5.1/11": LATE,
    "http2/5.1/12": LATE,
    "http2/5.1.1/2": LATE,
    "http2/5.3.1/1": "RFC 9113 has no dependencies any more: what they say is not read",
    "http2/5.3.1/2": "RFC 9113 has no dependencies any more: what they say is not read",
    "http2/8.1.2.1/3": "trailers are not read: they mean the end, whatever is in them",
    "http2/8.1.2.6/1": "a message says its own length; content-length is not read",
    "http2/8.1.2.6/2": "a message says its own length; content-length is not read",
}


@pytest.fixture
def client(server: RunningServer) -> Iterator[RawClient]:
    made = RawClient(server.grpc_port)
    yield made
    made.socket.close()


@pytest.mark.parametrize("case", CASES, ids=[f"{case.number} {case.title}" for case in CASES])
def test_case(server: RunningServer, client: RawClient, case: Case) -> None:
    client.send(case.data(client) if callable(case.data) else case.data)
    if isinstance(case.outcome, Ends):
        assert client.goaway() == case.outcome.code
        assert still_works(server)
        return
    if isinstance(case.outcome, Resets):
        assert client.reset(case.outcome.stream) == case.outcome.code
    elif case.outcome.stream:
        assert client.status(case.outcome.stream) == OK
    last = max(LAST, case.outcome.stream + 2)  # of the call that follows
    fields = [(name, value, True) for name, value in {**FIELDS, **MORE}.items()]  # into no table, nor from one
    client.send(frame(HEADERS, WHOLE, last, Encoder().encode(fields)) + message(last))
    assert client.status(last) == OK


def test_section_3_5_a_preface_that_is_none(server: RunningServer) -> None:
    """http2/3.5/2."""
    client = RawClient(server.grpc_port, preface=b"INVALID CONNECTION PREFACE\r\n\r\n")
    assert client.goaway() == PROTOCOL
    client.socket.close()


def test_all_cases_are_there() -> None:
    """None twice, and http2/3.5/2 above."""
    numbers = Counter(case.number for case in CASES)
    assert max(numbers.values()) == 1
    assert Counter(number.split("/")[0] for number in numbers) == {"generic": 44, "http2": 94, "hpack": 8}


def test_what_is_different_is_ignored_here_and_has_a_case() -> None:
    """The connection goes on, and so do other calls on it."""
    outcomes = {case.number: case.outcome for case in CASES}
    assert {number for number in DIFFERENT if not isinstance(outcomes[number], Works)} == set()
