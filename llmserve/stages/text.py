"""Text at the edges: bytes that must be UTF-8, and characters whose bytes have not all arrived."""

from __future__ import annotations

from llmserve.errors import InvalidArgument

REPLACEMENT = "\ufffd"  # what decoding puts in place of bytes that are not (yet) UTF-8
MAX_INCOMPLETE_BYTES = 3  # of a UTF-8 character of four


def text_from_bytes(data: bytes | str, name: str) -> str:
    """Decode what a client sent as `name`, at the edge: everything behind it may trust the text."""
    if isinstance(data, str):
        return data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name} is not valid UTF-8 (byte {error.start}: {error.reason})") from error


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8. A string from JSON or from a command line need not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def without_incomplete_character(text: str) -> str:
    """Drop trailing replacement characters that further bytes might still turn into a character."""
    held = len(text) - len(text.rstrip(REPLACEMENT))
    return text[: len(text) - min(held, MAX_INCOMPLETE_BYTES)]
