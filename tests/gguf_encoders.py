"""Tiny GGUF files of the networks in `tests.embedders`, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.gguf_files import add_metadata, finish

MODES = {"mean": 1, "cls": 2, "lasttoken": 3}
LEFT_OUT = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")


def convert_encoder(path: Path, folder: Path, pooling: str = "", metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the folder's network into the file `path`. `pooling`: "rank" of a reranker."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "bert")
    first = 0 if config["model_type"] == "bert" else config["pad_token_id"] + 1
    entries: dict[str, Any] = {
        "bert.context_length": config["max_position_embeddings"] - first,
        "bert.embedding_length": config["hidden_size"],
        "bert.block_count": config["num_hidden_layers"],
        "bert.feed_forward_length": config["intermediate_size"],
        "bert.attention.head_count": config["num_attention_heads"],
        "bert.attention.layer_norm_epsilon": config["layer_norm_eps"],
        "bert.attention.causal": False,
        "bert.pooling_type": 4 if pooling == "rank" else MODES.get(pooling),
    }
    add_metadata(writer, entries | dict(metadata or {}))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("bert.").removeprefix("roberta.")
        if name in LEFT_OUT:
            continue
        if name.startswith("classifier.") and config["model_type"] == "bert":
            name = name.replace("classifier.", "classifier.out_proj.")
        stored = tensor[first:] if name == "embeddings.position_embeddings.weight" else tensor
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        writer.add_tensor(stored_name, np.ascontiguousarray(stored, np.float32))
    finish(writer)
    return path


def word_pieces_metadata(folder: Path) -> dict[str, Any]:
    """Of the tokenizer.json of a BERT: `▁` begins a word, and nothing stands for what goes on."""
    content = json.loads((folder / "tokenizer.json").read_text())
    special = {added["id"]: added["content"] for added in content["added_tokens"]}
    ids: dict[str, int] = content["model"]["vocab"]
    tokens = [
        text if token in special else text.removeprefix("##") if text.startswith("##") else f"▁{text}"
        for text, token in sorted(ids.items(), key=lambda item: item[1])
    ]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": ids["[UNK]"],
        "tokenizer.ggml.padding_token_id": ids["[PAD]"],
        "tokenizer.ggml.cls_token_id": ids["[CLS]"],
        "tokenizer.ggml.seperator_token_id": ids["[SEP]"],
    }
