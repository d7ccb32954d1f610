"""nanochat: norms without weights, also before the first layer, and heads rotated in the opposite direction."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models import family
from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, HeadNorm, layers_and_head, read_family
from llmserve.models.graph import Graph
from llmserve.models.spec import HfConfig, Rope

DEFAULTS = {"hidden_act": "relu2", "rms_norm_eps": 1e-6}  # transformers' defaults
DEFAULT_SOFT_CAP = 15.0


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "NanoChatForCausalLM", plain_mlp="fc1")
    bias = reader.flag("attention_bias")
    soft_cap = reader.optional_positive("final_logit_softcapping", DEFAULT_SOFT_CAP)
    reader.finish()
    assert spec.rope is not None
    backwards = Rope(tuple(-frequency for frequency in spec.rope.inv_freq), spec.rope.scale)
    return replace(
        spec, rope=backwards, norm_weights=False, head_norm=HeadNorm.LENGTH, mlp_down="fc2", qkv_bias=bias,
        output_bias=bias, logit_soft_cap=soft_cap,
    )  # fmt: skip


def forward(g: Graph, spec: FamilySpec) -> None:
    layers_and_head(g, spec, g.rms_norm(g.embed("embed", spec.hidden_size), None, eps=spec.norm_eps))


ARCHITECTURE = replace(family.family("NanoChatForCausalLM", "nanochat", from_hf), forward=forward)
