from tensorrt_llm.models.baichuan import BaichuanForCausalLM
from tensorrt_llm.models.llama import LLaMAForCausalLM
from tensorrt_llm.models.modeling_utils import PretrainedModel
from tensorrt_llm.models.qwen import QWenForCausalLM

MODEL_MAP: dict[str, type[PretrainedModel]] = {
    "LlamaForCausalLM": LLaMAForCausalLM,
    "MistralForCausalLM": LLaMAForCausalLM,
    "Qwen2ForCausalLM": QWenForCausalLM,
    "Qwen3ForCausalLM": QWenForCausalLM,
    "BaichuanForCausalLM": BaichuanForCausalLM,
}
