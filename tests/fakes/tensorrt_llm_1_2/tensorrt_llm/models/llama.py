from typing import Any, ClassVar

from tensorrt_llm.models.modeling_utils import Layer, PretrainedConfig, PretrainedModel


class LLaMAConfig(PretrainedConfig):
    OWN: ClassVar[dict[str, Any]] = {
        "mlp_bias": False, "attn_bias": False, "rotary_base": 10000.0, "rotary_scaling": None, "residual_mlp": False,
        "disable_weight_only_quant_plugin": False, "moe": None, "remove_duplicated_kv_heads": False,
        "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0,
        "output_multiplier_scale": 1.0, "fc_after_embed": False, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "layer_idx_offset": 0, "has_partial_lora_mask": False,
    }  # fmt: skip
    IMPLICIT = ("tie_word_embeddings",)


class LLaMAForCausalLM(PretrainedModel):
    config_class = LLaMAConfig
    READS = (
        "layer_idx_offset", "use_input_layernorm_in_first_layer", "attn_bias", "rotary_base", "rotary_scaling",
        "attention_multiplier", "moe", "mlp_bias", "residual_mlp", "residual_multiplier", "has_partial_lora_mask",
        "embedding_multiplier", "fc_after_embed", "use_last_layernorm", "output_multiplier_scale",
    )  # fmt: skip

    def layer(self) -> Layer:
        config = self.config
        return Layer(config.head_size, config.attn_bias, config.attn_bias, config.mlp_bias)
