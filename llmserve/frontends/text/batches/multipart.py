"""Parses forms with a file, as browsers and OpenAI's clients send them (multipart/form-data)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from llmserve.errors import InvalidArgument

MAX_PARTS = 16
MAX_HEADER_BYTES = 8 * 1024
END = b"--"


@dataclass(frozen=True, slots=True)
class FormPart:
    content: bytes
    filename: str = ""


def read_form(content_type: str, body: bytes) -> Mapping[str, FormPart]:
    """The parts of a form by name. Raises `InvalidArgument`."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise InvalidArgument("send the file as multipart/form-data, with a boundary in Content-Type")
    return dict(_parts(body, b"--" + boundary.encode("latin-1", "replace")))


def _parts(body: bytes, delimiter: bytes) -> Iterator[tuple[str, FormPart]]:
    place = body.find(delimiter)
    for _ in range(MAX_PARTS):
        if place < 0:
            raise InvalidArgument("the form is cut off: its last boundary is missing")
        begin = place + len(delimiter)
        if body[begin : begin + 2] == END:
            return
        place = body.find(b"\r\n" + delimiter, begin)
        split = body.find(b"\r\n\r\n", begin, begin + MAX_HEADER_BYTES)
        if split < 0 or split > place >= 0:
            raise InvalidArgument("a part of the form has no headers")
        headers = HeaderParser().parsestr(body[begin:split].lstrip(b"\r\n").decode("utf-8", "replace"))
        name = headers.get_param("name", header="content-disposition")
        if isinstance(name, str) and place >= 0:
            yield name, FormPart(body[split + 4 : place], headers.get_filename() or "")
        place += 2 if place >= 0 else 0
    raise InvalidArgument(f"the form has more than {MAX_PARTS} parts")
