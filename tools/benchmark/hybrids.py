"""A few layers of published networks with states, with random numbers: small enough for quick runs on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.models.registry import architecture_for

COMMON: Mapping[str, Any] = {
    "num_hidden_layers": 2, "vocab_size": 8192, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Two layers, one of each kind."""

    name: str
    fields: Mapping[str, Any]  # of its config

    def config(self) -> dict[str, Any]:
        return {**COMMON, **self.fields}

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See `Shape.tensors`."""
        architecture = architecture_for(self.config())
        params = architecture.params(architecture.from_hf(self.config()))
        yield from {name: shape for param in params
                    for name, shape in zip(param.sources, param.source_shapes, strict=True)}.items()  # fmt: skip


HYBRIDS = {
    hybrid.name: hybrid
    for hybrid in (
        Hybrid("lfm2-1.2b", {
            "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048,
            "intermediate_size": 8192, "block_auto_adjust_ff_dim": False, "num_attention_heads": 32,
            "num_key_value_heads": 8, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
            "conv_bias": False, "norm_eps": 1e-5, "rope_theta": 1000000.0,
        }),
        Hybrid("qwen3.5-4b", {
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 2560,
            "intermediate_size": 9216, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
            "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        }),
        Hybrid("granite-4.0-h-1b", {
            "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 1536,
            "intermediate_size": 4096, "shared_intermediate_size": 4096, "num_local_experts": 0,
            "num_attention_heads": 12, "num_key_value_heads": 4, "layer_types": ["mamba", "attention"],
            "position_embedding_type": "nope", "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1,
            "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
            "mamba_proj_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22, "logits_scaling": 6.0,
        }),
    )
}  # fmt: skip
