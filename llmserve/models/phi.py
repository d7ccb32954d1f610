"""Phi-1, Phi-1.5, Phi-2: attention and MLP in parallel, layer norms and biases everywhere, partly rotated heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from llmserve.models import family
from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, Norms, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}  # transformers' defaults
# Llama's module names in `weights.py` to this family's
NAMES = {"self_attn.o_proj": "self_attn.dense", "model.norm": "model.final_layernorm"}


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "PhiForCausalLM", partial=True, eps_key="layer_norm_eps", plain_mlp="fc1")
    for key in ("qk_layernorm", "tie_word_embeddings"):
        reader.expect(key, False)
    reader.finish()
    return replace(
        spec, layer_norm=True, norm_bias=True, is_parallel=True, norms=Norms(mlp=""), qkv_bias=True, output_bias=True,
        mlp_bias=True, mlp_down="fc2", head_bias=True,
    )  # fmt: skip


ARCHITECTURE = replace(
    family.family("PhiForCausalLM", "phi", from_hf), params=partial(family.renamed_params, names=NAMES)
)
