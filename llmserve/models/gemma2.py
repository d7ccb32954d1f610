"""Gemma 2: norms before and after each block, soft caps, a sliding window in every second layer.

Norms multiply with 1 + weight. The embedding is multiplied by the root of the hidden size: in float32 whatever the
engine's dtype, as transformers does in float32; in bfloat16 it rounds that root first (55.43 to 55.5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmserve.models import blocks, weights
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.graph import Graph, Value
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig, Param
from llmserve.models.windows import DEFAULT_WINDOW, FULL, SLIDING, windows_by_type

DEFAULTS = {  # transformers', where the key is missing
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
NORM_OFFSET = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaSpec(DecoderSpec):
    """Of Gemma 2, and what Gemma 3 shares with it."""

    activation: str
    attention_scale: float
    attention_soft_cap: float  # 0: none
    logit_soft_cap: float  # 0: none


def from_hf(config: HfConfig) -> GemmaSpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    sizes = read_decoder(reader, "Gemma2ForCausalLM", max_positions=scaled_positions(reader))
    types = [FULL if i % 2 else SLIDING for i in range(sizes.num_layers)]
    spec = read_gemma(reader, replace(sizes, rope=read_rope(reader, sizes.head_dim)), types)
    soft_cap = reader.optional_positive("attn_logit_softcapping", 50.0)
    logit_soft_cap = reader.optional_positive("final_logit_softcapping", 30.0)
    reader.finish()
    return replace(spec, attention_soft_cap=soft_cap, logit_soft_cap=logit_soft_cap)


def read_gemma(reader: ConfigReader, spec: DecoderSpec, usual_types: list[str]) -> GemmaSpec:
    """What Gemma 2 and 3 have in common, without soft caps. `usual_types`: of layers, where the config names none."""
    reader.expect("hidden_activation", *ACTIVATIONS)
    for key in ("attention_bias", "use_bidirectional_attention"):
        reader.expect(key, False)
    window = reader.integer("sliding_window", DEFAULT_WINDOW)
    windows = windows_by_type(reader, reader.get("layer_types", usual_types), spec.num_layers, window)
    return GemmaSpec.extending(
        replace(spec, windows=windows),
        activation=ACTIVATIONS.get(str(reader.get("hidden_activation")), ""),
        attention_scale=reader.positive("query_pre_attn_scalar") ** -0.5,
        attention_soft_cap=0.0,
        logit_soft_cap=0.0,
    )


def params(spec: GemmaSpec) -> list[Param]:
    return gemma_params(spec, has_head_norms=False)


def forward(g: Graph, spec: GemmaSpec) -> None:
    def attention(x: Value, layer: int) -> Value:
        q, k, v = blocks.qkv(g, spec, x, layer)
        q, k = blocks.turned(g, spec, spec.rope, q, k)
        y = blocks.attention(g, spec, (q, k, v), layer, scale=spec.attention_scale, soft_cap=spec.attention_soft_cap)
        return blocks.output(g, spec, y, layer)

    gemma_decoder(g, spec, attention)


def gemma_params(spec: GemmaSpec, *, has_head_norms: bool) -> list[Param]:
    def layer(i: int) -> list[Param]:
        name, source = f"layers.{i}", weights.layer_source(i)
        return [
            weights.norm(spec, f"{name}.attn.norm", f"{source}.input_layernorm"),
            *weights.qkv(spec, i),
            *(weights.head_norms(spec, i) if has_head_norms else ()),
            *weights.output(spec, i),
            weights.norm(spec, f"{name}.attn.post_norm", f"{source}.post_attention_layernorm"),
            weights.norm(spec, f"{name}.mlp.norm", f"{source}.pre_feedforward_layernorm"),
            *weights.gated_mlp(spec, i),
            weights.norm(spec, f"{name}.mlp.post_norm", f"{source}.post_feedforward_layernorm"),
        ]

    return weights.decoder(spec, layer)


def gemma_decoder(g: Graph, spec: GemmaSpec, attention: blocks.Block) -> None:
    def norm(x: Value, name: str) -> Value:
        return blocks.norm(g, spec, x, name, offset=NORM_OFFSET)

    x = g.embed("embed", spec.hidden_size, scale=spec.hidden_size**0.5)
    for layer in range(spec.num_layers):
        name = f"layers.{layer}"
        x = g.add(x, norm(attention(norm(x, f"{name}.attn.norm"), layer), f"{name}.attn.post_norm"))
        y = blocks.gated_mlp(g, spec, norm(x, f"{name}.mlp.norm"), layer, activation=spec.activation)
        x = g.add(x, norm(y, f"{name}.mlp.post_norm"))
    g.logits(norm(g.select_rows(x), "norm"), "head", soft_cap=spec.logit_soft_cap)


ARCHITECTURE = Architecture(("Gemma2ForCausalLM",), "gemma2", from_hf, params, forward, ignored=(STORED_FREQUENCIES,))
