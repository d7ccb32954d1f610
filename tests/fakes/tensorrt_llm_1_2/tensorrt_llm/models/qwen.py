from typing import Any, ClassVar

from tensorrt_llm.models.modeling_utils import Layer, PretrainedConfig, PretrainedModel


class QWenConfig(PretrainedConfig):
    OWN: ClassVar[dict[str, Any]] = {
        "mlp_bias": False, "attn_bias": True, "rotary_base": 10000.0, "rotary_scaling": None,
        "disable_weight_only_quant_plugin": False, "use_logn_attn": False, "moe": None, "num_labels": 1,
        "mlp_only_layers": (), "decoder_sparse_step": 1,
    }  # fmt: skip
    IMPLICIT = (
        "qwen_type", "seq_length", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
        "tie_word_embeddings",
    )  # fmt: skip


class QWenForCausalLM(PretrainedModel):
    config_class = QWenConfig
    READS = (
        "qwen_type", "seq_length", "attn_bias", "rotary_base", "rotary_scaling", "use_logn_attn", "moe", "mlp_bias",
    )  # fmt: skip

    def layer(self) -> Layer:
        """Whether there are norms of queries and keys is the type's matter, not `qk_layernorm`'s."""
        config = self.config
        return Layer(config.head_size, config.attn_bias, mlp_bias=config.mlp_bias, qk_norm=config.qwen_type == "qwen3")
