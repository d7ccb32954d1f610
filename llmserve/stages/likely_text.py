"""Predicts the text that follows under a guide: forced text, with white space as in the answer so far.

JSON allows white space around each of its signs, so a schema forces few tokens. But after the white space, there is
usually one continuation, and white space repeats its patterns. The result is a guess, which speculative decoding
verifies. It comes from a matcher of the same grammar over single bytes, whose masks take microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from llmserve.stages.guide_vocabulary import Vocabulary, library_tokenizer, name_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_BYTES = 96  # maximum length of a guess
MAX_S = 0.005  # of work per guess, because steps wait for it
MAX_PLACES = 256  # that are remembered
MOST_SIGNS = 32  # most white space between the tokens of JSON; text may have more
MAX_TEXT = 32  # bytes, before a text is looked at again
QUOTE = ord('"')
SPACES = b" \t\n\r"
OPENING, CLOSING = b"{[", b"}]"
SIGNS = b"{}[],:"
ALL_BYTES, SPACE_BITS = (1 << 256) - 1, sum(1 << byte for byte in SPACES)
NOT_A_BYTE = b"\xff"  # starts a forced special token
LINES = (b"{", b",", b"}")  # after an opening bracket, a comma, and before a closing bracket
USUAL = {b":": b" ", b",": b" "}  # white space after them, by default


class Place(NamedTuple):
    """A place where white space may be."""

    kind: bytes
    level: int  # depth: the number of open brackets


class WhiteSpaces:
    """The recent white space of an answer."""

    def __init__(self, others: dict[Place, bytes]) -> None:
        """`others`: white space of all answers under the guide, which this one may resemble."""
        self._at: dict[Place, bytes] = {}
        self._others = others
        self._is_alike = True  # it has matched the others so far

    def learn(self, place: Place, spaces: bytes) -> None:
        if place not in self._at:
            self._is_alike = self._others.get(place, spaces) == spaces
        for at in (self._at, self._others):
            if len(at) >= MAX_PLACES:
                at.clear()
            at[place] = spaces

    def guess(self, place: Place) -> bytes:
        """As at this place, or where another line of this level begins, or as in other answers; else deduced."""
        at, is_line = self._at, place.kind in LINES
        lines = {other.level: spaces for other, spaces in at.items() if spaces[:1] == b"\n"} if is_line else {}
        found = at.get(place, lines.get(place.level))
        if found is None and self._is_alike:
            found = self._others.get(place)
        if found is None and lines:
            level, spaces = max(lines.items())
            found = b"\n" + spaces[-1:] * ((len(spaces) - 1) * place.level // max(1, level))
        if found is None:  # as after the same sign elsewhere
            alike = (spaces for other, spaces in at.items() if other.kind[:1] == place.kind[:1])
            found = next(alike, USUAL.get(place.kind[:1], b""))
        return found


class ByteVocabulary:
    """A tokenizer for llguidance: single bytes, followed by the special tokens that grammars name."""

    bos_token_id: int | None = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.written = vocabulary.known
        self.spelled = lru_cache(maxsize=1024)(vocabulary.spellings)  # text that a schema forces is in every answer
        self.special_ids = [token for token, written in enumerate(vocabulary.known) if not written]
        self.bytes_ids = {token: 256 + index for index, token in enumerate(self.special_ids)}
        self.eos_token_id = 256 + len(self.special_ids)
        self.special_token_ids = list(range(256, self.eos_token_id + 1))
        names = (name_of(vocabulary.tokenizer, token) for token in self.special_ids)
        self.tokens = [*(bytes([byte]) for byte in range(256)), *names, b"<|end|>"]
        self.library = library_tokenizer(self)
        self.joined = {written[:2] for written in vocabulary.known if written and written[0] in SPACES}

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class _Cursor:
    """A position in an answer. The matcher only reads bytes when it is queried."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.run = b""  # white space that ends here
        self._matcher = matcher
        self._untold: list[int] = []
        self._before = 0  # the byte before it
        self._level = 0
        self._is_between = False  # place of the run: between tokens of JSON, or similar
        self._num_text = 0  # bytes that count as text after one that did: at most until a quote
        self._allowed: int | None = None  # not read yet

    @property
    def matcher(self) -> LLMatcher:
        if self._untold:
            self._matcher.consume_tokens(self._untold)
            self._untold = []
        return self._matcher

    @property
    def is_in_text(self) -> bool:
        return self._num_text > 0

    def copy(self) -> _Cursor:
        copy = _Cursor(self.matcher.deep_copy())
        copy.run, copy._before, copy._level, copy._is_between = self.run, self._before, self._level, self._is_between
        copy._num_text, copy._allowed = self._num_text, self._allowed
        return copy

    def allowed(self) -> int:
        """A bit for each byte, special token, and the end."""
        if self._allowed is None:
            self._allowed = int.from_bytes(self.matcher.compute_bitmask(), "little")
        return self._allowed

    def is_between(self) -> bool:
        """Whether few bytes are allowed here. If many are, they may also follow the next ones."""
        found = (self.allowed() & ALL_BYTES & ~SPACE_BITS).bit_count() <= MOST_SIGNS
        self._num_text = 0 if found else MAX_TEXT
        return found

    def consume(self, code: int) -> None:
        """A byte, or a special token."""
        self._untold.append(code)
        self._allowed = None

    def take(self, byte: int, *, is_between: bool = False) -> tuple[Place, bytes] | None:
        """Returns the white space before it and its place, if white space is allowed. `is_between`: if known."""
        is_sign = byte in SIGNS or self._before in b"{[,:"
        if not self.run:
            may_be = (byte in SPACES or is_sign) and not self._num_text
            self._is_between = may_be and (is_between or self.is_between())
        self._num_text = 0 if byte == QUOTE else max(0, self._num_text - 1)
        self.consume(byte)
        if byte in SPACES:
            self.run += bytes((byte,))
            return None
        found = (self.place(byte), self.run) if self._is_between and byte not in b",:" else None
        if self._is_between:
            self._level += (byte in OPENING) - (byte in CLOSING)
        self._before, self.run = byte, b""
        return found

    def place(self, byte: int) -> Place:
        """The place of white space before this byte."""
        before = self._before
        if byte in CLOSING:
            return Place(b"}", self._level - 1)
        if before in b"{[,":
            return Place(b"," if before == ord(",") else b"{", self._level)
        return Place(bytes((before, byte)), 0)


class LikelyText:
    """For one answer. It follows the answer itself, and its last guess of a continuation."""

    def __init__(self, matcher: LLMatcher, vocabulary: ByteVocabulary, spaces: WhiteSpaces) -> None:
        self._cursor = _Cursor(matcher)
        self._vocabulary = vocabulary
        self._spaces = spaces
        self._guess: list[int] = []  # tokens of the answer after the cursor that are not certain
        self._behind: _Cursor | None = None  # the guess, if these tokens write all of it
        self._learned: list[tuple[Place, bytes]] = []  # from the guess, if it comes true
        self._new: list[int] = []  # tokens that have come behind the cursor

    def after(self, token_ids: Iterable[int]) -> Sequence[int] | None:
        """The likely text after these tokens, which continue the previous ones. None: it takes too long."""
        deadline = time.thread_time() + MAX_S
        new, guess = self._new, self._guess
        new += token_ids
        if len(new) < len(guess) and guess[: len(new)] == new:
            return guess[len(new) :]
        self._take()
        self._guess_on(deadline)
        return self._guess if time.thread_time() < deadline else None

    def _take(self) -> None:
        new, guess = self._new, self._guess
        if self._behind is not None and new[: len(guess)] == guess:
            self._cursor, new = self._behind, new[len(guess) :]
            for place, spaces in self._learned:
                self._spaces.learn(place, spaces)
        for token in new:
            if not (written := self._vocabulary.written[token]):
                self._cursor.consume(self._vocabulary.bytes_ids[token])
            for byte in written or b"":
                if (learned := self._cursor.take(byte)) is not None:
                    self._spaces.learn(*learned)
        self._new = []

    def _guess_on(self, deadline: float) -> None:
        ids, text, num_bytes, learned = list[int](), b"", 0, list[tuple[Place, bytes]]()
        cursor, written = self._cursor, self._vocabulary.written
        while len(text) < MAX_BYTES and (found := self._next(cursor)) and time.thread_time() < deadline:
            if cursor is self._cursor:
                cursor = cursor.copy()
            if isinstance(found, bytes):
                text, num_bytes = text + found, num_bytes + len(found)
                taken = (cursor.take(byte, is_between=True) for byte in found)  # forced text is certain
                learned += [space for space in taken if space is not None]
                continue
            cursor.consume(found)
            ids += [*self._vocabulary.spelled(text), self._vocabulary.special_ids[found - 256]]
            text = b""
        ids += self._vocabulary.spelled(text) if text else []
        is_whole = cursor is not self._cursor and sum(len(written[token] or b"") for token in ids) == num_bytes
        self._guess, self._learned, self._behind = ids, learned, cursor if is_whole else None

    def _next(self, cursor: _Cursor) -> bytes | int | None:
        """Text, or a special token."""
        if cursor.is_in_text:
            return None
        return cursor.matcher.compute_ff_bytes().partition(NOT_A_BYTE)[0] or self._chosen(cursor)

    def _chosen(self, cursor: _Cursor) -> bytes | int | None:
        """White space, and the text that must follow it."""
        allowed = cursor.allowed()
        signs = allowed & ~SPACE_BITS
        code = signs.bit_length() - 1
        if signs == allowed:
            return code if _is_single(signs) and 256 <= code < self._vocabulary.eos_token_id else None
        if not cursor.is_between() or not 0 <= code < 256:
            return None
        usual = b"" if code in b",:" else self._spaces.guess(cursor.place(code))
        spaces = usual[len(cursor.run) :] if usual.startswith(cursor.run) else b""
        if _is_single(signs):
            text = spaces + bytes((code,))
            return text if cursor.matcher.validate_tokens(list(text)) == len(text) else None
        joined = (spaces[-1:] + bytes((byte,)) for byte in range(256) if signs >> byte & 1)
        return None if any(pair in self._vocabulary.joined for pair in joined) else spaces


def _is_single(bits: int) -> bool:
    return bits.bit_count() == 1


class LikelyTexts:
    """For the answers under one guide."""

    def __init__(self, matcher: LLMatcher, vocabulary: ByteVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._spaces: dict[Place, bytes] = {}

    def start(self) -> LikelyText:
        return LikelyText(self._matcher.deep_copy(), self._vocabulary, WhiteSpaces(self._spaces))
