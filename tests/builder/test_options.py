from __future__ import annotations

from dataclasses import replace

import pytest

from llmserve.builder.options import BuildOptions


def test_the_defaults_are_valid() -> None:
    assert BuildOptions().problems() == []


def test_every_problem_is_found_at_once() -> None:
    wrong = BuildOptions(
        dtype="fp16", quantization="int3", max_batch_size=0, max_num_tokens=0, max_seq_len=-1, tokens_per_block=24
    )
    assert len(wrong.problems()) == 6


@pytest.mark.parametrize("block", [0, -2, 3, 48])
def test_blocks_are_powers_of_two(block: int) -> None:
    (problem,) = replace(BuildOptions(), tokens_per_block=block).problems()
    assert "power of two" in problem


def test_a_sequence_has_room_for_a_prompt_and_an_answer() -> None:
    assert replace(BuildOptions(), max_seq_len=1).problems() != []
    assert replace(BuildOptions(), max_seq_len=2).problems() == []
