"""Writes a checkpoint (of Llama's, OLMoE's or LFM2's form) as a GGUF file with unchanged numbers. llama.cpp's own
quantizer makes the other files from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from llmserve.checkpoint.gguf.architectures import ARCHITECTURES
from tools.benchmark.job import Prepared

# The types that llama.cpp's users would choose; its quantizer keeps the output matrix of Q4_0 in Q6_K.
FILE_TYPES = {"int8": "Q8_0", "int4": "Q4_0", "Q4_K_M": "Q4_K_M", "gguf": "Q4_K_M"}
GPT_OSS = "gpt_oss"  # its experts are in MXFP4 in every file

NAMES = {"qwen3_moe": "qwen3moe", GPT_OSS: "gpt-oss"}  # where GGUF's names differ
PACKED = re.compile(r"\.experts\.(gate_up|down)_proj_(blocks|scales|bias)$")
MXFP4 = gguf.GGMLQuantizationType.MXFP4
EXPERT = re.compile(r"(\.experts\.)(\d+)\.")


def write_gguf(checkpoint: Path, path: Path) -> None:
    """`checkpoint`: a Hugging Face folder with one file of weights, in float16 or float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture(config))
    _add_config(writer, config)
    with safe_open(checkpoint / "model.safetensors", framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118
            if PACKED.search(name):
                for part, values in _experts(name, file.get_tensor):
                    writer.add_tensor(part, values, raw_dtype=MXFP4 if values.dtype == np.uint8 else None)
            elif not (found := EXPERT.search(name)):
                writer.add_tensor(gguf_name(name, config), _converted(name, file.get_tensor(name), config))
            elif found[2] == "0":  # all experts are one tensor
                each = [EXPERT.sub(rf"\g<1>{number}.", name) for number in range(config["num_experts"])]
                stacked = np.stack([file.get_tensor(one) for one in each])
                writer.add_tensor(gguf_name(name, config), stacked)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def write_adapter_gguf(folder: Path, path: Path) -> None:
    """`folder`: a LoRA adapter in PEFT's format, with one rank, for a network of Llama's form."""
    config = json.loads((folder / "adapter_config.json").read_text())
    network = json.loads(Path(config["base_model_name_or_path"], "config.json").read_text())
    writer = gguf.GGUFWriter(path, network["model_type"])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    with safe_open(folder / "adapter_model.safetensors", framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118
            matrix, _, which = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
            values = file.get_tensor(name)
            converted = values if which == "lora_A" else _converted(f"{matrix}.weight", values, network)
            writer.add_tensor(f"{gguf_name(f'{matrix}.weight', network)}.{which.lower()}", converted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str, config: Mapping[str, Any]) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight; of an expert: the tensor of all experts."""
    return ARCHITECTURES[architecture(config)].to_gguf(name)


def architecture(config: Mapping[str, Any]) -> str:
    """llama.cpp's name of the architecture."""
    name: str = config["model_type"]
    return NAMES.get(name, name)


def _experts(name: str, read: Callable[[str], NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields a tensor of gpt-oss in GGUF's form: gates and ups are two tensors, and a block has its exponent and 16
    bytes with the codes of inputs i and i + 16."""
    stem, _, kind = name.rpartition("_")
    layer = stem.removeprefix("model.layers.").partition(".")[0]
    if kind == "scales":
        return  # stored with the blocks
    values = read(name)
    if kind == "blocks":
        codes = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], 32)
        blocks = np.concatenate([read(f"{stem}_scales")[..., None], codes[..., :16] | codes[..., 16:] << 4], -1)
        values, suffix = blocks.reshape(*blocks.shape[:2], -1), "weight"
    else:
        values, suffix = values.astype(np.float32), "bias"
    parts = {"gate": values[:, ::2], "up": values[:, 1::2]} if "gate_up" in stem else {"down": values}
    for part, chosen in parts.items():
        yield f"blk.{layer}.ffn_{part}_exps.{suffix}", np.ascontiguousarray(chosen)


def _add_config(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_name("network")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    kv_heads, types = config["num_key_value_heads"], config.get("layer_types", ())
    has_convolutions = "conv" in types
    writer.add_head_count_kv([0 if each == "conv" else kv_heads for each in types] if has_convolutions else kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    is_float32 = config["torch_dtype"] == "float32"
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if is_float32 else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("no_vocab")
    if num_experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config or config["model_type"] == GPT_OSS:
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])


def _converted(name: str, values: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    if values.ndim == 1 or name.endswith(("mlp.gate.weight", "mlp.router.weight")):
        return values.astype(np.float32)
    if name.endswith("conv.conv.weight"):
        return values[:, 0].astype(np.float32)
    if config["model_type"] != "llama":  # GGUF's other networks also pair the two halves of a head
        return values
    if name.endswith("q_proj.weight"):
        return _interleaved(values, config["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        return _interleaved(values, config["num_key_value_heads"])
    return values


def _interleaved(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorders rows: llama.cpp rotates neighbouring pairs of a head; the checkpoint pairs its two halves."""
    count, cols = rows.shape
    halves = rows.reshape(heads, 2, count // heads // 2, cols)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(count, cols))


def file_type(job: Prepared) -> str:
    """The type's name in llama.cpp's quantizer."""
    is_gpt_oss = json.loads((job.checkpoint / "config.json").read_text())["model_type"] == GPT_OSS
    return "MXFP4_MOE" if is_gpt_oss and job.precision == "gguf" else FILE_TYPES.get(job.precision, "F16")


def gguf_path(job: Prepared) -> Path:
    return job.file(f"{file_type(job)}.gguf")


def read_by_one_token(path: Path) -> int:
    """Bytes that one token reads: all weights except idle experts and an embedding that is not the head."""
    file = gguf.GGUFReader(path)
    fields = {name.rpartition(".")[2]: field.contents() for name, field in file.fields.items()}
    share = fields.get("expert_used_count", 1) / fields.get("expert_count", 1)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in file.tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return round(sum(size * (share if "_exps." in name else 1) for name, size in sizes.items()))
