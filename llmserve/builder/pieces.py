"""Weights in pieces of rows, on several cores: a build processes a few hundred thousand numbers at a time.

So memory stays far below the largest weight, and a piece's temporaries stay in the cache. A piece depends only on its
place, so the number of threads changes no byte of the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from numpy.typing import NDArray

PIECE_ELEMENTS = 1 << 17
PIECE_ROWS = 32  # the rows of a piece are a multiple: whole panels of every target
PIECES_AHEAD = 2  # per thread

T = TypeVar("T")
R = TypeVar("R")


class Weight(Protocol):
    """A parameter whose rows are read in pieces, possibly by several threads. An array qualifies."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> NDArray[Any]: ...


class Each(Protocol):
    """What `function` returns for each of `items`, in order; possibly computed on several cores."""

    def __call__(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]: ...


def one_by_one(function: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]:
    return map(function, items)


def row_pieces(shape: Sequence[int], times: int = 1) -> list[slice]:
    """Rows of a weight of this shape that are processed together; `times` as many if the work is coarser."""
    num_rows, *others = shape
    row_elements = others[0] if others else 1
    step = max(1, times * PIECE_ELEMENTS // max(1, row_elements) // PIECE_ROWS) * PIECE_ROWS
    return [slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]


def is_little(num_elements: int) -> bool:
    """Whether it takes longer to hand over the work on this many numbers than to do it."""
    return num_elements < PIECE_ELEMENTS


class Cores:
    """Threads for pieces: numpy and file access release the GIL. Leaving the context waits for work that has begun."""

    def __init__(self, num_threads: int) -> None:
        self._num_waiting = PIECES_AHEAD * num_threads
        self._executor = ThreadPoolExecutor(num_threads, "piece")

    def each(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]:
        if isinstance(items, Sequence) and len(items) == 1:  # the caller waits anyway
            yield function(items[0])
            return
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(self._executor.submit(function, item))
                if len(waiting) > self._num_waiting:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)
