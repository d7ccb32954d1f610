"""OLMoE: Llama with a mixture of experts, and a norm over all heads of q together, and of k."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from llmserve.models import blocks, weights
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.experts import Mixture, mixture_of_experts, mixture_params, read_mixture
from llmserve.models.graph import Graph, Value
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig, Param


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoeSpec(DecoderSpec):
    mixture: Mixture


def from_hf(config: HfConfig) -> OlmoeSpec:
    reader = ConfigReader(config)
    spec = read_decoder(reader, "OlmoeForCausalLM", max_positions=scaled_positions(reader))
    reader.expect("hidden_act", "silu")
    rope = read_rope(reader, spec.head_dim)
    reader.expect("attention_bias", False)
    reader.expect("clip_qkv", None)
    mixture = read_mixture(reader)
    reader.finish()
    return OlmoeSpec.extending(replace(spec, rope=rope), mixture=mixture)


def params(spec: OlmoeSpec) -> list[Param]:
    def attention(layer: int) -> list[Param]:
        source, widths = f"{weights.layer_source(layer)}.self_attn", {"q": spec.q_width, "k": spec.kv_width}
        norms = [
            weights.copied(f"layers.{layer}.attn.{n}_norm", f"{source}.{n}_norm.weight", (width,))
            for n, width in widths.items()
        ]
        return [*weights.qkv(spec, layer), *norms, *weights.output(spec, layer)]

    return weights.pre_norm_decoder(spec, attention, partial(mixture_params, spec, spec.mixture))


def forward(g: Graph, spec: OlmoeSpec) -> None:
    def attention(x: Value, layer: int) -> Value:
        q, k, v = blocks.qkv(g, spec, x, layer)
        q, k = (blocks.norm(g, spec, x, f"layers.{layer}.attn.{n}_norm") for n, x in (("q", q), ("k", k)))
        q, k = blocks.turned(g, spec, spec.rope, q, k)
        return blocks.output(g, spec, blocks.attention(g, spec, (q, k, v), layer), layer)

    blocks.pre_norm_decoder(g, spec, attention, partial(mixture_of_experts, g, spec.mixture))


ARCHITECTURE = Architecture(("OlmoeForCausalLM",), "olmoe", from_hf, params, forward, ignored=(STORED_FREQUENCIES,))
