"""config.json of an engine directory, in TensorRT-LLM's format and with its names where it has them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmserve import __version__
from llmserve.builder.options import BuildOptions
from llmserve.models.graph import Program
from llmserve.models.spec import DecoderSpec


def engine_config(
    spec: DecoderSpec,
    program: Program,
    options: BuildOptions,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    max_beam_width: int = 1,
) -> dict[str, Any]:
    network = network_config(spec, options, tp_size=tp_size, pp_size=pp_size)
    return {
        "version": __version__,
        "pretrained_config": {
            **network,
            **_computation(program, options),
            **_pooled(spec, program),
            **_hidden(program),
        },
        "build_config": {
            "max_batch_size": options.max_batch_size,
            "max_num_tokens": options.max_num_tokens,
            "max_seq_len": options.max_seq_len,
            "max_input_len": options.max_seq_len - (not program.pools),  # one token of the sequence is output
            "max_beam_width": max_beam_width,
            "kv_cache_type": "PAGED",
            "plugin_config": {
                "paged_kv_cache": True,
                "remove_input_padding": True,
                "tokens_per_block": options.tokens_per_block,
            },
        },
    }


def _hidden(program: Program) -> dict[str, Any]:
    return {"hidden_width": program.hidden_width} if program.hidden_width else {}


def network_config(spec: DecoderSpec, options: BuildOptions, *, tp_size: int, pp_size: int) -> dict[str, Any]:
    """Keys of PretrainedConfig that are the same on every target: sizes, positions, ranks."""
    return {
        "architecture": spec.architecture,
        "dtype": options.dtype,
        "logits_dtype": "float32",
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_size": spec.head_dim,
        "norm_epsilon": spec.norm_eps,
        "position_embedding_type": _positions(spec),
        "mapping": {
            "world_size": tp_size * pp_size,
            "tp_size": tp_size,
            "pp_size": pp_size,
        },
    }


def _positions(spec: DecoderSpec) -> str:
    if spec.rope:
        return "rope_gpt_neox"
    return "alibi" if spec.pooling is None else "learned_absolute"


def _pooled(spec: DecoderSpec, program: Program) -> dict[str, Any]:
    """The output of an embedding or scoring engine, instead of tokens; llmserve's own key."""
    if spec.pooling is None:
        return {}
    said = {key: value for key, value in asdict(spec.pooling).items() if key != "answers" or value}
    return {"pooling": {**said, "width": program.output_width}}


def _computation(program: Program, options: BuildOptions) -> dict[str, Any]:
    weights = options.weights
    return {
        "hidden_act": next(op.attrs["activation"] for op in program.ops if "activation" in op.attrs),
        "quantization": {
            "quant_algo": weights.quant_algo,
            "kv_cache_quant_algo": options.cache().quant_algo,
            **({"group_size": weights.group} if weights.is_rounded else {}),
        },
    }
