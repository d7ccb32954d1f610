"""A tokenizer for llguidance. It has one more token than the engine, for the end: a bit of each mask says whether an
answer may end, whichever tokens end it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from llmserve.stages.tokenizer import Tokenizer
from llmserve.stages.tool_formats.grammars import special_name
from llmserve.stages.unique_names import QuotedTokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        known = list(tokenizer.written_bytes())[:vocab_size]
        known += [None] * (vocab_size - len(known))
        self.vocab_size = vocab_size
        self.num_mask_bytes = -(-vocab_size // 32) * 4
        num_bits = 32 * -(-(vocab_size + 1) // 32)
        self.nothing = bytes(num_bits // 8)
        self.only_end = (1 << vocab_size).to_bytes(num_bits // 8, "little")
        self.tokenizer = tokenizer
        self.spellings = _Spellings(tokenizer, known)
        self.library = library_tokenizer(self.spellings)
        self.first_twins = _first_twins(tokenizer, known)
        self.known = known

    @cached_property
    def quoted(self) -> QuotedTokens:
        return QuotedTokens(self.known)

    def may_end(self, bits: bytes) -> bool:
        return bool(bits[self.vocab_size // 8] >> self.vocab_size % 8 & 1)

    def says_nothing(self, bits: bytes) -> bool:
        """Whether no token is allowed; the end does not count."""
        return bits in (self.nothing, self.only_end)


def unpacked(bits: bytes) -> NDArray[np.uint8]:
    """One number for each bit."""
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")


class Spellings(Protocol):
    """The interface that llguidance expects of a tokenizer."""

    tokens: list[bytes]


class _Spellings:
    """The engine's own tokenizer. If a guide allows only one text, that text is split into these tokens."""

    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, known: Sequence[bytes | None]) -> None:
        self.eos_token_id = end = len(known)
        self.special_token_ids = [*(token for token, written in enumerate(known) if not written), end]
        self.tokens = [written or name_of(tokenizer, token) for token, written in enumerate(known)] + [b"<|end|>"]
        self._tokenizer = tokenizer
        self._tokens = {written: token for token, written in enumerate(known) if written}
        self._longest = max(map(len, self._tokens), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The tokenizer's own ids, unless they write something else: a leading space, or normalized characters."""
        ids = self._tokenizer.encode(text.decode(errors="ignore"))
        if all(token < self.eos_token_id for token in ids) and b"".join(self.tokens[i] for i in ids) == text:
            return ids
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """Always the longest token that fits, as far as there is one."""
        ids: list[int] = []
        while text:
            fitting = next((length for length in range(self._longest, 0, -1) if text[:length] in self._tokens), 0)
            if not fitting:
                break
            ids.append(self._tokens[text[:fitting]])
            text = text[fitting:]
        return ids


def name_of(tokenizer: Tokenizer, token: int) -> bytes:
    """The name by which grammars refer to a token that writes nothing."""
    spelling = tokenizer.token_bytes(token).decode(errors="replace") if token < tokenizer.vocab_size else ""
    return special_name(spelling).encode() if spelling else b"<|%d|>" % token


def library_tokenizer(spellings: Spellings) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(spellings), n_vocab=len(spellings.tokens))


def _first_twins(tokenizer: Tokenizer, known: Sequence[bytes | None]) -> dict[int, int]:
    """If a leading space of a text is dropped: maps each token with one to the token that writes the same there, -1 if
    none. Empty if it is not dropped."""
    spaced = {token: written for token, written in enumerate(known) if written and written.startswith(b" ")}
    if not any(tokenizer.decode([token])[:1] != " " for token in list(spaced)[:8]):
        return {}
    plain = {written: token for token, written in enumerate(known) if written}
    return {token: plain.get(written[1:], -1) for token, written in spaced.items()}


def first_bits(bits: bytes, vocabulary: Vocabulary) -> bytes:
    """`bits` for the first token: a token whose space is dropped is allowed if its twin is."""
    if not vocabulary.first_twins:
        return bits
    allowed = unpacked(bits)
    before = allowed.copy()
    for token, twin in vocabulary.first_twins.items():
        allowed[token] = before[twin] if twin >= 0 else 0
    return np.packbits(allowed, bitorder="little").tobytes()
