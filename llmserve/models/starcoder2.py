"""StarCoder 2: layer norms and biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {  # transformers' defaults
    "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": True
}  # fmt: skip


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "Starcoder2ForCausalLM", eps_key="norm_epsilon", plain_mlp="c_fc")
    window = reader.integer("sliding_window", 0, minimum=0)
    bias = reader.flag("use_bias", True)
    reader.expect("norm_type", "layer_norm")
    reader.expect("mlp_type", "default")
    reader.finish()
    return replace(
        spec, windows=(window,) * spec.num_layers if window else (), layer_norm=True, norm_bias=True, qkv_bias=bias,
        output_bias=bias, mlp_bias=bias, mlp_down="c_proj",
    )  # fmt: skip


ARCHITECTURE = family("Starcoder2ForCausalLM", "starcoder2", from_hf)
