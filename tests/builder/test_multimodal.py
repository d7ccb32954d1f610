"""Gemma 3 and 4, Mistral 3 and Llama 4 as published: the language model of a checkpoint with towers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmserve.errors import CheckpointError
from llmserve.evaluation.baseline.hf import HfModel
from llmserve.models.registry import architecture_for
from tests.checkpoints import KINDS, WITH_STATES, make_checkpoint
from tests.oracle import oracle_logits, reference_logits, relative_error

PROMPT = tuple(int(i) for i in np.random.default_rng(7).integers(11, 320, size=90))  # 10 is an image's
VISION = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 16, "image_size": 32, "patch_size": 8,
}  # fmt: skip
LLAMA4_VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
GEMMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 8, "position_embedding_size": 16, "standardize": True,
}  # fmt: skip
GEMMA4_AUDIO = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 32,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "mistral in windows": ("mistral", {"sliding_window": 8, "head_dim": 24}),
    "mistral tied": ("mistral", {"tied": True, "sliding_window": None}),
    "ministral3": ("ministral3", {}),
    "ministral3 tied": ("ministral3", {"tied": True, "num_key_value_heads": 1}),
    "gemma3": ("gemma3", {"tied": True}),
    "gemma3 untied": ("gemma3", {"num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "gemma4": ("gemma4", {"tied": True}),
    "gemma4-moe": ("gemma4-moe", {"use_bidirectional_attention": "vision"}),
    "qwen3.5": ("qwen3.5", {"tied": True}),
    "qwen3.5 untied": ("qwen3.5", {"full_attention_interval": 3, "linear_num_value_heads": 4}),
    "qwen3.5-moe": ("qwen3.5-moe", {}),
    "llama4": ("llama4-moe", {}),
    "llama4 with experts in each layer": ("llama4-moe", {"interleave_moe_layer_step": 1, "num_hidden_layers": 4}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_language_model_is_that_of_transformers(variant: str, tmp_path: Path) -> None:
    import torch
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma4Config,
        Gemma4ForConditionalGeneration,
        Llama4Config,
        Llama4ForConditionalGeneration,
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
    )

    torch.manual_seed(1)  # torch takes another seed in each process
    kind, overrides = VARIANTS[variant]
    tied = overrides.get("tied", False)
    text = KINDS[kind] | {key: value for key, value in overrides.items() if key != "tied"}
    del text["architectures"]
    model: Any
    if kind == "llama4-moe":
        model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=LLAMA4_VISION))
    elif kind == "qwen3.5":
        text |= {"tie_word_embeddings": tied}
        own = Qwen3_5Config(text_config=text, vision_config=QWEN_VISION, tie_word_embeddings=tied)
        model = Qwen3_5ForConditionalGeneration(own)
    elif kind == "qwen3.5-moe":
        model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=QWEN_VISION))
    elif kind == "gemma3":
        sizes = {key: value for key, value in VISION.items() if key not in ("model_type", "head_dim")}
        vision: dict[str, Any] = {"vision_config": sizes, "mm_tokens_per_image": 4}
        model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, tie_word_embeddings=tied, **vision))
    elif kind.startswith("gemma4"):
        towers: dict[str, Any] = {"vision_config": GEMMA4_VISION, "audio_config": GEMMA4_AUDIO}
        model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, tie_word_embeddings=tied, **towers))
    else:
        config = Mistral3Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
        model = Mistral3ForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim in (2, 3):
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    wanted = oracle_logits(model.eval(), PROMPT)
    # transformers computes a delta net in chunks, which rounds otherwise: 4e-6 to 1.3e-4 with 16 seeds.
    tolerance = 5e-4 if kind in WITH_STATES else 1e-4 if kind.startswith("gemma4") else 1e-5
    assert relative_error(reference_logits(tmp_path)(PROMPT), wanted) < tolerance
    assert relative_error(HfModel(tmp_path, "float32").logits(PROMPT), wanted) < 1e-6, "a baseline is the same network"


def test_gemma3n_as_published_is_its_language_model(tmp_path: Path) -> None:
    """transformers' own class asks for timm, which makes its vision tower."""
    alone = make_checkpoint(tmp_path / "alone", "gemma3n", with_tokenizer=False)
    wanted = reference_logits(alone)(PROMPT)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(alone / "model.safetensors").items()
    }
    tensors["model.vision_tower.timm_model.conv_stem.weight"] = np.zeros((2, 2), np.float32)
    published = tmp_path / "published"
    published.mkdir()
    save_file(tensors, published / "model.safetensors")
    own = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    text = json.loads((alone / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(own | {"text_config": text}))
    np.testing.assert_array_equal(reference_logits(published)(PROMPT), wanted)


def test_older_configs_say_in_the_language_model_whether_it_is_tied() -> None:
    config: dict[str, Any] = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    config["vision_config"] = {}
    text = KINDS["mistral"] | {"tie_word_embeddings": True}
    assert architecture_for(config).from_hf(config | {"text_config": text}).tied_embeddings
    untied = config | {"text_config": text} | {"tie_word_embeddings": False}
    assert not architecture_for(config).from_hf(untied).tied_embeddings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "text_config must be the config of the language model, got None"),
        ({"model_type": "llama"}, "'llama' of text_config is not supported; supported: 'mistral', 'ministral3'"),
        (KINDS["mistral"] | {"hidden_size": None}, "hidden_size must be an integer"),
        (
            KINDS["ministral3"] | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope parameter llama_4_scaling_beta must be a positive number, it is missing",
        ),
        (KINDS["ministral3"] | {"rope_parameters": [1]}, "rope_parameters or rope_scaling must be an object"),
    ],
)
def test_language_models_that_are_refused(text: Any, message: str) -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    config = json.loads(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        architecture_for(config).from_hf(config)
    assert message in str(caught.value)
