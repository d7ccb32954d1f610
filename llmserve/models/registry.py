"""Finds the architecture of a checkpoint. To add an architecture, write its file and list it in FILES."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeAlias

from llmserve.errors import CheckpointError, Unsupported
from llmserve.models.rope import plain_position_limit
from llmserve.models.spec import Architecture, HfConfig

AnyArchitecture: TypeAlias = Architecture[Any]

FILES = (  # in this folder; each defines ARCHITECTURE
    "afmoe",
    "arcee",
    "baichuan",
    "bamba",
    "bert",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon_h1",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_multimodal",
    "gemma3n",
    "gemma3n_multimodal",
    "gemma4",
    "gemma4_multimodal",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granite_moe",
    "granite_moe_hybrid",
    "granite_moe_shared",
    "granite_swa",
    "granitemoe_swa",
    "helium",
    "hunyuan",
    "hunyuan_moe",
    "hyperclovax",
    "internlm2",
    "internlm3",
    "jais2",
    "kimi_k2",
    "lfm2",
    "lfm2_moe",
    "llama",
    "llama4",
    "llama4_text",
    "mellum",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "mixtral",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "roberta",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "xlm_roberta",
)
WITHOUT_HEAD = "Model"  # suffix of networks that are saved without their head, for embeddings
TASK = "ForSequenceClassification"  # suffix of networks that score texts: one row replaces the head
ALL: tuple[AnyArchitecture, ...] = tuple(import_module(f"{__package__}.{name}").ARCHITECTURE for name in FILES)
ARCHITECTURES: Mapping[str, AnyArchitecture] = {name: each for each in ALL for name in each.names}
MODEL_TYPES: Mapping[str, AnyArchitecture] = {each.model_type: each for each in ALL}


def architecture_for(config: HfConfig) -> AnyArchitecture:
    """The architecture by `model_type`, or by `architectures[0]` if that is missing. Raises Unsupported.

    Both must be known: transformers uses the type, but only `architectures` shows that the class is another one.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    model_type = config.get("model_type")
    found = ARCHITECTURES.get(str(name)) if name is not None else MODEL_TYPES.get(str(model_type))
    for ending in (WITHOUT_HEAD, TASK):
        if found is None and (base := str(name)).endswith(ending):
            found = ARCHITECTURES.get(f"{base.removesuffix(ending)}ForCausalLM")
    if found is None or (model_type is not None and str(model_type) not in MODEL_TYPES):
        given = f"architecture {name!r}" if found is None and name is not None else f"model type {model_type!r}"
        raise Unsupported(f"{given} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")
    return MODEL_TYPES.get(str(model_type), found)


def position_limit(config: HfConfig) -> int | None:
    """The longest sequence of any config: by its architecture, else by the usual keys; None if it has no limit."""
    config = {key: value for key, value in config.items() if key != "quantization_config"}  # does not affect it
    try:
        limit: int = architecture_for(config).from_hf(config).max_position_embeddings
    except (Unsupported, CheckpointError):
        return plain_position_limit(config)
    return limit
