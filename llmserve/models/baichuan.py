"""Baichuan 1 and 2: the 7B form (rotary embedding) and the 13B form (ALiBi)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmserve.models import decoder
from llmserve.models.alibi import alibi_slopes
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.rope import STORED_FREQUENCIES, default_rope
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig

GENERATION_1_VOCAB_SIZE = 64000
LARGE_FORM_SIZES = (5120, 40)  # hidden size and heads of the published 13B models
ROPE_THETA = 10000.0  # fixed in the published models; their configs do not carry it


def from_hf(config: HfConfig) -> DecoderSpec:
    reader = ConfigReader(config)
    form = read_form(reader)
    spec = read_decoder(reader, "BaichuanForCausalLM", max_positions=form.max_positions)
    reader.expect("num_key_value_heads", spec.num_heads)
    reader.expect("head_dim", spec.hidden_size // spec.num_heads)
    reader.expect("rope_theta", ROPE_THETA)
    reader.expect("rope_scaling", {})
    reader.expect("tie_word_embeddings", False)
    reader.finish()
    return replace(
        spec,
        inv_freq=default_rope(spec.head_dim, ROPE_THETA).inv_freq if form.rope else (),
        alibi_slopes=() if form.rope else alibi_slopes(spec.num_heads),
        norm_head=form.norm_head,
        fused_qkv_source=True,
    )


@dataclass(frozen=True, slots=True)
class BaichuanForm:
    """What a Baichuan config leaves unsaid, resolved."""

    rope: bool  # False: ALiBi
    norm_head: bool  # the rows of lm_head are divided by their L2 norm
    max_positions: int


def baichuan_form(config: HfConfig) -> BaichuanForm:
    """`read_form` of a bare config. Raises CheckpointError when the config contradicts itself."""
    reader = ConfigReader(config)
    form = read_form(reader)
    reader.finish()
    return form


def read_form(reader: ConfigReader) -> BaichuanForm:
    """Tell the forms apart. This is the only place that knows how.

    The explicit keys `position_embedding` ("rope" or "alibi") and `norm_head` (a boolean) win. Otherwise the published
    configs decide: the 7B form has `max_position_embeddings`, the 13B form only `model_max_length`; a vocabulary of
    64,000 is generation 1, which has no NormHead.
    """
    length_key = "model_max_length" if reader.get("max_position_embeddings") is None else "max_position_embeddings"
    reader.expect("position_embedding", "rope", "alibi")
    return BaichuanForm(
        rope=reader.get("position_embedding", _published_position(reader)) == "rope",
        norm_head=reader.flag("norm_head", reader.get("vocab_size") != GENERATION_1_VOCAB_SIZE),
        max_positions=reader.integer(length_key),
    )


def _published_position(reader: ConfigReader) -> str:
    if reader.get("max_position_embeddings") is None:
        return "alibi"
    sizes = (reader.get("hidden_size"), reader.get("num_attention_heads"))
    if sizes == LARGE_FORM_SIZES and reader.get("position_embedding") is None:
        reader.problems.append(
            "max_position_embeddings says 7B form (rotary embedding), hidden_size 5120 with 40 heads says 13B form "
            '(ALiBi); add "position_embedding": "rope" or "alibi"'
        )
    return "rope"


ARCHITECTURE = Architecture(
    from_hf, decoder.params, decoder.forward, ignored=(STORED_FREQUENCIES, r"model\.(alibi_mask|future_mask)")
)
