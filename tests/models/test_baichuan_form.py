"""Which Baichuan is it? The published configs, the explicit keys, and contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.errors import CheckpointError
from llmserve.models.baichuan import baichuan_form

LARGE = {"hidden_size": 5120, "num_attention_heads": 40}
SMALL = {"hidden_size": 4096, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 64000, "max_position_embeddings": 4096} | SMALL, (True, False, 4096)),  # Baichuan-7B
        ({"vocab_size": 64000, "model_max_length": 4096} | LARGE, (False, False, 4096)),  # Baichuan-13B
        ({"vocab_size": 125696, "max_position_embeddings": 4096, "model_max_length": 4096} | SMALL, (True, True, 4096)),
        ({"vocab_size": 125696, "model_max_length": 4096} | LARGE, (False, True, 4096)),  # Baichuan2-13B
        ({"vocab_size": 5120, "max_position_embeddings": 512, "model_max_length": 512}, (True, True, 512)),  # the demo
    ],
)
def test_published_configs(config: dict[str, Any], expected: tuple[bool, bool, int]) -> None:
    form = baichuan_form(config)
    assert (form.rope, form.norm_head, form.max_positions) == expected


def test_explicit_keys_win() -> None:
    form = baichuan_form({"vocab_size": 64000, "model_max_length": 8, "position_embedding": "rope", "norm_head": True})
    assert (form.rope, form.norm_head) == (True, True)
    form = baichuan_form({"max_position_embeddings": 8, "position_embedding": "alibi", "norm_head": False})
    assert (form.rope, form.norm_head) == (False, False)
    assert not baichuan_form({"max_position_embeddings": 8, "position_embedding": "alibi"} | LARGE).rope


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_position_embeddings": 4096} | LARGE, 'add "position_embedding"'),
        ({"max_position_embeddings": 8, "position_embedding": "learned"}, "position_embedding 'learned'"),
        ({"max_position_embeddings": 8, "norm_head": 1}, "norm_head must be true or false, got 1"),
        ({}, "model_max_length must be an integer from 1 to 2147483647, it is missing"),
        ({"max_position_embeddings": -4}, "max_position_embeddings must be an integer"),
    ],
)
def test_contradictions_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        baichuan_form(config)
    assert message in str(caught.value)
