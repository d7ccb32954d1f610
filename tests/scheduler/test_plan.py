"""Several samples of one chunk: what each of them is, and what is refused."""

from __future__ import annotations

import re
from array import array
from dataclasses import replace

import pytest

from llmserve.core import SamplingParams
from llmserve.errors import Unsupported
from llmserve.scheduler.plan import Chunk, Constraint, SampleRequest

PARAMS = SamplingParams(presence_penalty=0.5, seed=7)
IDS = array("i", [4, 5, 6, 7, 8])
LAST = SampleRequest(PARAMS, 1, position=5, history=IDS, num_prompt=4, bias=((3, 0.5),), num_top=2, num_samples=3)


def test_each_sample_is_drawn_as_if_the_chunk_ended_there() -> None:
    chunk = Chunk(0, IDS[1:], 1, (0, 1), LAST)
    assert chunk.num_samples == 3
    one = replace(LAST, num_samples=1)
    assert list(chunk.samples) == [
        replace(one, position=3, history=IDS[:3], num_prompt=3),
        replace(one, position=4, history=IDS[:4]),
        one,
    ]
    assert [sample.history for sample in Chunk(0, IDS, 0, (0, 1), replace(LAST, history=())).samples] == [()] * 3


def test_a_chunk_has_no_sample_or_one() -> None:
    one = replace(LAST, num_samples=1)
    chunks = [Chunk(0, IDS, 0, (0, 1)), Chunk(0, IDS, 0, (0, 1), one)]
    assert [(chunk.num_samples, chunk.samples) for chunk in chunks] == [(0, ()), (1, (one,))]
    masked = replace(one, mask=lambda: b"", banned=(3,))
    assert Chunk(0, IDS, 0, (0, 1), masked).samples == (masked,)


@pytest.mark.parametrize("num_samples", [-1, 0, 3])
def test_more_samples_than_tokens_are_refused(num_samples: int) -> None:
    words = rf"sequence 9, chunk from position 3 on: num_samples must be from 1 to 2, .* got {num_samples}$"
    with pytest.raises(Unsupported, match=words):
        Chunk(9, IDS[3:], 3, (0, 1), replace(LAST, num_samples=num_samples))


def test_each_sample_has_a_constraint_of_its_own() -> None:
    masks = [lambda number=number: bytes([number]) for number in range(3)]
    earlier = [Constraint((9,), masks[0]), Constraint((), masks[1])]
    chunk = Chunk(0, IDS, 0, (0, 1), replace(LAST, banned=(3,), mask=masks[2], earlier=earlier))
    assert [sample.banned for sample in chunk.samples] == [(9,), (), (3,)]
    assert [sample.mask and sample.mask() for sample in chunk.samples] == [b"\0", b"\1", b"\2"]
    assert [sample.earlier for sample in chunk.samples] == [()] * 3
    free = Chunk(0, IDS, 0, (0, 1), replace(LAST, banned=(3,)))
    assert [sample.banned for sample in free.samples] == [(), (), (3,)]


def test_constraints_that_do_not_fit_the_samples_are_refused() -> None:
    with pytest.raises(Unsupported) as refused:
        Chunk(9, IDS[:1], 0, (0,), replace(LAST, mask=lambda: b"", earlier=[Constraint((3,))]))
    assert re.findall(r"num_samples|2 samples before the last, .* of 1|a mask for each", str(refused.value)) == [
        "num_samples", "2 samples before the last, and constraints of 1", "a mask for each"
    ]  # fmt: skip
    with pytest.raises(Unsupported, match="a mask for each"):
        Chunk(9, IDS, 0, (0, 1), replace(LAST, mask=lambda: b""))
