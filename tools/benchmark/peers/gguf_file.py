"""The checkpoint as a GGUF file in float16; llama.cpp's own quantizer makes the others from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from tools.benchmark.shapes import Shape

OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(checkpoint: Path, shape: Shape, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    _add_config(writer, shape)
    with safe_open(checkpoint / "model.safetensors", framework="numpy") as file:
        for name, _ in shape.tensors():
            writer.add_tensor(gguf_name(name), _converted(name, file.get_tensor(name), shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    if name in OUTSIDE:
        return OUTSIDE[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{INSIDE[rest.removesuffix('.weight')]}.weight"


def _add_config(writer: Any, shape: Shape) -> None:
    config = shape.config()
    writer.add_name(shape.name)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("no_vocab")


def _converted(name: str, values: NDArray[Any], shape: Shape) -> NDArray[Any]:
    if values.ndim == 1:
        return values.astype(np.float32)
    if name.endswith("q_proj.weight"):
        return _interleaved(values, shape.heads)
    if name.endswith("k_proj.weight"):
        return _interleaved(values, shape.kv_heads)
    return values


def _interleaved(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """llama.cpp turns neighbouring pairs of a head; the checkpoint pairs its two halves."""
    count, cols = rows.shape
    halves = rows.reshape(heads, 2, count // heads // 2, cols)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(count, cols))
