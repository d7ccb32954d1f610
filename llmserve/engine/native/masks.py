"""Makes the masks of structured answers during the step that needs them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from llmserve.engine.native.library import Library
from llmserve.engine.native.step import FlatStep


class MaskMaker:
    """A thread that fills a step's masks; the library waits for them before it chooses tokens. One step at a time."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llmserve-masks")  # the thread starts on first use

    def begin(self, flat: FlatStep) -> Future[None] | None:
        """None: the step has no masks. The future has any error from making them."""
        return self._pool.submit(self._fill, flat) if flat.has_masks else None

    def _fill(self, flat: FlatStep) -> None:
        try:
            flat.fill_masks()
        finally:
            self._library.signal(flat.masks_ready)

    def close(self) -> None:
        """May be called again."""
        self._pool.shutdown()
