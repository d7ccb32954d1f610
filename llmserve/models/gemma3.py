"""Gemma 3, text only: Gemma 2 with normed queries and keys, and another rotary embedding in layers with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmserve.errors import Unsupported
from llmserve.models import blocks
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.gemma2 import DEFAULTS, NORM_OFFSET, GemmaSpec, gemma_decoder, gemma_params, read_gemma
from llmserve.models.graph import Graph, Value
from llmserve.models.rope import STORED_FREQUENCIES, read_rope
from llmserve.models.spec import Architecture, HfConfig, Param, Rope
from llmserve.models.windows import FULL, SLIDING

DEFAULT_PATTERN = 6  # every sixth layer sees everything
THETA = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}  # old key, default


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Spec(GemmaSpec):
    local_rope: Rope  # of layers with a window


def from_hf(config: HfConfig) -> Gemma3Spec:
    if "vision_config" in config or "text_config" in config:
        raise Unsupported(
            "Gemma3ForConditionalGeneration has a vision tower (vision_config), which is not supported; save its "
            "language model as a checkpoint of its own, Gemma3ForCausalLM"
        )
    reader = ConfigReader(DEFAULTS | dict(config))
    sizes = read_decoder(reader, "Gemma3ForCausalLM")
    pattern = reader.integer("sliding_window_pattern", DEFAULT_PATTERN)
    types = [SLIDING if (i + 1) % pattern else FULL for i in range(sizes.num_layers)]
    rope, local_rope = (_read_rope(reader, sizes.head_dim, kind) for kind in (FULL, SLIDING))
    spec = read_gemma(reader, replace(sizes, rope=rope), types)
    reader.expect("attn_logit_softcapping", None)
    logit_soft_cap = reader.optional_positive("final_logit_softcapping")
    reader.finish()
    return Gemma3Spec.extending(replace(spec, logit_soft_cap=logit_soft_cap), local_rope=local_rope)


def params(spec: Gemma3Spec) -> list[Param]:
    return gemma_params(spec, has_head_norms=True)


def forward(g: Graph, spec: Gemma3Spec) -> None:
    def attention(x: Value, layer: int) -> Value:
        q, k, v = blocks.qkv(g, spec, x, layer)
        q, k = blocks.head_norms(g, spec, (q, k), layer, offset=NORM_OFFSET)
        q, k = blocks.turned(g, spec, spec.local_rope if spec.window(layer) else spec.rope, q, k)
        y = blocks.attention(g, spec, (q, k, v), layer, scale=spec.attention_scale)
        return blocks.output(g, spec, y, layer)

    gemma_decoder(g, spec, attention)


def _read_rope(reader: ConfigReader, head_dim: int, kind: str) -> Rope:
    """Of layers of one type. New style: `rope_parameters` has both by name. Old: `rope_scaling` is the global one's."""
    key, default = THETA[kind]
    nested = reader.get("rope_parameters")
    given = reader.get("rope_scaling", {}) if kind == FULL else {}
    if nested is not None:
        if not isinstance(nested, Mapping) or not nested.keys() <= THETA.keys():
            reader.problems.append(f"rope_parameters must be an object with {FULL} and {SLIDING}, got {nested!r}")
            nested = {}
        given = nested.get(kind) or {}
    if isinstance(given, Mapping):
        given = {"rope_theta": reader.get(key, default)} | dict(given)
    own = {"rope_scaling": given, "max_position_embeddings": reader.get("max_position_embeddings")}
    inner = ConfigReader(own)
    rope = read_rope(inner, head_dim)
    reader.problems += [f"{kind}: {problem}" for problem in inner.problems]
    return rope


ARCHITECTURE = Architecture(
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),  # the second is refused with a reason
    "gemma3_text",
    from_hf,
    params,
    forward,
    ignored=(STORED_FREQUENCIES,),
)
