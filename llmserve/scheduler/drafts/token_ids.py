"""Token ids of a network that drafts, compared with those of the network that it drafts for."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


class TokenIds:
    """The two vocabularies belong to one tokenizer, but may be padded to different sizes. The drafting network may
    have a head with only some tokens: then it calls a token that it draws by its index among these."""

    def __init__(self, of_model: int, drafted_for: int, of_head: NDArray[np.int32] | None = None) -> None:
        """`of_head`: the tokens of the head, ascending; None: all that the model reads."""
        self.num_common = min(of_model, drafted_for)
        self._of_head = of_head
        self._num_mask_bytes = _mask_bytes(of_model)
        if of_head is not None:
            self._places = np.full(max(of_model, drafted_for), -1, np.int32)
            self._places[of_head] = np.arange(len(of_head))

    def drafted(self, drawn: Sequence[int]) -> Sequence[int]:
        """The tokens that the model has drawn."""
        return drawn if self._of_head is None else self._of_head[drawn].tolist()

    def chosen(self, tokens: array[int]) -> array[int]:
        """What the head calls these tokens, without those that it does not have."""
        if self._of_head is None:
            return tokens
        places = self._places[np.frombuffer(tokens, np.int32)] if tokens else np.empty(0, np.int32)
        return array("i", places[places >= 0].tobytes())

    def biased(self, bias: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
        """The same for tokens with a bias."""
        known = [(token, value) for token, value in bias if token < self.num_common]
        if self._of_head is None:
            return known
        return [(int(self._places[token]), value) for token, value in known if self._places[token] >= 0]

    def fitted(self, mask: Callable[[], bytes]) -> bytes:
        """The mask of the head's tokens."""
        found = mask()[: self._num_mask_bytes].ljust(self._num_mask_bytes, b"\0")
        if self._of_head is None:
            return found
        bits = np.unpackbits(np.frombuffer(found, np.uint8), bitorder="little")
        packed = np.packbits(bits[self._of_head], bitorder="little").tobytes()
        return packed.ljust(_mask_bytes(len(self._of_head)), b"\0")


def _mask_bytes(num_tokens: int) -> int:
    return -(-num_tokens // 32) * 4
