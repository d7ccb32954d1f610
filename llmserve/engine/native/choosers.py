"""Tokens, log-probs and other results from logits that were computed elsewhere, bitwise identical to the CPU
engine's."""

from __future__ import annotations

import weakref
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.base import StepResult
from llmserve.engine.machine.cores import num_threads
from llmserve.engine.native.library import chosen_isa, load_library
from llmserve.engine.native.masks import MaskMaker
from llmserve.engine.native.step import FlatStep, StepMemory
from llmserve.scheduler.plan import StepPlan


class Choosers:
    """Threads that choose tokens, for one vocabulary. One step at a time."""

    def __init__(self, vocab_size: int, threads: int = 0) -> None:
        library = load_library()
        self._library = library
        self._handle = library.open_choosers(chosen_isa(), vocab_size, num_threads(threads))
        self._close = weakref.finalize(self, library.close_choosers, self._handle)
        self._close.atexit = False
        self._vocab_size = vocab_size
        self._memory = StepMemory()
        self._masks = MaskMaker(library)

    def begin(self, plan: StepPlan) -> Choice:
        """Call it before the logits are ready: masks are made in the meantime."""
        flat = FlatStep(plan, self._vocab_size, self._memory)
        return Choice(self, flat, self._masks.begin(flat))

    def choose(self, flat: FlatStep, logits: NDArray[np.float32], begin: int) -> None:
        """`logits` [rows, V] of the step's selected rows from `begin` on."""
        self._library.choose(self._handle, flat.record, logits.ctypes.data, begin, len(logits))

    def close(self) -> None:
        """May be called again."""
        self._masks.close()
        self._close()


class Choice:
    """The requests of one step. `add` receives the logits of the selected rows, in pieces and in order; rows whose
    tokens are chosen elsewhere may be omitted."""

    def __init__(self, choosers: Choosers, flat: FlatStep, masking: Future[None] | None) -> None:
        self._choosers = choosers
        self._flat = flat
        self._masking = masking

    @property
    def selected(self) -> NDArray[np.uint32]:
        """Rows of the step's tokens whose logits are needed."""
        return self._flat.selected

    @property
    def flat(self) -> FlatStep:
        """The library's input."""
        return self._flat

    def add(self, logits: NDArray[np.float32], begin: int) -> None:
        assert logits.flags.c_contiguous
        self._choosers.choose(self._flat, logits, begin)

    def result(self) -> StepResult:
        if self._masking is not None:
            self._masking.result()
        return self._flat.result()
