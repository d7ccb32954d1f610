"""Cohere 2 (Command R7B, Command A): attention parallel to the MLP, and rotary embedding only in window layers."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, Norms, family, read_family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import DEFAULT_WINDOW, has_window, types_by_pattern, windows_by_type

DEFAULTS = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True}  # transformers' defaults
DEFAULT_PATTERN = 4  # every fourth layer has full attention
DEFAULT_LOGIT_SCALE = 0.0625


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_cohere(reader, "Cohere2ForCausalLM")
    pattern = reader.integer("sliding_window_pattern", DEFAULT_PATTERN)
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    usual = types_by_pattern(spec.num_layers, pattern)
    windows = windows_by_type(reader, reader.get("layer_types", usual), spec.num_layers, window)
    reader.expect("use_qk_norm", False)
    reader.finish()
    unturned = [layer for layer in range(spec.num_layers) if not windows or not windows[layer]]
    return replace(spec, windows=windows, unturned=unturned)


def read_cohere(reader: ConfigReader, architecture: str, *, eps_key: str = "layer_norm_eps") -> FamilySpec:
    """Read the keys that all Cohere models share."""
    spec = read_family(reader, architecture, eps_key=eps_key)
    bias = reader.flag("attention_bias")
    logit_scale = reader.positive("logit_scale", DEFAULT_LOGIT_SCALE)
    for key in ("use_parallel_block", "use_gated_activation"):
        reader.expect(key, True)  # in published configs; transformers does not read them
    return replace(
        spec, layer_norm=True, is_parallel=True, interleaved=True, qkv_bias=bias, output_bias=bias,
        logit_scale=logit_scale, norms=Norms(mlp=""),
    )  # fmt: skip


ARCHITECTURE = family("Cohere2ForCausalLM", "cohere2", from_hf)
