"""What a GPU would compute, computed by our CPU engine: from the ranks' files of an engine, or a canonical checkpoint.

The shards are joined by rules written down here a second time, so that a mistake in one place shows.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings

Arrays = dict[str, NDArray[Any]]
MODEL_TYPES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "BaichuanForCausalLM": "baichuan",
}  # fmt: skip
_built: dict[str, Path] = {}


def open_network(checkpoint: Path, limits: dict[str, int], settings: EngineSettings) -> InflightEngine:
    """An engine of a Hugging Face folder, compiled once for each content and limits."""
    config = json.loads((checkpoint / "config.json").read_text())
    key = hashlib.sha256(json.dumps([config, limits]).encode())
    for file in sorted(checkpoint.glob("*.safetensors")):
        key.update(file.read_bytes())
    name = key.hexdigest()
    if name not in _built:
        _built[name] = _scratch() / "engine"
        options = BuildOptions.from_flat({"dtype": config["torch_dtype"], **limits})
        build_engine(checkpoint, _built[name], options)
    engine = open_engine(_built[name], settings)
    assert isinstance(engine, InflightEngine)
    return engine


def joined_checkpoint(engine_dir: Path, *, window: int | None) -> Path:
    """An engine's ranks as one Hugging Face folder."""
    config = json.loads((engine_dir / "config.json").read_text())["pretrained_config"]
    ranks = [load_file(engine_dir / f"rank{rank}.engine") for rank in range(config["mapping"]["world_size"])]
    folder = _scratch()
    (folder / "config.json").write_text(json.dumps(_hf_config(config, window)))
    save_file(_join(ranks, config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="fake-trtllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _hf_config(config: dict[str, Any], window: int | None) -> dict[str, Any]:
    architecture = config["architecture"]
    hf = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "tie_word_embeddings": False,
        "rms_norm_eps": config["norm_epsilon"],
        "head_dim": config["head_size"],
        "torch_dtype": config["dtype"],
        **{
            key: config[key]
            for key in (
                "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "hidden_act",
            )
        },
    }  # fmt: skip
    if architecture == "BaichuanForCausalLM":
        positions = {"position_embedding": "alibi", "model_max_length": config["max_position_embeddings"]}
        return hf | positions | {"norm_head": False}  # lm_head is normalized already
    hf |= {"max_position_embeddings": config["max_position_embeddings"], "rope_theta": config["rotary_base"]}
    hf |= {"rope_scaling": config["rotary_scaling"], "attention_bias": config["attn_bias"]}
    if architecture == "MistralForCausalLM":
        hf["sliding_window"] = window
    if architecture == "Qwen2ForCausalLM":
        hf["attention_bias"] = False  # it is not a key there: the bias is a matter of course
    return hf


def _join(ranks: list[Arrays], config: dict[str, Any]) -> Arrays:
    tp, stages = config["mapping"]["tp_size"], config["mapping"]["pp_size"]
    layers = config["num_hidden_layers"] // stages
    first, last = ranks[:tp], ranks[-tp:]
    tensors = {
        "model.embed_tokens.weight": first[0]["transformer.vocab_embedding.weight"],
        "model.norm.weight": last[0]["transformer.ln_f.weight"],
        "lm_head.weight": np.concatenate([rank["lm_head.weight"] for rank in last])[: config["vocab_size"]],
    }
    for index in range(config["num_hidden_layers"]):
        stage = ranks[index // layers * tp : (index // layers + 1) * tp]
        prefix = f"transformer.layers.{index % layers}."
        parts = [{k.removeprefix(prefix): v for k, v in rank.items() if k.startswith(prefix)} for rank in stage]
        tensors |= {f"model.layers.{index}.{k}": v for k, v in _layer(parts, config).items()}
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def _layer(parts: list[Arrays], config: dict[str, Any]) -> Arrays:
    def weights(name: str) -> list[NDArray[Any]]:
        return [_plain(part, name, config["quantization"]["quant_algo"]) for part in parts]

    tensors = {
        "input_layernorm.weight": parts[0]["input_layernorm.weight"],
        "post_attention_layernorm.weight": parts[0]["post_layernorm.weight"],
        "mlp.gate_proj.weight": np.concatenate(weights("mlp.fc")),
        "mlp.up_proj.weight": np.concatenate(weights("mlp.gate")),
        "mlp.down_proj.weight": np.concatenate(weights("mlp.proj"), axis=1),
        "self_attn.o_proj.weight": np.concatenate(weights("attention.dense"), axis=1),
    }
    qkv = {f"self_attn.{n}_proj.weight": value for n, value in _qkv(weights("attention.qkv"), config).items()}
    if config["architecture"] == "BaichuanForCausalLM":
        qkv = {"self_attn.W_pack.weight": np.concatenate(list(qkv.values()))}
    tensors |= qkv
    if "attention.qkv.bias" in parts[0]:
        biases = _qkv([part["attention.qkv.bias"] for part in parts], config)
        tensors |= {f"self_attn.{n}_proj.bias": value for n, value in biases.items()}
    if config["qk_layernorm"]:
        tensors |= {f"self_attn.{n}_norm.weight": parts[0][f"attention.{n}_layernorm.weight"] for n in "qk"}
    return tensors


def _qkv(parts: list[NDArray[Any]], config: dict[str, Any]) -> Arrays:
    """Query heads of every rank; key and value heads of those ranks that hold another one than the rank before."""
    tp, head = len(parts), config["head_size"]
    q = config["num_attention_heads"] // tp * head
    kv_heads = config["num_key_value_heads"]
    kv = max(1, kv_heads // tp) * head
    owners = parts[:: max(1, tp // kv_heads)]
    return {
        "q": np.concatenate([part[:q] for part in parts]),
        "k": np.concatenate([part[q : q + kv] for part in owners]),
        "v": np.concatenate([part[q + kv :] for part in owners]),
    }


def _plain(part: Arrays, name: str, quant_algo: str | None) -> NDArray[Any]:
    """A weight [outputs, inputs], whatever it is stored as."""
    stored = part[f"{name}.weight"]
    if quant_algo is None:
        return stored
    scales = part[f"{name}.per_channel_scale"]
    if quant_algo == "W4A16":
        low, high = (stored << 4).astype(np.int8) >> 4, stored >> 4
        stored = np.stack([low, high], axis=2).reshape(len(stored), -1)
    return (stored.astype(np.float32) * scales.astype(np.float32)).T.astype(scales.dtype)
