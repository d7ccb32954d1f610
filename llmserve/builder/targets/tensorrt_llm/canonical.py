"""Writes a Hugging Face checkpoint in canonical form: what tensorrt_llm.LLM (release 1.3 and newer) loads.

One dtype, one file, published tensor names, no code to trust. With W_pack split and lm_head normalized, Baichuan2-7B is
a LlamaForCausalLM; every other architecture keeps its own name and config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.base import CompileJob
from llmserve.builder.targets.tensorrt_llm.shards import Shard
from llmserve.checkpoint.safetensors_writer import Planned, SafetensorsWriter
from llmserve.models.rope import DEFAULT_THETA
from llmserve.models.spec import DecoderSpec, HfConfig, Param
from llmserve.models.weights import EMBED_SOURCE, HEAD_SOURCE

LAYER = re.compile(r"layers\.(\d+)\.(.+?)(\.bias)?")
KEPT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_canonical(job: CompileJob, folder: Path, *, spec: DecoderSpec, config: HfConfig) -> None:
    """Write config.json and model.safetensors into `folder`, one parameter in memory at a time."""
    (folder / "config.json").write_text(json.dumps(canonical_config(spec, config, job.options), indent=2) + "\n")
    with SafetensorsWriter(folder / "model.safetensors", _planned(job.params, spec, job.options)) as writer:
        for param in job.params:
            array = job.load(param.name)
            for tensor in _tensors(param, spec):
                writer.write(tensor.name, tensor.take(array))
            job.advance(param.name, array.nbytes)


def canonical_bytes(params: Sequence[Param], spec: DecoderSpec, options: BuildOptions) -> int:
    return sum(planned.num_bytes for planned in _planned(params, spec, options).values())


def canonical_config(spec: DecoderSpec, config: HfConfig, options: BuildOptions) -> dict[str, Any]:
    if spec.architecture != "BaichuanForCausalLM":
        return {**config, "torch_dtype": options.dtype}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": DEFAULT_THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": options.dtype,
        **{key: config[key] for key in KEPT_IDS if key in config},
    }


def canonical_problems(spec: DecoderSpec, options: BuildOptions) -> list[str]:
    """Why tensorrt_llm.LLM cannot run this network with these options."""
    engines = "build with tensorrt-llm==1.2.1, which compiles engines"
    rules = [
        (spec.rope is not None, f"tensorrt_llm.LLM does not support ALiBi, which this network needs; {engines}"),
        (not options.quantization, f"tensorrt_llm.LLM does not quantize weights itself; {engines}"),
    ]
    return [text for holds, text in rules if not holds]


def _planned(params: Sequence[Param], spec: DecoderSpec, options: BuildOptions) -> dict[str, Planned]:
    return {
        tensor.name: Planned(options.dtype, tensor.shape(param.shape))
        for param in params
        for tensor in _tensors(param, spec)
    }


def _tensors(param: Param, spec: DecoderSpec) -> Iterator[Shard]:
    """The published tensors that one parameter consists of."""
    layer = LAYER.fullmatch(param.name)
    if layer is None:
        names = {"embed": EMBED_SOURCE, "norm": "model.norm.weight", "head": HEAD_SOURCE}
        if not (param.name == "head" and spec.tied_embeddings):
            yield Shard(names[param.name])
        return
    prefix, suffix = f"model.layers.{layer[1]}.", layer[3] or ".weight"
    for name, rows in _modules(layer[2], spec):
        yield Shard(f"{prefix}{name}{suffix}", rows=rows)


def _modules(kind: str, spec: DecoderSpec) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    """Modules in a parameter of a layer, and their rows; an empty list of rows means all of them."""
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inner = spec.intermediate_size
    if kind == "attn.qkv":
        return [
            ("self_attn.q_proj", ((0, q_width),)),
            ("self_attn.k_proj", ((q_width, q_width + kv_width),)),
            ("self_attn.v_proj", ((q_width + kv_width, q_width + 2 * kv_width),)),
        ]
    if kind == "mlp.gate_up":
        return [("mlp.gate_proj", ((0, inner),)), ("mlp.up_proj", ((inner, 2 * inner),))]
    whole = {
        "attn.norm": "input_layernorm",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "attn.output": "self_attn.o_proj",
        "mlp.norm": "post_attention_layernorm",
        "mlp.down": "mlp.down_proj",
    }
    return [(whole[kind], ())]
