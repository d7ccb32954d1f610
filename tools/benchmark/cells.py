"""The cells of a table, and how one is measured.

A model answers every prompt greedily. `prefill` is the time from the prompt to its first token; `decode` is the time of
the steps after that, all sequences together, one token each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

FIRST_ID = 3  # lower ids are special tokens
MIN_STEPS = 8  # in a decode cell that ends early
WARM_STEPS = 2
PREFILL_CALLS = 4  # one takes less than a second, so other work on the machine would distort it
LONG_PROMPT = 1000  # tokens; longer cells take so long that they are measured once


@dataclass(frozen=True, slots=True)
class Cell:
    phase: str  # "prefill" or "decode"
    batch: int
    prompt_tokens: int
    new_tokens: int  # including the one from the prefill

    @property
    def name(self) -> str:
        if self.phase == "prefill":
            return f"prefill {self.prompt_tokens}"
        return f"batch {self.batch}" + (f" after {self.prompt_tokens}" if self.is_long else "")

    @property
    def is_long(self) -> bool:
        return self.prompt_tokens >= LONG_PROMPT

    @property
    def calls(self) -> int:
        """The number of measurements in one pass, each with other prompts."""
        return PREFILL_CALLS if self.phase == "prefill" and not self.is_long else 1

    @property
    def most_tokens(self) -> int:
        """Tokens of one sequence."""
        return self.prompt_tokens + self.new_tokens + WARM_STEPS

    @property
    def mean_context(self) -> float:
        """Tokens that a decode step finds in each sequence's cache, on average."""
        return self.prompt_tokens + self.new_tokens / 2


CELLS = (Cell("prefill", 1, 512, 1), *(Cell("decode", batch, 32, 64) for batch in (1, 4, 8, 16, 32)))
LONG_CELLS = (
    *(Cell("prefill", 1, length, 1) for length in (2000, 8000)),
    *(Cell("decode", batch, length, 32) for length in (1900, 7900) for batch in (1, 8)),
)


class Model(Protocol):
    """A network in some engine. `start` and `step` are timed; `prepare` and `release` are not."""

    weight_bytes: int  # read by a step: without the embedding, of which a step reads only some rows
    kv_bytes_per_token: float
    versions: dict[str, str]

    def prepare(self, batch: int, max_tokens: int) -> None:
        """Allocates memory for `batch` sequences of `max_tokens` tokens each."""
        ...

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Computes the prompts, which have equal lengths; returns the first new token of each."""
        ...

    def step(self) -> list[int]:
        """Computes and returns one more token of each sequence."""
        ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: tokens, seconds, and the tokens of the first sequence."""

    tokens: int
    seconds: float
    ids: tuple[int, ...]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def random_prompts(cell: Cell, vocab: int, seed: int) -> list[list[int]]:
    """Prompts that differ for every seed, so that no cache has them."""
    rng = np.random.default_rng((seed, cell.batch, cell.prompt_tokens))
    return [[int(i) for i in rng.integers(FIRST_ID, vocab, cell.prompt_tokens)] for _ in range(cell.batch)]


def measure_cell(model: Model, cell: Cell, prompts: Sequence[Sequence[int]], *, max_seconds: float) -> Sample:
    """A decode cell ends after `cell.new_tokens`, or after `max_seconds` of at least MIN_STEPS steps."""
    model.prepare(cell.batch, cell.most_tokens)
    try:
        ids, started = [], time.perf_counter()
        ids.append(model.start(prompts)[0])
        seconds = time.perf_counter() - started
        if cell.phase == "prefill":
            return Sample(cell.batch * cell.prompt_tokens, seconds, tuple(ids))
        for _ in range(WARM_STEPS if cell.is_long else 0):  # instead of a warm-up with its own long prompt
            ids[0] = model.step()[0]
        started = time.perf_counter()
        seconds = 0.0
        while len(ids) < cell.new_tokens and (seconds < max_seconds or len(ids) <= MIN_STEPS):
            ids.append(model.step()[0])
            seconds = time.perf_counter() - started
        return Sample(cell.batch * (len(ids) - 1), seconds, tuple(ids))
    finally:
        model.release()


def warm_up(model: Model, cell: Cell, prompts: Sequence[Sequence[int]]) -> None:
    """Runs the shapes of `cell` once, because some engines compile for them, and all allocate memory. Decoding after a
    long prompt warms itself up."""
    if cell.is_long and cell.phase == "decode":
        return
    model.prepare(cell.batch, cell.most_tokens)
    try:
        model.start(prompts)
        for _ in range(WARM_STEPS if cell.phase == "decode" else 0):
            model.step()
    finally:
        model.release()
