"""SmolLM3: Llama without a rotary embedding in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import FULL, SLIDING, windows_by_type

DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}  # transformers' defaults
DEFAULT_INTERVAL = 4  # of layers without a rotary embedding


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "SmolLM3ForCausalLM")
    unturned = read_unturned(reader, spec.num_layers)
    window = reader.integer("sliding_window", 0, minimum=0) if reader.flag("use_sliding_window") else 0
    usual = [SLIDING if window and layer in unturned else FULL for layer in range(spec.num_layers)]
    windows = windows_by_type(reader, reader.get("layer_types", usual), spec.num_layers, window)
    bias = reader.flag("attention_bias")
    mlp_bias = reader.flag("mlp_bias")
    reader.finish()
    return replace(spec, windows=windows, unturned=unturned, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def read_unturned(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Layers without a rotary embedding: those with 0 in `no_rope_layers`."""
    interval = reader.integer("no_rope_layer_interval", DEFAULT_INTERVAL)
    listed = reader.get("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(num_layers)])
    if not isinstance(listed, list) or len(listed) < num_layers or not set(listed) <= {0, 1}:
        reader.problems.append(f"no_rope_layers must be a list of num_hidden_layers ({num_layers}) times 0 or 1")
        return ()
    return tuple(layer for layer in range(num_layers) if not listed[layer])


ARCHITECTURE = family("SmolLM3ForCausalLM", "smollm3", from_hf)
