"""Baichuan 1 and 2: the 7B form (rotary embedding) and the 13B form (ALiBi)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmserve.models.alibi import alibi_slopes
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.family import FamilySpec, family
from llmserve.models.rope import default_rope
from llmserve.models.spec import HfConfig

# Sizes of the published models. They determine the settings that configs omit; other sizes do not.
NORM_HEAD_OF_VOCAB = ((64000, False), (125696, True))  # generation 1, generation 2
SMALL_FORM_SIZES = (4096, 32)  # hidden size and heads of the 7B models: rotary embedding
LARGE_FORM_SIZES = (5120, 40)  # of the 13B models: ALiBi
ROPE_THETA = 10000.0  # fixed in the published models; their configs omit it


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    form = read_form(reader)
    spec = read_decoder(reader, "BaichuanForCausalLM", max_positions=form.max_positions)
    reader.expect("hidden_act", "silu")
    reader.expect("num_key_value_heads", spec.num_heads)
    reader.expect("head_dim", spec.hidden_size // spec.num_heads)
    reader.expect("rope_theta", ROPE_THETA)
    reader.expect("rope_scaling", {})
    reader.expect("tie_word_embeddings", False)
    reader.finish()
    return FamilySpec.extending(
        replace(spec, rope=default_rope(spec.head_dim, ROPE_THETA) if form.rope else None),
        fused_qkv="W_pack",
        alibi_slopes=() if form.rope else alibi_slopes(spec.num_heads),
        normalized_head=form.norm_head,
    )


@dataclass(frozen=True, slots=True)
class BaichuanForm:
    """The settings that Baichuan configs omit."""

    rope: bool  # False: ALiBi
    norm_head: bool  # the rows of lm_head are divided by their L2 norm
    max_positions: int


def baichuan_form(config: HfConfig) -> BaichuanForm:
    """`read_form` for a config. Raises CheckpointError if the config does not determine the form."""
    reader = ConfigReader(config)
    form = read_form(reader)
    reader.finish()
    return form


def read_form(reader: ConfigReader) -> BaichuanForm:
    """Determine the form. No other code does this.

    The explicit keys `position_embedding` ("rope" or "alibi") and `norm_head` (a boolean) win. Without them, only the
    sizes of a published model decide. Other sizes are a problem that names the key to add, because a wrong guess
    produces a model that runs and answers nonsense.
    """
    length_key = "model_max_length" if reader.get("max_position_embeddings") is None else "max_position_embeddings"
    return BaichuanForm(rope=_is_rope(reader), norm_head=_norm_head(reader), max_positions=reader.integer(length_key))


def _norm_head(reader: ConfigReader) -> bool:
    if reader.get("norm_head") is not None:
        return reader.flag("norm_head")
    vocab_size = reader.get("vocab_size")
    for size, norm_head in NORM_HEAD_OF_VOCAB:
        if vocab_size == size:
            return norm_head
    reader.problems.append(
        f"vocab_size {vocab_size!r} is that of no published Baichuan, so it does not tell whether lm_head is "
        'normalized; add "norm_head": true (as generation 2) or "norm_head": false (as generation 1) to config.json'
    )
    return False


def _is_rope(reader: ConfigReader) -> bool:
    """The published 7B configs have `max_position_embeddings`, the 13B ones only `model_max_length`."""
    if reader.get("position_embedding") is not None:
        reader.expect("position_embedding", "rope", "alibi")
        return bool(reader.get("position_embedding") == "rope")
    sizes = (reader.get("hidden_size"), reader.get("num_attention_heads"))
    small = reader.get("max_position_embeddings") is not None
    if sizes != (SMALL_FORM_SIZES if small else LARGE_FORM_SIZES):
        key = "max_position_embeddings" if small else "only model_max_length"
        reader.problems.append(
            f"{key} with hidden_size {sizes[0]!r} and {sizes[1]!r} heads is neither the published 7B form (rotary "
            'embedding) nor the 13B form (ALiBi); add "position_embedding": "rope" or "alibi" to config.json'
        )
    return small


ARCHITECTURE = family(
    "BaichuanForCausalLM",
    "baichuan",
    from_hf,
    other_names=("BaiChuanForCausalLM",),  # the spelling of Baichuan-7B
    ignored=(r"model\.(alibi_mask|future_mask)",),
)
