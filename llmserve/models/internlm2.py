"""InternLM 2: Llama with other tensor names, and q, k and v in one tensor, grouped by key/value head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from llmserve.models import family
from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, grouped_params, read_family
from llmserve.models.spec import HfConfig

NAMES = {  # Llama's module names in `weights.py` to this family's
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.wqkv": "attention.wqkv",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_family(reader, "InternLM2ForCausalLM")
    bias = reader.flag("bias", True)
    reader.expect("pretraining_tp", 1)
    reader.finish()
    return replace(spec, qkv_bias=bias, output_bias=bias, fused_qkv="wqkv")


ARCHITECTURE = replace(
    family.family("InternLM2ForCausalLM", "internlm2", from_hf), params=partial(grouped_params, names=NAMES)
)
