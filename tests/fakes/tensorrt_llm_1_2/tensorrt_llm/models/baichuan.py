from typing import Any, ClassVar

from tensorrt_llm.models.modeling_utils import Layer, PretrainedConfig, PretrainedModel


class BaichuanConfig(PretrainedConfig):
    OWN: ClassVar[dict[str, Any]] = {"model_version": None}


class BaichuanForCausalLM(PretrainedModel):
    config_class = BaichuanConfig
    has_stages = False

    def layer(self) -> Layer:
        """It hands no head size on."""
        return Layer(self.config.hidden_size // self.config.num_attention_heads)
