"""Writes a TensorRT-LLM checkpoint: config.json and rank<i>.safetensors, one parameter in memory at a time.

Baichuan2-7B becomes a Llama checkpoint: our parameters already have W_pack split and lm_head normalized, and the rest
is Llama. The 13B form stays Baichuan because of its ALiBi. Keys of config.json are those of release 1.2's
PretrainedConfig (tensorrt_llm/models/modeling_utils.py), LLaMAConfig, QWenConfig and BaichuanConfig
(models/{llama,qwen,baichuan}/config.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.config import network_config
from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.base import CompileJob
from llmserve.builder.targets.tensorrt_llm.expressible import QWEN_TYPES
from llmserve.builder.targets.tensorrt_llm.options import TensorrtLlmOptions
from llmserve.builder.targets.tensorrt_llm.shards import Mapping, Shard, mappings, shards_of
from llmserve.checkpoint.safetensors_writer import Planned, SafetensorsWriter
from llmserve.models.number_formats import WeightFormat
from llmserve.models.rope import DEFAULT_THETA, rope_values
from llmserve.models.spec import Combine, DecoderSpec, HfConfig, Param

ROTARY_SCALINGS = {  # rope type -> the numbers in its dictionary
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
PLUGIN_MULTIPLE = 64  # the weight-only kernels take sizes that are multiples of this
DEFAULT_SEQ_LENGTH = 8192  # as in QWenConfig.from_hugging_face; read by log-n attention, which no supported network has

Quantize: TypeAlias = Callable[[NDArray[Any], WeightFormat], tuple[NDArray[np.int8], NDArray[Any]]]


def write_checkpoint(job: CompileJob, folder: Path, *, spec: DecoderSpec, config: HfConfig, quantize: Quantize) -> None:
    """Write every rank's file and config.json into `folder`.

    `quantize`: engine.tensorrt_llm.library.quantize_weight, or an equivalent.
    """
    options = job.options
    (folder / "config.json").write_text(json.dumps(checkpoint_config(job, spec, config), indent=2) + "\n")
    with ExitStack() as stack:
        writers = {
            mapping: stack.enter_context(
                SafetensorsWriter(
                    folder / f"rank{mapping.rank}.safetensors", _planned(job.params, spec, mapping, options)
                )
            )
            for mapping in _ranks(options)
        }
        for param in job.params:
            array = job.load(param.name)
            for mapping, writer in writers.items():
                for shard in shards_of(param, spec, mapping):
                    _write(writer, shard, shard.take(array), options, quantize)
            job.advance(param.name, array.nbytes)


def _write(
    writer: SafetensorsWriter, shard: Shard, array: NDArray[Any], options: BuildOptions, quantize: Quantize
) -> None:
    if shard.is_quantized and options.quantization:
        values, scales = quantize(array, options.weights)
        writer.write(shard.name, values)
        writer.write(_scale_name(shard), scales)
    else:
        writer.write(shard.name, array)


def _planned(params: Sequence[Param], spec: DecoderSpec, mapping: Mapping, options: BuildOptions) -> dict[str, Planned]:
    """The contents of one rank's file."""
    tensors = {}
    for param in params:
        for shard in shards_of(param, spec, mapping):
            shape = shard.shape(param.shape)
            if not (shard.is_quantized and options.quantization):
                tensors[shard.name] = Planned(options.dtype, shape)
                continue
            outputs, inputs = shape
            tensors[shard.name] = Planned("int8", (inputs, outputs * options.weights.bits // 8))
            tensors[_scale_name(shard)] = Planned(options.dtype, (outputs,))
    return tensors


def _scale_name(shard: Shard) -> str:
    return shard.name.removesuffix("weight") + "per_channel_scale"


def checkpoint_bytes(params: Sequence[Param], spec: DecoderSpec, options: BuildOptions) -> int:
    """Bytes of all ranks' tensors together."""
    return sum(
        planned.num_bytes
        for mapping in _ranks(options)
        for planned in _planned(params, spec, mapping, options).values()
    )


def _ranks(options: BuildOptions) -> list[Mapping]:
    own = options.of(TensorrtLlmOptions)
    return mappings(own.tp_size, own.pp_size)


def checkpoint_config(job: CompileJob, spec: DecoderSpec, config: HfConfig) -> dict[str, Any]:
    options = job.options
    own = options.of(TensorrtLlmOptions)
    return {
        **network_config(spec, options, tp_size=own.tp_size, pp_size=own.pp_size),
        "architecture": checkpoint_architecture(spec),
        "qk_layernorm": _has(job.params, "attn.q_norm"),
        "hidden_act": "silu",
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "quantization": {"quant_algo": options.weights.weight_only_algo, "kv_cache_quant_algo": None},
        **_own_keys(job.params, spec, config),
    }


def checkpoint_architecture(spec: DecoderSpec) -> str:
    """The TensorRT-LLM class that reads the checkpoint. Baichuan with rotary embedding has nothing that Llama lacks."""
    if spec.architecture == "BaichuanForCausalLM" and spec.rope:
        return "LlamaForCausalLM"
    return spec.architecture


def _has(params: Sequence[Param], suffix: str) -> bool:
    return any(param.name.endswith(suffix) for param in params)


def _own_keys(params: Sequence[Param], spec: DecoderSpec, config: HfConfig) -> dict[str, Any]:
    """Keys that the class's own config adds."""
    if spec.rope is None:  # Baichuan with ALiBi
        normalized = any(param.combine is Combine.NORMALIZE_ROWS for param in params)
        return {"model_version": "v2_13b" if normalized else "v1_13b"}
    keys = {
        "rotary_base": rotary_base(spec, config),
        "rotary_scaling": rotary_scaling(spec, config),
        "attn_bias": _has(params, "attn.qkv.bias"),
        "mlp_bias": _has(params, "mlp.gate_up.bias"),
        "disable_weight_only_quant_plugin": False,
    }
    if spec.architecture in QWEN_TYPES:
        kind = QWEN_TYPES[spec.architecture]
        return keys | {
            "qwen_type": kind,
            "seq_length": int(config.get("seq_length", DEFAULT_SEQ_LENGTH)),  # it is read there, and has no default
            "use_logn_attn": False,
            "moe_intermediate_size": 0,
            "moe_shared_expert_intermediate_size": 0,
            "tie_word_embeddings": spec.tied_embeddings,
        }
    return keys | {"residual_mlp": False}


def rotary_base(spec: DecoderSpec, config: HfConfig) -> float:
    if spec.architecture == "BaichuanForCausalLM":
        return DEFAULT_THETA
    return float(rope_values(config)["rope_theta"])


def rotary_scaling(spec: DecoderSpec, config: HfConfig) -> dict[str, Any] | None:
    """The scaling with the old and the new name of the type, since readers use one or the other."""
    if spec.architecture == "BaichuanForCausalLM":
        return None
    values = rope_values(config)
    kind = values["rope_type"]
    if kind not in ROTARY_SCALINGS:
        return None
    return {"type": kind, "rope_type": kind, **{key: values[key] for key in ROTARY_SCALINGS[kind]}}


def checkpoint_problems(spec: DecoderSpec, config: HfConfig, options: BuildOptions) -> list[str]:
    """Why a checkpoint of release 1.2 cannot express this network, or cannot be split like this."""
    own = options.of(TensorrtLlmOptions)
    tp, pp = own.tp_size, own.pp_size
    kv_fits = spec.num_kv_heads % tp == 0 or tp % spec.num_kv_heads == 0
    rules = [
        (spec.num_heads % tp == 0, f"tp_size {tp} does not divide the {spec.num_heads} attention heads"),
        (kv_fits, f"tp_size {tp} and the {spec.num_kv_heads} key-value heads do not divide each other"),
        (spec.intermediate_size % tp == 0, f"tp_size {tp} does not divide intermediate_size {spec.intermediate_size}"),
        (spec.num_layers % pp == 0, f"pp_size {pp} does not divide the {spec.num_layers} layers"),
    ]
    found = [text for holds, text in rules if not holds]
    found += _class_problems(spec, tp, pp)
    if spec.rope and spec.architecture != "BaichuanForCausalLM":
        kind = rope_values(config)["rope_type"]
        if kind not in (*ROTARY_SCALINGS, "default"):
            found.append(f"TensorRT-LLM's engines do not support rope type {kind!r}, only default, linear and llama3")
    if options.quantization and not found:
        found += _plugin_problems(spec, options.floats, tp)
    return found


def _class_problems(spec: DecoderSpec, tp: int, pp: int) -> list[str]:
    """Features that the class that reads the checkpoint does not support, although its config can express them."""
    found = []
    if pp > 1 and spec.rope is None:
        found.append(
            f"pp_size {pp} cannot be built: TensorRT-LLM's Baichuan has its embedding, last norm and head in every "
            "stage; use --tp-size instead"
        )
    num_heads, num_kv_heads = spec.num_heads // tp, -(-spec.num_kv_heads // tp)
    if spec.architecture == "Qwen3ForCausalLM" and num_heads == num_kv_heads:
        found.append(
            "TensorRT-LLM's Qwen3 mixes up queries, keys and values where a rank has as many query heads as key-value "
            f"heads, and with tp_size {tp} it has {num_heads} of each; build with a smaller --tp-size, or --target cpu"
        )
    return found


def _plugin_problems(spec: DecoderSpec, floats: WeightFormat, tp: int) -> list[str]:
    """Layers pad sizes to multiples for all ranks together, so tensors of other sizes would not fit."""
    q_width, kv_width = spec.num_heads // tp * spec.head_dim, max(1, spec.num_kv_heads // tp) * spec.head_dim
    sizes = {
        "hidden_size": (spec.hidden_size, tp * PLUGIN_MULTIPLE),
        "the query heads of a rank": (q_width, PLUGIN_MULTIPLE),
        "the query, key and value heads of a rank": (q_width + 2 * kv_width, PLUGIN_MULTIPLE),
        "intermediate_size of a rank": (spec.intermediate_size // tp, PLUGIN_MULTIPLE),
    }
    found = [
        f"weight-only quantization requires sizes that are multiples of {multiple}, but {name} is {size}"
        for name, (size, multiple) in sizes.items()
        if size % multiple
    ]
    if floats.bits > 16:
        found.append("weight-only quantization has no kernels for float32; build with --dtype float16 or bfloat16")
    return found
