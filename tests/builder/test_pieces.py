"""Pieces of weights: which rows they are, and that many at a time are as one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from llmserve.builder import pieces
from llmserve.builder.background import Background
from llmserve.builder.pieces import Cores, row_pieces
from llmserve.progress import SilentProgress


@pytest.mark.parametrize(("shape", "rows"), [((100, 64), 32), ((100, 32), 64), ((100, 3000), 32), ((5000,), 2048)])
def test_pieces_are_whole_panels_of_about_a_size(
    shape: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 2048)
    found = row_pieces(shape)
    assert [piece.start for piece in found] == list(range(0, shape[0], rows))
    assert [piece.stop for piece in found[:-1]] == [piece.start for piece in found[1:]]
    assert found[-1].stop == shape[0]


def test_results_come_in_order_and_few_items_are_taken_ahead() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        while taken < 100:
            taken += 1
            yield taken

    def late_first(item: int) -> int:
        time.sleep(0.02 if item == 1 else 0)
        return -item

    with Cores(4) as cores:
        results = cores.each(late_first, items())
        assert next(results) == -1
        assert taken <= 4 * pieces.PIECES_AHEAD + 1
        assert list(results) == [-item for item in range(2, 101)]


def test_one_piece_is_not_handed_to_another_thread() -> None:
    with Cores(2) as cores:
        assert list(cores.each(lambda _: threading.get_ident(), [0])) == [threading.get_ident()]
        assert threading.get_ident() not in cores.each(lambda _: threading.get_ident(), [0, 1])


def test_an_error_of_a_piece_is_raised_and_nothing_goes_on() -> None:
    done = []

    def fail_at_three(item: int) -> None:
        done.append(item)
        if item == 3:
            raise ValueError("three")

    with Cores(2) as cores, pytest.raises(ValueError, match="three"):
        list(cores.each(fail_at_three, range(1000)))
    assert len(done) < 100


def test_leaving_stops_what_goes_on_beside() -> None:
    def endless(advance: Callable[[str, int], None]) -> None:
        while True:
            advance("zeros", 1)

    with Background() as background:
        pending = background.start(endless)
    assert pending.future.done()


def test_what_goes_on_beside_reports_its_error_when_it_is_asked() -> None:
    def fail(advance: Callable[[str, int], None]) -> None:
        raise ValueError("no")

    with Background() as background, pytest.raises(ValueError, match="no"):
        background.start(fail).result(SilentProgress())
