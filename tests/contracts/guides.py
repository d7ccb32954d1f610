"""A guide whose answers can be worked out by hand, also by an engine in another process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from llmserve.core import GuideState

KIND = "evens"


class Evens:
    """A guide: even ids, five of them, then the end."""

    state = GuideState.OPEN

    def __init__(self, vocab_size: int, num_left: int = 5) -> None:
        self._vocab_size = vocab_size
        self._num_left = num_left

    @property
    def source(self) -> tuple[str, str]:
        return KIND, str(self._vocab_size)

    def start(self) -> Evens:
        return Evens(self._vocab_size)

    def mask(self, end_ids: Sequence[int]) -> bytes:
        self.state = GuideState.OPEN if self._num_left else GuideState.COMPLETE
        return (b"\x55" if self._num_left else b"\0") * (-(-self._vocab_size // 32) * 4)

    def advance(self, token: int) -> None:
        assert token % 2 == 0
        self._num_left -= 1

    def is_complete(self) -> bool:
        return self._num_left == 0

    def fork(self) -> Evens:
        return Evens(self._vocab_size, self._num_left)

    def likely(self) -> Sequence[int]:
        return ()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        allowed = itertools.takewhile(lambda token: token % 2 == 0, token_ids[: self._num_left])
        return len(list(allowed))


async def compile_evens(kind: str, text: str) -> Evens:
    assert kind == KIND
    return Evens(int(text))
