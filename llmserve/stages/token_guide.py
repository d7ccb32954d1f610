"""A compiled guide for a tokenizer's bytes: which tokens may follow those of an answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmserve.core import GuideState
from llmserve.stages.guide_vocabulary import Vocabulary, first_bits
from llmserve.stages.likely_text import LikelyText, LikelyTexts
from llmserve.stages.unique_names import UsedNames

if TYPE_CHECKING:
    from llguidance import LLMatcher

JSON_KINDS = ("json", "json_schema")


class TokenGuide:
    """A compiled guide: the matcher of an answer that has not begun."""

    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, texts: LikelyTexts | None, source: tuple[str, str]
    ) -> None:
        """`texts`: None if only forced text is known. `source`: its kind and text, for an engine in another process."""
        self.source = source
        self._texts = texts
        self._matcher = matcher
        self._vocabulary = vocabulary
        bits = matcher.compute_bitmask()
        self._bits = first_bits(bits, vocabulary)
        self.state = _state(matcher, self._bits, vocabulary)

    def start(self) -> TokenMatcher:
        names = UsedNames() if self.source[0] in JSON_KINDS else None
        text = self._texts.start() if self._texts else None
        return TokenMatcher(self._matcher.deep_copy(), self._vocabulary, self._bits, names, text)


class TokenMatcher:
    """One answer under a guide."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        bits: bytes,
        names: UsedNames | None,
        text: LikelyText | None,
    ) -> None:
        """`names`: of JSON objects. `text`: shared with forks, of which at most one continues."""
        self._matcher = matcher
        self._names = names
        self._vocabulary = vocabulary
        self._bits: bytes | None = bits  # allowed next tokens, including the end; None: not computed yet
        self._taken: int | None = None  # not passed to the library yet
        self._is_first = True
        self._text = text
        self._unread: list[int] = []  # consumed, but not passed to `text` yet
        self.state = GuideState.OPEN
        self.reason = ""  # why it is stuck, if the library says so

    def mask(self, end_ids: Sequence[int]) -> bytes:
        bits, vocabulary = self._look(), self._vocabulary
        if not vocabulary.may_end(bits):
            return self._without_repeated_names(bits)[: vocabulary.num_mask_bytes]
        mask = bytearray(bits[: vocabulary.num_mask_bytes])
        for token in end_ids:
            if 0 <= token < vocabulary.vocab_size:
                mask[token // 8] |= 1 << token % 8
        return bytes(mask)

    def advance(self, token: int) -> None:
        self._consume()
        self._taken = self._vocabulary.first_twins.get(token, token) if self._is_first else token
        self._is_first = False
        self._unread.append(self._taken)
        self._bits = None

    def is_complete(self) -> bool:
        self._look()
        return self.state is GuideState.COMPLETE

    def fork(self) -> TokenMatcher:
        bits = self._look()
        names = self._names and self._names.copy()
        copy = TokenMatcher(self._matcher.deep_copy(), self._vocabulary, bits, names, self._text)
        copy.state, copy.reason, copy._is_first = self.state, self.reason, self._is_first
        copy._unread = self._unread.copy()
        return copy

    def likely(self) -> Sequence[int]:
        if self._is_first and self._vocabulary.first_twins:
            return ()
        if self._text is not None:
            likely = self._text.after(self._unread)
            self._unread.clear()
            if likely is not None:
                return likely
            self._text = None
        self._consume()
        size = self._vocabulary.vocab_size
        return list(itertools.takewhile(lambda token: token < size, self._matcher.compute_ff_tokens()))

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        self._consume()
        if not self._is_first:
            return self._matcher.validate_tokens(list(token_ids))
        first, *others = token_ids
        twin = self._vocabulary.first_twins.get(first, first)
        return 0 if twin < 0 else self._matcher.validate_tokens([twin, *others])

    def _consume(self) -> None:
        if self._taken is not None:
            self._matcher.consume_token(self._taken)
            if self._names is not None:
                self._names.add(self._vocabulary.known[self._taken] or b"")
            self._taken = None

    def _look(self) -> bytes:
        if self._bits is None:
            self._consume()
            self._bits = self._matcher.compute_bitmask()  # after an error, too: then only the end is allowed
            if self._vocabulary.says_nothing(self._bits):
                self.state = _state(self._matcher, self._bits, self._vocabulary)
                self.reason = self._matcher.get_error()
        return self._bits

    def _without_repeated_names(self, bits: bytes) -> bytes:
        """Unless no other token is allowed."""
        if self._names is None or not (repeating := list(self._names.repeating(self._vocabulary.quoted))):
            return bits
        others = bytearray(bits)
        for token in repeating:
            others[token // 8] &= ~(1 << token % 8)
        return bits if self._vocabulary.says_nothing(bytes(others)) else bytes(others)


def _state(matcher: LLMatcher, bits: bytes, vocabulary: Vocabulary) -> GuideState:
    if not vocabulary.says_nothing(bits):
        return GuideState.OPEN
    is_complete = vocabulary.may_end(bits) and not matcher.is_error()
    return GuideState.COMPLETE if is_complete else GuideState.STUCK
