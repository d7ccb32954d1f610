"""The bytes that a token writes, from the spellings in tokenizer.json and tokenizer.model."""

from __future__ import annotations

import re
from functools import cache

SPACE = "\u2581"  # how sentencepiece spells a space
MAX_TOKENS = 1 << 24  # of a vocabulary; the largest have a quarter of a million
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def piece_bytes(piece: str) -> bytes:
    """For a sentencepiece vocabulary, or one with the same spelling."""
    byte = BYTE.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace(SPACE, " ").encode()


def byte_level_bytes(text: str) -> bytes:
    """For a byte-level vocabulary, such as GPT-2's, with one character per byte."""
    table = _byte_of_character()
    return b"".join(table.get(character, character.encode()) for character in text)


def byte_level_alphabet() -> frozenset[str]:
    return frozenset(_byte_of_character())


@cache
def _byte_of_character() -> dict[str, bytes]:
    """Bytes that are printable in Latin-1 represent themselves; the others follow from character 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): bytes([byte]) for byte in printable}
    return spelled | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}
