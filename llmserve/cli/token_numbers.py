"""Replaces the tokenizer in `llmserve run` for an engine without one: ids are shown as numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llmserve.stages.files import TextFiles
from llmserve.stages.tokenizer import Tokenizer, reads_json, tokenizer_of


def tokenizer_or_numbers(files: TextFiles) -> Tokenizer:
    has_one = reads_json(files) or (files.path / "tokenizer.model").is_file()
    return tokenizer_of(files) if has_one else TokenNumbers(files)


class TokenNumbers:
    """Replaces a `Tokenizer`."""

    vocab_size, longest_token, memory_per_byte = 0, 1, 0
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None

    def __init__(self, files: TextFiles) -> None:
        self._files = files

    def encode(self, text: str, add_special_tokens: bool = False, banned: Collection[int] = ()) -> list[int]:
        """Raises `CheckpointError`."""
        return tokenizer_of(self._files).encode(text)

    def encode_marked(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {token}" for token in ids)

    decode_stable = decode

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def written_bytes(self) -> Sequence[bytes | None]:
        return ()
