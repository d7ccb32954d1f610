from tensorrt_llm.models.modeling_utils import PretrainedModel


class LLaMAForCausalLM(PretrainedModel):
    pass


class QWenForCausalLM(PretrainedModel):
    pass


class BaichuanForCausalLM(PretrainedModel):
    pass


MODEL_MAP = {
    "LlamaForCausalLM": LLaMAForCausalLM,
    "MistralForCausalLM": LLaMAForCausalLM,
    "Qwen2ForCausalLM": QWenForCausalLM,
    "Qwen3ForCausalLM": QWenForCausalLM,
    "BaichuanForCausalLM": BaichuanForCausalLM,
}
