"""Gemma 2: norms before and after each block, soft caps, a sliding window in every second layer.

Norms multiply by 1 + weight. The embedding is multiplied by the root of the hidden size, in float32 for every engine
dtype. transformers also does this in float32; in bfloat16, it rounds the root first (55.43 to 55.5).
"""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.family import ACTIVATIONS, FamilySpec, Norms, family
from llmserve.models.rope import read_rope, scaled_positions
from llmserve.models.spec import DecoderSpec, HfConfig
from llmserve.models.windows import DEFAULT_WINDOW, FULL, SLIDING, windows_by_type

DEFAULTS = {  # transformers' defaults
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    sizes = read_decoder(reader, "Gemma2ForCausalLM", max_positions=scaled_positions(reader))
    types = [FULL if i % 2 else SLIDING for i in range(sizes.num_layers)]
    spec = read_gemma(reader, replace(sizes, rope=read_rope(reader, sizes.head_dim)), types)
    soft_cap = reader.optional_positive("attn_logit_softcapping", 50.0)
    logit_soft_cap = reader.optional_positive("final_logit_softcapping", 30.0)
    reader.finish()
    return replace(spec, attention_soft_cap=soft_cap, logit_soft_cap=logit_soft_cap)


def read_gemma(reader: ConfigReader, spec: DecoderSpec, usual_types: list[str]) -> FamilySpec:
    """Read the keys that Gemma 2 and 3 share, without soft caps. `usual_types`: layer types if the config has none."""
    reader.expect("hidden_activation", "gelu_pytorch_tanh", "gelu")
    bias = reader.flag("attention_bias")
    reader.expect("use_bidirectional_attention", False)
    window = reader.integer("sliding_window", DEFAULT_WINDOW)
    windows = windows_by_type(reader, reader.get("layer_types", usual_types), spec.num_layers, window)
    return FamilySpec.extending(
        replace(spec, windows=windows),
        activation=ACTIVATIONS.get(str(reader.get("hidden_activation")), ""),
        qkv_bias=bias,
        output_bias=bias,
        norms=NORMS,
        norm_offset=1.0,
        embed_scale=spec.hidden_size**0.5,
        attention_scale=reader.positive("query_pre_attn_scalar") ** -0.5,
    )


ARCHITECTURE = family("Gemma2ForCausalLM", "gemma2", from_hf)
