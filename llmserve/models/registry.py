"""Which architecture file reads which checkpoint. To add one: write the file, name it here."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.errors import Unsupported
from llmserve.models import baichuan, llama, mistral, qwen2, qwen3
from llmserve.models.spec import Architecture, HfConfig

ARCHITECTURES: Mapping[str, Architecture] = {
    "BaichuanForCausalLM": baichuan.ARCHITECTURE,
    "BaiChuanForCausalLM": baichuan.ARCHITECTURE,  # the spelling of Baichuan-7B
    "LlamaForCausalLM": llama.ARCHITECTURE,
    "MistralForCausalLM": mistral.ARCHITECTURE,
    "Qwen2ForCausalLM": qwen2.ARCHITECTURE,
    "Qwen3ForCausalLM": qwen3.ARCHITECTURE,
}
MODEL_TYPES: Mapping[str, Architecture] = {
    "baichuan": baichuan.ARCHITECTURE,
    "llama": llama.ARCHITECTURE,
    "mistral": mistral.ARCHITECTURE,
    "qwen2": qwen2.ARCHITECTURE,
    "qwen3": qwen3.ARCHITECTURE,
}


def architecture_for(config: HfConfig) -> Architecture:
    """The architecture by `architectures[0]`, or by `model_type` where that is missing. Raises Unsupported."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    found = ARCHITECTURES.get(str(name)) if name is not None else MODEL_TYPES.get(str(config.get("model_type")))
    if found is None:
        given = f"architecture {name!r}" if name is not None else f"model type {config.get('model_type')!r}"
        raise Unsupported(f"{given} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")
    return found
