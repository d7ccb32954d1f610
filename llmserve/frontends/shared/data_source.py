"""The source of the data of one request's tensors, and the memory that the data takes."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.frontends.shared.shared_memory import Place, SharedMemory
from llmserve.wire.event_loop import INLINE_BYTES, leave_loop
from llmserve.wire.request_memory import RequestTooLarge, Share

MAX_TEXTS = 1024 * 1024  # elements of a request's BYTES tensors
INLINE_TEXTS = 4096  # most elements that are decoded on the event loop
TEXT_BYTES = 64  # per element: its object, and its place in an array


@dataclass(slots=True)
class DataSource:
    """Belongs to one request. It grows the request's share of the memory before data is decoded."""

    memory: SharedMemory
    share: Share
    num_texts: int = 0

    def read(self, place: Place) -> memoryview:
        leave_loop(when=place.byte_size > INLINE_BYTES)
        self.memory.check(place)
        self.share.grow(place.byte_size)
        return self.memory.read(place)

    def expect_texts(self, name: str, count: int, num_bytes: int = 0) -> None:
        """Call this before the elements of a BYTES tensor are decoded and copied from `num_bytes`.

        Raises `RequestTooLarge` if there are too many elements.
        """
        if count <= INLINE_TEXTS and not self.num_texts and num_bytes <= INLINE_BYTES:
            self.num_texts = count
            return
        leave_loop(when=True)
        self.num_texts += count
        if self.num_texts > MAX_TEXTS:
            raise RequestTooLarge(
                f"input '{name}' brings the BYTES elements of the request to {self.num_texts}: "
                f"the maximum is {MAX_TEXTS}"
            )
        self.share.grow(count * TEXT_BYTES + num_bytes)
