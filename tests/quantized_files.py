"""Tiny quantized checkpoints, as the programs that quantize lay them out.

Each encoder draws levels, zero points and scales, and packs them number by number from the formats' descriptions, so
that this side knows nothing of ours; `tests/checkpoint/formats/recorded` has what those programs themselves wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.checkpoints import KINDS, make_checkpoint, random_tensors, write_json, write_tensors

Array = NDArray[Any]
Rng = np.random.Generator
GROUP = 16


@dataclass(frozen=True, slots=True)
class Encoded:
    parts: Mapping[str, Array]
    weight: Array  # float32: what the parts stand for


@dataclass(frozen=True, slots=True)
class Method:
    config: Mapping[str, Any]
    encode: Callable[[Rng, int, int], Encoded]  # outputs, inputs


def packed(numbers: Array, bits: int, axis: int) -> Array:
    """Numbers of `bits` bits in words of 32, consecutive ones along `axis` from the lowest bits on."""
    along = np.moveaxis(numbers, axis, -1).astype(np.uint64)
    words = along.reshape(*along.shape[:-1], -1, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    joined = (words << shifts).sum(axis=-1).astype(np.uint32).view(np.int32)
    return np.ascontiguousarray(np.moveaxis(joined, -1, axis))


def drawn(rng: Rng, outputs: int, inputs: int, bits: int, zeros: Array, groups: Array) -> tuple[Array, Array, Array]:
    """Levels [outputs, inputs], scales [outputs, groups] in float16, and the weight; of a size that suits a network."""
    levels = np.clip(
        np.rint(rng.standard_normal((outputs, inputs)) * 2 ** (bits - 3) + 2 ** (bits - 1)), 0, 2**bits - 1
    )
    spread = 1.5 / np.sqrt(inputs) / 2 ** (bits - 3)
    scales = (spread * rng.uniform(0.8, 1.2, (outputs, int(groups.max()) + 1))).astype(np.float16)
    weight = (levels - zeros[:, groups]) * scales.astype(np.float64)[:, groups]
    return levels.astype(np.uint8), scales, weight.astype(np.float32)


def gptq(bits: int = 4, *, symmetric: bool = False, ordered: bool = False, version: int = 1) -> Method:
    def encode(rng: Rng, outputs: int, inputs: int) -> Encoded:
        groups = np.arange(inputs) // GROUP
        if ordered:
            groups = rng.permutation(groups)
        middle = 2 ** (bits - 1)
        shape = (outputs, inputs // GROUP)
        zeros = np.full(shape, middle) if symmetric else rng.integers(middle - 2, middle + 3, shape)
        levels, scales, weight = drawn(rng, outputs, inputs, bits, zeros, groups)
        parts = {
            "qweight": packed(levels.T, bits, 0),
            "qzeros": packed(zeros.T - (version == 1), bits, 1),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": groups.astype(np.int32),
        }
        return Encoded(parts, weight)

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": ordered}
    return Method(config | ({"checkpoint_format": "gptq_v2"} if version == 2 else {}), encode)


def awq(group: int = GROUP, *, symmetric: bool = False) -> Method:
    def encode(rng: Rng, outputs: int, inputs: int) -> Encoded:
        groups = np.arange(inputs) // (group if group > 0 else inputs)
        zeros = rng.integers(6, 11, (outputs, int(groups.max()) + 1))
        zeros = np.full_like(zeros, 8) if symmetric else zeros
        levels, scales, weight = drawn(rng, outputs, inputs, 4, zeros, groups)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def in_words(numbers: Array) -> Array:
            shuffled = numbers.T.reshape(numbers.shape[1], -1, 8)[:, :, order]
            return packed(shuffled.reshape(numbers.shape[1], -1), 4, 1)

        parts = {"qweight": in_words(levels), "qzeros": in_words(zeros), "scales": np.ascontiguousarray(scales.T)}
        return Encoded(parts, weight)

    return Method(
        {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": not symmetric, "version": "gemm"}, encode
    )


def auto_round(method: Method, packing: str) -> Method:
    """AutoRound's config for a method's packing; g_idx is not written."""

    def encode(rng: Rng, outputs: int, inputs: int) -> Encoded:
        encoded = method.encode(rng, outputs, inputs)
        return Encoded({name: part for name, part in encoded.parts.items() if name != "g_idx"}, encoded.weight)

    said = method.config
    config = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int", "bits": said["bits"]}
    symmetric = said["sym"] if "sym" in said else not said["zero_point"]
    return Method(config | {"group_size": said["group_size"], "sym": symmetric}, encode)


def fp8(block: tuple[int, int] | None, config: Mapping[str, Any], scale: str, dtype: Any = np.float32) -> Method:
    """`block`: what shares a scale; (0, 0): the whole tensor, as one number; a 0 beside another: all there are."""

    def encode(rng: Rng, outputs: int, inputs: int) -> Encoded:
        height, width = (n or size for n, size in zip(block or (0, 0), (outputs, inputs), strict=True))
        numbers = rng.standard_normal((outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
        shape = (-(-outputs // height), -(-inputs // width))
        scales = (1.5 / np.sqrt(inputs) * rng.uniform(0.8, 1.2, shape)).astype(dtype)
        each = np.ix_(np.arange(outputs) // height, np.arange(inputs) // width)
        weight = numbers.astype(np.float32) * scales.astype(np.float32)[each]
        return Encoded({"weight": numbers, scale: scales if block else np.array(scales[0, 0])}, weight)

    return Method(config, encode)


def divided(method: Method) -> Method:
    """GPTQModel's: what a number was multiplied by when it was rounded."""

    def encode(rng: Rng, outputs: int, inputs: int) -> Encoded:
        parts = dict(method.encode(rng, outputs, inputs).parts)
        stored = np.float32(1) / parts["weight_scale_inv"].astype(np.float32)
        weight = parts["weight"].astype(np.float32) * (np.float32(1) / stored)
        return Encoded(parts | {"weight_scale_inv": stored[:, 0]}, weight)

    return Method(method.config, encode)


def compressed(format: str, weights: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """The config that LLM Compressor writes."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return config | {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None} | others


def packed_levels(bits: int, *, symmetric: bool, ordered: bool = False) -> Method:
    """LLM Compressor's, in groups."""

    def encode(rng: Rng, outputs: int, inputs: int) -> Encoded:
        groups = np.arange(inputs) // GROUP
        if ordered:
            groups = rng.permutation(groups)
        middle = 2 ** (bits - 1)
        shape = (outputs, inputs // GROUP)
        zeros = np.full(shape, middle) if symmetric else rng.integers(middle - 2, middle + 3, shape)
        levels, scales, weight = drawn(rng, outputs, inputs, bits, zeros, groups)
        parts = {
            "weight_packed": packed(levels, bits, 1),
            "weight_scale": scales,
            "weight_shape": np.array([outputs, inputs]),
        }
        parts |= {} if symmetric else {"weight_zero_point": packed(zeros, bits, 0)}
        return Encoded(parts | ({"weight_g_idx": groups.astype(np.int32)} if ordered else {}), weight)

    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    return Method(compressed("pack-quantized", weights | ({"actorder": "group"} if ordered else {})), encode)


def whole_levels(*, symmetric: bool) -> Method:
    """LLM Compressor's int8, with a scale per output."""

    def encode(rng: Rng, outputs: int, inputs: int) -> Encoded:
        zeros = np.zeros((outputs, 1), np.int64) if symmetric else rng.integers(-9, 10, (outputs, 1))
        levels, scales, weight = drawn(rng, outputs, inputs, 8, zeros + 128, np.zeros(inputs, np.int64))
        parts = {"weight": (levels.astype(np.int16) - 128).astype(np.int8), "weight_scale": scales}
        return Encoded(parts | ({} if symmetric else {"weight_zero_point": zeros.astype(np.int8)}), weight)

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": symmetric}
    return Method(compressed("int-quantized", weights), encode)


def mxfp4() -> Method:
    """LLM Compressor's."""

    def encode(rng: Rng, outputs: int, inputs: int) -> Encoded:
        numbers = rng.standard_normal((outputs, inputs)).astype(ml_dtypes.float4_e2m1fn)
        nibbles = numbers.view(np.uint8).reshape(outputs, -1, 2)
        exponents = rng.integers(123, 126, (outputs, inputs // 32), dtype=np.uint8)
        each = np.arange(inputs) // 32
        weight = numbers.astype(np.float32) * np.exp2(exponents.astype(np.float32) - 127)[:, each]
        return Encoded({"weight_packed": nibbles[..., 0] | nibbles[..., 1] << 4, "weight_scale": exponents}, weight)

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    return Method(compressed("mxfp4-pack-quantized", weights), encode)


FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
DEEPSEEK: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
AUTOFP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
GPTQMODEL: dict[str, Any] = {
    "quant_method": "fp8", "bits": 8, "group_size": -1, "format": "float8_e4m3fn", "weight_scale_method": "row",
    "weight_scale_semantics": "inverse",
}  # fmt: skip
FBGEMM: dict[str, Any] = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head*"]}
METHODS: dict[str, Method] = {
    "fp8-block": fp8((16, 16), DEEPSEEK | {"weight_block_size": [16, 16]}, "weight_scale_inv", ml_dtypes.bfloat16),
    "fp8-uneven": fp8((48, 40), DEEPSEEK | {"weight_block_size": [48, 40]}, "weight_scale_inv"),
    "fp8-exponents": fp8(
        (32, 32),
        DEEPSEEK | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        "weight_scale_inv",
        ml_dtypes.float8_e8m0fnu,
    ),
    "fp8-tensor": fp8(None, AUTOFP8, "weight_scale"),
    "fp8-divided": divided(fp8((1, 0), GPTQMODEL, "weight_scale_inv")),
    "fbgemm": fp8((1, 0), FBGEMM, "weight_scale"),
    "modelopt": fp8(None, MODELOPT, "weight_scale"),
    "packed-int4": packed_levels(4, symmetric=True),
    "packed-int4-asym": packed_levels(4, symmetric=False),
    "packed-int8-ordered": packed_levels(8, symmetric=False, ordered=True),
    "int8": whole_levels(symmetric=True),
    "int8-asym": whole_levels(symmetric=False),
    "compressed-fp8": fp8((1, 0), compressed("float-quantized", FLOATS), "weight_scale", np.float16),
    "awq": awq(),
    "awq-channel": awq(-1),
    "awq-sym": awq(symmetric=True),
    "gptq": gptq(),
    "gptq-ordered": gptq(ordered=True),
    "gptq-int8-sym": gptq(8, symmetric=True),
    "gptq-v2": gptq(version=2),
    "auto-round": auto_round(gptq(symmetric=True), "auto_round:auto_gptq"),
    "auto-round-int8": auto_round(gptq(8, version=2), "auto_round"),
    "auto-round-awq": auto_round(awq(symmetric=True), "auto_round:auto_awq"),
}


def make_quantized(
    path: Path,
    method: Method,
    kind: str = "llama",
    *,
    tensors: Mapping[str, Array | None] | None = None,
    config: Mapping[str, Any] | None = None,
    format: str = "safetensors",
    **overrides: Any,
) -> dict[str, Array]:
    """Write the checkpoint `kind` into `path` with the linear modules of its layers quantized; its weights in float32.

    `tensors` are put in place of the file's, or left out where they are None. `config` changes its quantization_config,
    a value None taking a key away; `overrides` are of config.json itself.
    """
    make_checkpoint(path, kind, **overrides)
    (path / "model.safetensors").unlink()
    rng = np.random.default_rng(7)
    stored: dict[str, Array] = {}
    weights: dict[str, Array] = {}
    for name, tensor in random_tensors(KINDS[kind] | overrides, dtype="float16", seed=0).items():
        if ".layers." not in name or tensor.ndim != 2:
            stored[name], weights[name] = tensor, tensor.astype(np.float32)
            continue
        module = name.removesuffix(".weight")
        encoded = method.encode(rng, *tensor.shape)
        stored |= {f"{module}.{part}": values for part, values in encoded.parts.items()}
        weights[name] = encoded.weight
    stored |= {name: tensor for name, tensor in (tensors or {}).items() if tensor is not None}
    write_tensors(path, {n: t for n, t in stored.items() if (tensors or {}).get(n, t) is not None}, format)
    content = json.loads((path / "config.json").read_text())
    said = {key: value for key, value in (dict(method.config) | dict(config or {})).items() if value is not None}
    (path / "config.json").write_text(json.dumps(content | {"quantization_config": said}))
    return weights


def make_packed_experts(folder: Path, changes: Mapping[str, Any] | None = None) -> dict[str, NDArray[Any]]:
    """A gpt-oss whose experts are in MXFP4, as they are published; returns its tensors, the experts as transformers
    expands them. `changes` replaces tensors; None leaves one out."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    make_checkpoint(folder, "gpt-oss", intermediate_size=64, with_tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    tensors = random_tensors(config, dtype="float32", seed=0)
    stored, rng = dict(tensors), np.random.default_rng(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 125, (experts, outputs, inputs // 32), dtype=np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        packed = torch.from_numpy(blocks), torch.from_numpy(scales)
        tensors[name] = convert_moe_packed_tensors(*packed, dtype=torch.float32).numpy()
    stored = {name: tensor for name, tensor in (stored | dict(changes or {})).items() if tensor is not None}
    write_tensors(folder, stored, "safetensors")
    write_json(folder / "config.json", config | {"quantization_config": {"quant_method": "mxfp4"}})
    return tensors
