"""Baichuan 1 and 2: the 7B form (rotary embedding) and the 13B form (ALiBi)."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.errors import CheckpointError, raise_problems
from llmserve.models.spec import HfConfig

GENERATION_1_VOCAB_SIZE = 64000
LARGE_FORM_SIZES = (5120, 40)  # hidden size and heads of the published 13B models
ROPE_THETA = 10000.0  # fixed in the published models; their configs do not carry it


@dataclass(frozen=True, slots=True)
class BaichuanForm:
    """What a Baichuan config leaves unsaid, resolved."""

    rope: bool  # False: ALiBi
    norm_head: bool  # the rows of lm_head are divided by their L2 norm
    max_positions: int


def baichuan_form(config: HfConfig) -> BaichuanForm:
    """Tell the forms apart. This is the only place that knows how.

    The explicit keys `position_embedding` ("rope" or "alibi") and `norm_head` (a boolean) win. Otherwise the published
    configs decide: the 7B form has `max_position_embeddings`, the 13B form only `model_max_length`; a vocabulary of
    64,000 is generation 1, which has no NormHead. Raises CheckpointError when the config contradicts itself.
    """
    problems: list[str] = []
    max_positions = config.get("max_position_embeddings")
    position = config.get("position_embedding") or _published_position(config, problems)
    if position not in ("rope", "alibi"):
        problems.append(f'position_embedding must be "rope" or "alibi", got {position!r}')
    norm_head = config.get("norm_head")
    if norm_head is None:
        norm_head = config.get("vocab_size") != GENERATION_1_VOCAB_SIZE
    if not isinstance(norm_head, bool):
        problems.append(f"norm_head must be true or false, got {norm_head!r}")
    length = max_positions if max_positions is not None else config.get("model_max_length")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        problems.append(
            f"max_position_embeddings or model_max_length must be a positive integer, got {length!r}; "
            "add the longest sequence that the model was trained for"
        )
        length = 0
    raise_problems(CheckpointError, "config.json of a Baichuan model", problems)
    return BaichuanForm(rope=position == "rope", norm_head=bool(norm_head), max_positions=length)


def _published_position(config: HfConfig, problems: list[str]) -> str:
    if config.get("max_position_embeddings") is None:
        return "alibi"
    if (config.get("hidden_size"), config.get("num_attention_heads")) == LARGE_FORM_SIZES:
        problems.append(
            "max_position_embeddings says 7B form (rotary embedding), hidden_size 5120 with 40 heads says 13B form "
            '(ALiBi); add "position_embedding": "rope" or "alibi"'
        )
    return "rope"
