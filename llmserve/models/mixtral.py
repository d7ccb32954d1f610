"""Mixtral: Mistral with a mixture of experts, whose weights have a sum of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from llmserve.models import blocks, weights
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.experts import Mixture, mixture_of_experts, mixture_params, read_mixture
from llmserve.models.graph import Graph
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig, Param


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralSpec(DecoderSpec):
    mixture: Mixture


def from_hf(config: HfConfig) -> MixtralSpec:
    reader = ConfigReader(config)
    spec = read_decoder(reader, "MixtralForCausalLM", max_positions=scaled_positions(reader))
    reader.expect("hidden_act", "silu")
    rope = read_rope(reader, spec.head_dim)
    window = 0 if reader.get("sliding_window") is None else reader.integer("sliding_window")
    mixture = read_mixture(reader, renormalize=True)
    reader.finish()
    windows = (window,) * spec.num_layers if window else ()
    return MixtralSpec.extending(replace(spec, rope=rope, windows=windows), mixture=mixture)


def params(spec: MixtralSpec) -> list[Param]:
    names = ("w1", "w3", "w2")
    return weights.pre_norm_decoder(
        spec,
        lambda layer: [*weights.qkv(spec, layer), *weights.output(spec, layer)],
        partial(mixture_params, spec, spec.mixture, module="block_sparse_moe", names=names),
    )


def forward(g: Graph, spec: MixtralSpec) -> None:
    attention = partial(blocks.rotary_attention, g, spec)
    blocks.pre_norm_decoder(g, spec, attention, partial(mixture_of_experts, g, spec.mixture))


ARCHITECTURE = Architecture(("MixtralForCausalLM",), "mixtral", from_hf, params, forward, ignored=(STORED_FREQUENCIES,))
