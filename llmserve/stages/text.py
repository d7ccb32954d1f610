"""Text at the edges: bytes that must be UTF-8, and incomplete characters."""

from __future__ import annotations

from llmserve.errors import InvalidArgument

REPLACEMENT = "\ufffd"  # replaces bytes that are not (yet) UTF-8 in decoded text
MAX_INCOMPLETE_BYTES = 3  # of a UTF-8 character of four


def text_from_bytes(data: bytes | str, name: str) -> str:
    """Decode a client's bytes, named `name` in errors. Code behind this edge can trust the text."""
    if isinstance(data, str):
        return data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name} is not valid UTF-8 (byte {error.start}: {error.reason})") from error


def is_unicode(text: str) -> bool:
    """Whether `text` can be encoded as UTF-8. Strings from JSON or a command line may not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def without_incomplete_character(text: str) -> str:
    """Drop trailing replacement characters that further bytes may still complete."""
    held = len(text) - len(text.rstrip(REPLACEMENT))
    return text[: len(text) - min(held, MAX_INCOMPLETE_BYTES)]
