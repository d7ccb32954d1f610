"""Matrices of experts that a file has as one tensor or as two: their rows, and how much is expanded for them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from llmserve.checkpoint.gguf.block_types import TYPES, Blocks, BlockType, Values
from llmserve.checkpoint.gguf.rows import ExpandedRows, JoinedRows
from llmserve.checkpoint.rearranged import StackedRows

EXPERTS, HEIGHT, WIDTH = 3, 4, 64
NAMED = {kind.name: kind for kind in TYPES.values()}


def experts(kind: BlockType, *shape: int, seed: int = 0) -> ExpandedRows:
    num_bytes = math.prod(shape) // kind.num_elements * kind.num_bytes
    packed = np.random.default_rng(seed).integers(0, 60, num_bytes, dtype=np.uint8)  # no number of them is too large
    return ExpandedRows(packed, kind, shape)


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("kinds", [["MXFP4"], ["MXFP4", "MXFP4"], ["Q8_0", "MXFP4"], ["F16", "F32"]], ids="-".join)
def test_rows_of_all_experts_are_those_of_their_matrices(kinds: list[str], is_transposed: bool, in_turns: bool) -> None:
    parts = [experts(NAMED[kind], EXPERTS, HEIGHT, WIDTH, seed=seed) for seed, kind in enumerate(kinds)]
    joined = JoinedRows(parts, is_transposed, in_turns)
    matrices = joined[:].swapaxes(1, 2) if is_transposed else joined[:]
    wanted = matrices.reshape(-1, WIDTH)
    stacked = StackedRows(joined, HEIGHT * len(parts), is_transposed)
    for begin, end in ((0, len(wanted)), (2, 3), (3, 11), (len(wanted) - 1, len(wanted)), (5, 5)):
        np.testing.assert_array_equal(stacked[begin:end], wanted[begin:end])


def test_numbers_of_all_experts() -> None:
    """Where each has a row: their biases."""
    parts = [experts(NAMED["F32"], EXPERTS, HEIGHT, seed=seed) for seed in range(2)]
    joined = JoinedRows(parts, is_transposed=False, in_turns=True)
    stacked = StackedRows(joined, 2 * HEIGHT)
    np.testing.assert_array_equal(stacked[3:17], joined[:].reshape(-1)[3:17])


def test_no_more_is_expanded_than_is_asked_for() -> None:
    """An expert may have a hundred times as many numbers as the piece of it that is worked on."""
    num_blocks = []

    def counted(blocks: Blocks) -> Values:
        num_blocks.append(len(blocks))
        expand = NAMED["MXFP4"].expand
        assert expand is not None
        return expand(blocks)

    parts = [experts(replace(NAMED["MXFP4"], expand=counted), EXPERTS, HEIGHT, WIDTH, seed=seed) for seed in range(2)]
    stacked = StackedRows(JoinedRows(parts, is_transposed=True, in_turns=True), 2 * HEIGHT, is_transposed=True)
    assert stacked[7:12].shape == (5, WIDTH)
    assert sum(num_blocks) == 5 * WIDTH // 32
