"""CWM: Llama 3 with a window in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import FULL, SLIDING, windows_by_type

DEFAULTS = {  # transformers' defaults
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
DEFAULT_WINDOW, PATTERN = 8192, 4  # every fourth layer has full attention, beginning with the first


def from_hf(config: HfConfig) -> FamilySpec:
    old_rope = {"rope_parameters": None} if "rope_scaling" in config else {}
    reader = ConfigReader(DEFAULTS | old_rope | dict(config))
    spec = read_family(reader, "CwmForCausalLM")
    usual = [SLIDING if layer % PATTERN else FULL for layer in range(spec.num_layers)]
    window = reader.integer("sliding_window", DEFAULT_WINDOW)
    windows = windows_by_type(reader, reader.get("layer_types", usual), spec.num_layers, window)
    mlp_bias = reader.flag("mlp_bias")
    reader.finish()
    return replace(spec, windows=windows, mlp_bias=mlp_bias)


ARCHITECTURE = family("CwmForCausalLM", "cwm", from_hf)
