"""Phi-3.5-MoE: two experts per token, weighted by SparseMixer's rule; layer norms, and biases including the head's.

Its rotary embedding has two sets of frequencies, as in Phi-3.
"""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import family, read_family
from llmserve.models.phi3 import ORIGINAL_POSITIONS, Phi3Spec, read_ropes
from llmserve.models.rope import rope_key
from llmserve.models.spec import HfConfig

DEFAULTS = {"rope_theta": 1_000_000.0, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}  # transformers' defaults
SCALES = ("short_mscale", "long_mscale")  # rope keys: factors of cos and sin
JITTER = 0.01


def from_hf(config: HfConfig) -> Phi3Spec:
    reader = ConfigReader(DEFAULTS | dict(config))
    plain = ConfigReader({key: value for key, value in reader.config.items() if not key.startswith("rope_")})
    spec = read_family(plain, "PhimoeForCausalLM")
    original = reader.integer("original_max_position_embeddings", _original(config))
    rope, long_rope = read_ropes(reader, spec, original, scales=SCALES)
    window = reader.integer("sliding_window", 0, minimum=0)
    bias, head_bias = reader.flag("attention_bias"), reader.flag("lm_head_bias")
    reader.expect("num_experts_per_tok", 2)
    tolerance = 2 * reader.positive("router_jitter_noise", JITTER)
    names = ("w1", "w3", "w2")
    mixture = read_mixture(reader, renormalize=False, module="block_sparse_moe", names=names, tolerance=tolerance)
    reader.problems[:0] = plain.problems
    reader.finish()
    sees_all = window >= spec.max_position_embeddings
    return Phi3Spec.extending(
        replace(spec, rope=rope, windows=() if sees_all or not window else (window,) * spec.num_layers),
        layer_norm=True, norm_bias=True, qkv_bias=bias, output_bias=bias, head_bias=head_bias, mixture=mixture,
        activation=spec.activation, original_positions=original, long_rope=long_rope,
    )  # fmt: skip


def _original(config: HfConfig) -> int:
    rope = config.get(rope_key(config))
    found = rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None
    return found if isinstance(found, int) else ORIGINAL_POSITIONS


ARCHITECTURE = family("PhimoeForCausalLM", "phimoe", from_hf, other_names=("PhiMoEForCausalLM",))
