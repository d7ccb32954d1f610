"""The trained weights as a Hugging Face folder for any loader of Baichuan2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from .model import ModelConfig, TinyBaichuan
from .tokenizer import ASSISTANT_ID, BOS_ID, EOS_ID, PAD_ID, USER_ID

MAX_NEW_TOKENS = 32


def export_checkpoint(model: TinyBaichuan, tokenizer_model: Path, output: Path) -> None:
    """Write config, float16 safetensors and tokenizer files into the new folder `output`."""
    output.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(model), output / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(tokenizer_model, output / "tokenizer.model")
    documents = {
        "config.json": _config(model.config),
        "generation_config.json": _generation_config(),
        "tokenizer_config.json": _tokenizer_config(model.config.max_positions),
        "special_tokens_map.json": {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<unk>",
        },
    }
    for name, document in documents.items():
        (output / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _tensors(model: TinyBaichuan) -> dict[str, Tensor]:
    named = {
        name if name.startswith("lm_head.") else f"model.{name}": parameter.detach().cpu()
        for name, parameter in model.named_parameters()
    }
    # NormHead normalizes again; unit rows use float16's range best
    named["lm_head.weight"] = functional.normalize(named["lm_head.weight"])
    return {name: tensor.to(torch.float16).contiguous() for name, tensor in named.items()}


def _config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["BaichuanForCausalLM"],
        "model_type": "baichuan",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": config.max_positions,
        "model_max_length": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "position_embedding": "rope",
        "norm_head": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "float16",
        "z_loss_weight": 0,
        "user_token_id": USER_ID,
        "assistant_token_id": ASSISTANT_ID,
    }


def _generation_config() -> dict[str, Any]:
    return {
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "user_token_id": USER_ID,
        "assistant_token_id": ASSISTANT_ID,
        "max_new_tokens": MAX_NEW_TOKENS,
        "do_sample": False,
    }


def _tokenizer_config(max_length: int) -> dict[str, Any]:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    return {
        "tokenizer_class": "BaichuanTokenizer",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "sp_model_kwargs": {},
        "use_fast": False,
    } | {name: _added_token(content) for name, content in tokens.items()}


def _added_token(content: str) -> dict[str, Any]:
    return {
        "__type": "AddedToken",
        "content": content,
        "lstrip": False,
        "normalized": True,
        "rstrip": False,
        "single_word": False,
    }
