"""The text that will probably follow under a guide: what is forced, with white space as the answer has written it.

JSON allows white space around each of its signs, so a schema forces few tokens. But behind the white space there is
mostly one way to go on, and white space is written alike again and again. What is found here is a guess; whoever drafts
it verifies it. A matcher of the same grammar over single bytes is asked, whose masks take microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from llmserve.stages.guide_vocabulary import Vocabulary, library_tokenizer, name_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_BYTES = 96  # of a guess
MAX_S = 0.005  # of work for a guess: steps wait for it
MAX_PLACES = 256  # that are remembered
MOST_SIGNS = 32  # that may stand between the tokens of JSON; within a text there are more
SPACES = b" \t\n\r"
OPENING, CLOSING = b"{[", b"}]"
SIGNS = b"{}[],:"
ALL_BYTES, SPACE_BITS = (1 << 256) - 1, sum(1 << byte for byte in SPACES)
NOT_A_BYTE = b"\xff"  # begins a forced special token
LINES = (b"{", b",", b"}")  # behind an opening bracket, a comma, and before a closing bracket
USUAL = {b":": b" ", b",": b" "}  # behind them, where nothing is known


class Place(NamedTuple):
    """Where white space may stand."""

    kind: bytes
    level: int  # of what follows: how many brackets are open


class WhiteSpaces:
    """How an answer has written white space of late."""

    def __init__(self, others: dict[Place, bytes]) -> None:
        """`others`: of all answers under the guide, which this one may be like."""
        self._at: dict[Place, bytes] = {}
        self._others = others
        self._is_alike = True  # it has written as others did, where both have

    def learn(self, place: Place, spaces: bytes) -> None:
        if place not in self._at:
            self._is_alike = self._others.get(place, spaces) == spaces
        for at in (self._at, self._others):
            if len(at) >= MAX_PLACES:
                at.clear()
            at[place] = spaces

    def guess(self, place: Place) -> bytes:
        """As at this place, or where another line of this level begins, or as others wrote there; else deduced."""
        at, is_line = self._at, place.kind in LINES
        lines = {other.level: spaces for other, spaces in at.items() if spaces[:1] == b"\n"} if is_line else {}
        found = at.get(place, lines.get(place.level))
        if found is None and self._is_alike:
            found = self._others.get(place)
        if found is None and lines:
            level, spaces = max(lines.items())
            found = b"\n" + spaces[-1:] * ((len(spaces) - 1) * place.level // max(1, level))
        if found is None:  # as behind the same sign elsewhere
            alike = (spaces for other, spaces in at.items() if other.kind[:1] == place.kind[:1])
            found = next(alike, USUAL.get(place.kind[:1], b""))
        return found


class ByteVocabulary:
    """A tokenizer for llguidance: single bytes, and behind them the tokens that write nothing, which grammars name."""

    bos_token_id: int | None = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.written = vocabulary.known
        self.spelled = vocabulary.spellings
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
    """A place in an answer."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.run = b""  # of white space that ends here
        self._before = 0  # the byte before it
        self._level = 0
        self._is_between = False  # where the run stands: between tokens of JSON, or what is like them

    def copy(self) -> _Cursor:
        copy = _Cursor(self.matcher.deep_copy())
        copy.run, copy._before, copy._level, copy._is_between = self.run, self._before, self._level, self._is_between
        return copy

    def allowed(self) -> int:
        """A bit for each byte, special token, and the end."""
        return int.from_bytes(self.matcher.compute_bitmask(), "little")

    def take(self, byte: int) -> tuple[Place, bytes] | None:
        """Returns the white space before it and its place, where some may stand."""
        is_sign = byte in SIGNS or self._before in b"{[,:"
        if not self.run:
            self._is_between = (byte in SPACES or is_sign) and is_between(self.allowed())
        self.matcher.consume_token(byte)
        if byte in SPACES:
            self.run += bytes((byte,))
            return None
        found = (self.place(byte), self.run) if self._is_between and byte not in b",:" else None
        if self._is_between:
            self._level += (byte in OPENING) - (byte in CLOSING)
        self._before, self.run = byte, b""
        return found

    def place(self, byte: int) -> Place:
        """Of white space before this byte."""
        before = self._before
        if byte in CLOSING:
            return Place(b"}", self._level - 1)
        if before in b"{[,":
            return Place(b"," if before == ord(",") else b"{", self._level)
        return Place(bytes((before, byte)), 0)


class LikelyText:
    """Of one answer. It follows the answer itself, and none of the ways in which it might go on."""

    def __init__(self, matcher: LLMatcher, vocabulary: ByteVocabulary, spaces: WhiteSpaces) -> None:
        self._cursor = _Cursor(matcher)
        self._vocabulary = vocabulary
        self._spaces = spaces

    def after(self, token_ids: Iterable[int]) -> Sequence[int] | None:
        """What is likely behind these tokens, which go on from those before. None: it takes too long to say."""
        deadline = time.thread_time() + MAX_S
        self._take(token_ids)
        likely = self._next_tokens(deadline)
        return likely if time.thread_time() < deadline else None

    def _take(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if not (written := self._vocabulary.written[token]):
                self._cursor.matcher.consume_token(self._vocabulary.bytes_ids[token])
            for byte in written or b"":
                if (learned := self._cursor.take(byte)) is not None:
                    self._spaces.learn(*learned)

    def _next_tokens(self, deadline: float) -> Sequence[int]:
        cursor, ids, text = self._cursor.copy(), [], b""
        while len(text) < MAX_BYTES and time.thread_time() < deadline and (found := self._next(cursor)):
            if isinstance(found, bytes):
                text += found
                continue
            cursor.matcher.consume_token(found)
            ids += [*self._vocabulary.spelled(text), self._vocabulary.special_ids[found - 256]]
            text = b""
        return ids + self._vocabulary.spelled(text)

    def _next(self, cursor: _Cursor) -> bytes | int | None:
        """Text, which the cursor has taken, or a special token, which it has not."""
        forced = cursor.matcher.compute_ff_bytes().partition(NOT_A_BYTE)[0] or self._chosen(cursor)
        if isinstance(forced, bytes):
            for byte in forced:
                cursor.take(byte)
        return forced

    def _chosen(self, cursor: _Cursor) -> bytes | int | None:
        """White space, and behind it what has to follow."""
        allowed = cursor.allowed()
        signs = allowed & ~SPACE_BITS
        code = signs.bit_length() - 1
        if signs == allowed:
            return code if _is_single(signs) and 256 <= code < self._vocabulary.eos_token_id else None
        if not is_between(allowed) or not 0 <= code < 256:
            return None
        usual = b"" if code in b",:" else self._spaces.guess(cursor.place(code))
        spaces = usual[len(cursor.run) :] if usual.startswith(cursor.run) else b""
        if _is_single(signs):
            text = spaces + bytes((code,))
            return text if cursor.matcher.validate_tokens(list(text)) == len(text) else None
        joined = (spaces[-1:] + bytes((byte,)) for byte in range(256) if signs >> byte & 1)
        return None if any(pair in self._vocabulary.joined for pair in joined) else spaces


def is_between(allowed: int) -> bool:
    return (allowed & ALL_BYTES & ~SPACE_BITS).bit_count() <= MOST_SIGNS


def _is_single(bits: int) -> bool:
    return bits.bit_count() == 1


class LikelyTexts:
    """Of the answers under one guide."""

    def __init__(self, matcher: LLMatcher, vocabulary: ByteVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._spaces: dict[Place, bytes] = {}

    def start(self) -> LikelyText:
        return LikelyText(self._matcher.deep_copy(), self._vocabulary, WhiteSpaces(self._spaces))
