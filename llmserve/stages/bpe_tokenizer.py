"""Tokenizer for a Hugging Face `tokenizer.json` (the `tokenizers` library), as used by Qwen and Llama 3."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

from tokenizers import Tokenizer as Library

from llmserve.errors import CheckpointError
from llmserve.stages.files import TextFiles
from llmserve.stages.text import without_incomplete_character
from llmserve.stages.token_bytes import MAX_TOKENS, byte_level_bytes, piece_bytes
from llmserve.stages.token_lengths import longest_json_token

MOST_HELD = 16 * 1024  # characters encoded without releasing the GIL, which `encode_batch_fast` does not release
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class JsonTokenizer:
    memory_per_byte = 240  # see `Tokenizer`; 233 of random letters

    def __init__(self, library: Library, files: TextFiles) -> None:
        library.no_padding()
        library.no_truncation()
        self._library = library
        vocab = library.get_vocab(with_added_tokens=True)  # slow: 90 ms for 152 thousand tokens
        self.vocab_size: int = 1 + max(vocab.values(), default=-1)  # not their number: ids may have gaps
        if self.vocab_size > MAX_TOKENS:
            found = f"{files.path / 'tokenizer.json'} has the token id {self.vocab_size - 1}"
            raise CheckpointError(f"{found}; ids below {MAX_TOKENS} are supported")
        special = files.special_tokens
        self.bos_id = self._id_of(special.get("bos_token"))
        self.eos_id = self._id_of(special.get("eos_token"))
        self.pad_id = self._id_of(special.get("pad_token"))
        self._special_ids = frozenset(t for t, added in library.get_added_tokens_decoder().items() if added.special)
        self._byte_ids = self._byte_fallback_ids(vocab)

    @classmethod
    def load(cls, files: TextFiles) -> JsonTokenizer:
        path = files.path / "tokenizer.json"
        try:
            library = Library.from_file(str(path))
        except Exception as error:  # the library raises bare `Exception` for every kind of bad file
            raise CheckpointError(f"{path} is not a tokenizer file ({error}); copy it again") from error
        return cls(library, files)

    @cached_property
    def longest_token(self) -> int | None:
        return longest_json_token(self._library)

    def encode(self, text: str, add_special_tokens: bool = False, banned: Collection[int] = ()) -> list[int]:
        library = self._without_specials if banned else self._library
        if len(text) > MOST_HELD:
            ids: list[int] = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        else:
            ids = library.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_pair(self, text: str, second: str) -> tuple[list[int], int]:
        """Both texts with the special tokens of a pair; and where the second text's tokens begin, or 0."""
        found = self._library.encode(text, second, add_special_tokens=True)
        return found.ids, found.type_ids.index(1) if 1 in found.type_ids else 0

    def encode_marked(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._library.decode([i for i in ids if i >= 0], skip_special_tokens=skip_special_tokens)
        return text

    def decode_stable(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._byte_ids:
            ids = self._without_byte_run(ids, skip_special_tokens)
        return without_incomplete_character(self.decode(ids, skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        text: str | None = self._library.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        return text.encode() if token in self._added_ids else self._spelled(text)

    def written_bytes(self) -> Sequence[bytes | None]:
        silent = {token for token in range(self.vocab_size) if self._library.id_to_token(token) is None}
        silent |= self._special_ids
        return [None if token in silent else self.token_bytes(token) for token in range(self.vocab_size)]

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._library.get_added_tokens_decoder())

    @cached_property
    def _spelled(self) -> Callable[[str], bytes]:
        return byte_level_bytes if "ByteLevel" in repr(self._library.decoder) else piece_bytes

    @cached_property
    def _without_specials(self) -> Library:
        """A copy that reads the spelling of a special token as ordinary text."""
        twin = copy.deepcopy(self._library)
        twin.encode_special_tokens = True
        return twin

    def _without_byte_run(self, ids: Sequence[int], skip_special_tokens: bool) -> Sequence[int]:
        """Consecutive byte tokens are decoded together, so one bad byte affects all; their text is open."""
        end = len(ids)
        while end and (ids[end - 1] in self._byte_ids or not self._is_visible(ids[end - 1], skip_special_tokens)):
            end -= 1
        return ids[:end]

    def _is_visible(self, token: int, skip_special_tokens: bool) -> bool:
        hidden = token < 0 or (skip_special_tokens and token in self._special_ids)
        return not hidden and self._library.id_to_token(token) is not None

    def _byte_fallback_ids(self, vocab: Mapping[str, int]) -> frozenset[int]:
        if "ByteFallback" not in repr(self._library.decoder):
            return frozenset()
        return frozenset(token for text, token in vocab.items() if BYTE_TOKEN.fullmatch(text))

    def _id_of(self, text: str | None) -> int | None:
        token: int | None = self._library.token_to_id(text) if text else None
        return token
