"""MiniMax-M2: a mixture with sigmoid routing; one norm over all heads of q, and one over all heads of k."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import FamilySpec, HeadNorm, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"head_dim": 128, "rope_theta": 5_000_000.0}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    given = ConfigReader(DEFAULTS | dict(config))
    turned = given.integer("rotary_dim", given.integer("head_dim")) / given.integer("head_dim")
    reader = ConfigReader({"partial_rotary_factor": turned} | dict(given.config))
    spec = read_family(reader, "MiniMaxM2ForCausalLM", partial=True)
    reader.expect("use_qk_norm", True)
    reader.expect("qk_norm_type", "per_layer")
    reader.expect("shared_intermediate_size", 0)
    mixture = read_mixture(
        reader,
        renormalize=True,
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
        sigmoid=True,
        correction="e_score_correction_bias",
    )
    reader.problems[:0] = given.problems
    reader.finish()
    return replace(spec, head_norm=HeadNorm.WHOLE, mixture=mixture)


ARCHITECTURE = family("MiniMaxM2ForCausalLM", "minimax_m2", from_hf)
