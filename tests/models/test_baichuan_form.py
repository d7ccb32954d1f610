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
    ],
)
def test_published_configs(config: dict[str, Any], expected: tuple[bool, bool, int]) -> None:
    form = baichuan_form(config)
    assert (form.rope, form.norm_head, form.max_positions) == expected


def test_explicit_keys_win() -> None:
    form = baichuan_form({"vocab_size": 64000, "model_max_length": 8, "position_embedding": "rope", "norm_head": True})
    assert (form.rope, form.norm_head) == (True, True)
    form = baichuan_form({"vocab_size": 125696, "model_max_length": 8, "norm_head": False} | LARGE)
    assert (form.rope, form.norm_head) == (False, False)
    form = baichuan_form({"max_position_embeddings": 8, "position_embedding": "alibi", "norm_head": False})
    assert (form.rope, form.norm_head) == (False, False)
    large = {"vocab_size": 64000, "max_position_embeddings": 8, "position_embedding": "alibi"} | LARGE
    assert not baichuan_form(large).rope


@pytest.mark.parametrize("vocab_size", [64008, 125697, 5120, None, [64000]])
def test_norm_head_is_not_guessed_for_an_unknown_vocabulary(vocab_size: object) -> None:
    """An extended vocabulary: the wrong guess would build a model that answers nonsense."""
    config = {"vocab_size": vocab_size, "max_position_embeddings": 4096} | SMALL
    with pytest.raises(CheckpointError, match=r'add "norm_head": true .* or "norm_head": false'):
        baichuan_form(config)
    assert baichuan_form(config | {"norm_head": True}).norm_head
    assert not baichuan_form(config | {"norm_head": False}).norm_head


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": 512, "hidden_size": 256, "num_attention_heads": 4},
        {"model_max_length": 512, "hidden_size": 256, "num_attention_heads": 4},
        {"model_max_length": 4096} | SMALL,
        {"max_position_embeddings": 4096} | LARGE,
        {"model_max_length": 4096},
    ],
)
def test_the_position_form_is_not_guessed_for_unknown_sizes(config: dict[str, Any]) -> None:
    config = config | {"norm_head": True}
    with pytest.raises(CheckpointError, match='add "position_embedding": "rope" or "alibi"'):
        baichuan_form(config)
    assert baichuan_form(config | {"position_embedding": "rope"}).rope
    assert not baichuan_form(config | {"position_embedding": "alibi"}).rope


@pytest.mark.parametrize(
    ("config", "message"),
    [
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
