"""Configs and tensors that are wrong, or of a format that we don't read: refused by name before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.checkpoint.formats.listed import ListedModules
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError, Unsupported
from tests.checkpoints import make_checkpoint
from tests.quantized_files import METHODS, awq, gptq, make_packed_experts, make_quantized

MODULE = "model.layers.0.self_attn.q_proj"


def problems_of(path: Path, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def of_module(**parts: Any) -> dict[str, Any]:
    return {f"{MODULE}.{part}": values for part, values in parts.items()}


def words(*shape: int) -> Any:
    return np.full(shape, 0x77777777, np.int32)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"bits": 3}, "quantization_config: bits 3 is not supported; supported: 4, 8"),
        ({"bits": None}, "quantization_config: bits must be an integer from 1 to 32, it is missing"),
        ({"group_size": 0}, "group_size must be -1 or a positive integer, got 0"),
        ({"group_size": "16"}, "group_size must be -1 or a positive integer, got '16'"),
        ({"desc_act": 1}, "desc_act must be true or false, got 1"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2"),
        ({"is_marlin_format": True}, "checkpoint_format 'marlin' is not supported"),
        ({"checkpoint_format": {}}, "checkpoint_format '{}' is not supported"),
        ({"rotation": "hadamard"}, "rotation 'hadamard' is not supported, as it would also transform activations"),
        ({"quant_method": None}, "quant_method in quantization_config must be a name, got None"),
        ({"dynamic": [1]}, "dynamic must be an object, got [1]"),
        ({"dynamic": {"a(": {}}}, "pattern 'a(' is invalid"),
        ({"dynamic": {"(a+)+": {}}}, "pattern '(a+)+' is too complex"),
        ({"dynamic": {"a": {"bits": 2}}}, "dynamic 'a': bits 2 is not supported"),
        ({"dynamic": {r"-:.*q_proj": {}}}, f"{MODULE}: it is quantized, but the config lists it as"),
        ({"dynamic": {r".*q_proj": {"group_size": 32}}}, f"{MODULE}: tensor qzeros has shape [4, 8], but the"),
        ({"group_size": 24}, f"{MODULE}: groups of 24 do not divide its 64 inputs"),
        ({"bits": 8}, f"{MODULE}: tensor qzeros has shape [4, 8], but the weight requires [2, 16]"),
        ({"sym": True}, f"{MODULE}: sym is true in the config, but not all zero points are 8"),
    ],
    ids=str,
)
def test_gptq_config(config: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq(), config=config)
    assert problem in problems_of(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (of_module(scales=None), "tensor scales [4, 64] is missing"),
        (of_module(qzeros=None, g_idx=None), "tensor qzeros [4, 8] is missing"),
        (
            of_module(scales=np.ones((4, 32), np.float16)),
            "tensor scales has shape [4, 32], but the weight requires [4, 64]",
        ),
        (of_module(scales=np.ones((4, 64), np.int32)), "tensor scales has dtype int32; supported: float16, bfloat16"),
        (of_module(qweight=np.ones((8, 64), np.int64)), "tensor qweight has dtype int64; supported: int32"),
        (of_module(qweight=words(8, 60)), "its 60 outputs are not a multiple of 8"),
        (of_module(qweight=words(8)), "tensor qweight has shape [8]; a matrix is required"),
        (of_module(qweight=words(0, 64)), "tensor qweight has shape [0, 64]; a matrix is required"),
        (of_module(qzeros=words(4, 8) | 0xF000), "a zero point in qzeros is 15 + 1, but must be from 0 to 15"),
        (of_module(g_idx=np.full(64, 4, np.int32)), "g_idx has groups from 4 to 4, not 0 to 3"),
        (of_module(g_idx=np.full(64, -1, np.int32)), "g_idx has groups from -1 to -1, not 0 to 3"),
        (of_module(weight=np.ones((64, 64), np.float16)), "it has both weight and qweight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gptq_tensors(tensors: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq(), tensors=tensors)
    message = problems_of(tmp_path)
    assert f"{MODULE}: {problem}" in message
    assert "does not fit its quantization_config" in message


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        ({"bits": 8}, {}, "quantization_config: bits 8 is not supported; supported: 4"),
        ({"version": "gemv"}, {}, "version 'gemv' is not supported; supported: 'gemm'"),
        (
            {"version": "GEMM", "zero_point": False},
            {},
            f"{MODULE}: zero_point is false in the config, but not all zero po",
        ),
        ({"zero_point": 0}, {}, "zero_point must be true or false, got 0"),
        ({"group_size": 24}, {}, f"{MODULE}: groups of 24 do not divide its 64 inputs"),
        ({"modules_to_not_convert": "x"}, {}, "modules_to_not_convert must be a list of module names, got 'x'"),
        ({"modules_to_not_convert": ["re:("]}, {}, "modules_to_not_convert: pattern '(' is invalid"),
        ({"modules_to_not_convert": ["q_proj"]}, {}, f"{MODULE}: it is quantized, but the config lists it as"),
        ({}, of_module(qzeros=None), f"{MODULE}: tensor qzeros [4, 8] is missing"),
        ({}, of_module(scales=np.ones((8, 64), np.float16)), f"{MODULE}: tensor scales has shape [8, 64], but"),
        ({}, of_module(qweight=words(64, 9)), f"{MODULE}: tensor qzeros has shape [4, 8], but the weight requires"),
    ],
    ids=str,
)
def test_awq(config: dict[str, Any], tensors: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, awq(), config=config, tensors=tensors)
    assert problem in problems_of(tmp_path)


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        ({"fmt": "e5m2"}, {}, "quantization_config: fmt 'e5m2' is not supported; supported: 'e4m3'"),
        ({"weight_scale_semantics": "direct"}, {}, "weight_scale_semantics 'direct' is not supported; supported: 'inv"),
        ({"weight_block_size": [16]}, {}, "weight_block_size must be two positive integers, got [16]"),
        ({"weight_block_size": [16, True]}, {}, "weight_block_size must be two positive integers"),
        (
            {"weight_block_size": [32, 16]},
            {},
            f"{MODULE}: tensor weight_scale_inv has shape [4, 4], but the weight requires [2",
        ),
        (
            {"weight_block_size": None},
            {},
            f"{MODULE}: tensor weight_scale_inv has shape [4, 4], but the weight requires [64",
        ),
        ({"modules_to_not_convert": ["q_proj"]}, {}, f"{MODULE}: it is quantized, but the config lists it as"),
        ({}, of_module(weight_scale_inv=None), f"{MODULE}: it must have either weight_scale_inv or weight_scale"),
        ({}, of_module(weight_scale=np.ones(1, np.float32)), "either weight_scale_inv or weight_scale, but has both"),
        (
            {},
            of_module(weight=np.ones((64, 64), np.float16)),
            f"{MODULE}: tensor weight has dtype float16; supported: flo",
        ),
        ({}, of_module(weight_scale_inv=np.ones((4, 4), np.int8)), "tensor weight_scale_inv has dtype int8; supported"),
    ],
    ids=str,
)
def test_fp8(config: dict[str, Any], tensors: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, METHODS["fp8-block"], config=config, tensors=tensors)
    assert problem in problems_of(tmp_path)


def group(weights: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """A config with one group that differs in this from the packed int4 one."""
    own = dict(METHODS["packed-int4-asym"].config["config_groups"]["group_0"])
    own["weights"] = own["weights"] | (weights or {})
    return {"config_groups": {"group_0": own | others}}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quantization_status": "calibration"}, "quantization_status 'calibration' is not supported; supported"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: sparse formats are not supported"),
        ({"transform_config": {"config_groups": {"a": {}}}}, "transform_config is not supported"),
        ({"config_groups": {}}, "config_groups must be an object with the groups of modules, got {}"),
        ({"config_groups": {"W8A8": ["Linear"]}}, "config_groups 'W8A8' must be an object with targets and weights"),
        (
            {"format": "marlin-24"},
            "config_groups 'group_0': format 'marlin-24' is not supported; supported: pack-quant",
        ),
        ({"format": "mixed-precision"}, "format 'mixed-precision' is not supported"),
        (
            group({"num_bits": 3}),
            "group_0': type and num_bits int 3 do not fit pack-quantized; supported: int 4, int",
        ),
        (group({"num_bits": None, "type": "float"}), "type and num_bits float 8 do not fit pack-quantized"),
        (group({"strategy": "token"}), "strategy 'token' is not supported; supported: tensor, channel, group, block"),
        (group({"group_size": None}), "strategy 'group' requires a positive group_size"),
        (group({"group_size": -2}), "group_size must be -1 or a positive integer, got -2"),
        (group({"strategy": "block"}), "strategy 'block' requires a block_structure"),
        (group({"strategy": "channel", "actorder": "group"}), "actorder 'group' requires strategy 'group'"),
        (group({"dynamic": True}), "dynamic True is not supported"),
        (group({"type": "float", "group_size": 32}, format="mxfp4-pack-quantized"), "floats must be symmetric"),
        (group({"symmetric": "no"}), "symmetric must be true or false, got 'no'"),
        (
            group({"type": "float"}, format="float-quantized"),
            "type and num_bits float 4 do not fit float-quantized",
        ),
        (group(targets=["re:("]), "targets: pattern '(' is invalid"),
        (group(targets=["re:.*mlp.*"]), f"{MODULE}: it is quantized, but no group in the config includes it"),
        ({"ignore": ["re:.*q_proj"]}, f"{MODULE}: it is quantized, but the config lists it as unquantized (ignore)"),
        (group({"group_size": 24}), f"{MODULE}: groups of 24 do not divide its 64 inputs"),
        (group({"group_size": 32}), f"{MODULE}: tensor weight_scale has shape [64, 4], but the weight requires"),
        (group({"actorder": "group"}), f"{MODULE}: tensor weight_g_idx [64] is missing"),
        (group({"symmetric": True}), f"{MODULE}: it has zero points, but the config describes it as symmetric"),
        (
            group({"num_bits": 8}),
            f"{MODULE}: weight_packed [64, 8] does not have the elements of weight_shape, [64, 64]",
        ),
        (group(format="int-quantized"), f"{MODULE}: tensor weight is missing"),
        (
            group({"type": "float", "group_size": 32, "symmetric": True}, format="mxfp4-pack-quantized"),
            "tensor weight_packed has dtype int32; supported: uint8",
        ),
        (group({"type": "float"}, format="nvfp4-pack-quantized"), "has strategy 'tensor_group' and group_size 16"),
    ],
    ids=str,
)
def test_compressed_tensors_config(config: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, METHODS["packed-int4-asym"], config=config)
    assert problem in problems_of(tmp_path)


@pytest.mark.parametrize(
    ("method", "tensors", "problem"),
    [
        ("packed-int4", of_module(weight_scale=None), "tensor weight_scale [64, 4] is missing"),
        ("packed-int4", of_module(weight_shape=None), "tensor weight_shape [2] is missing"),
        (
            "packed-int4",
            of_module(weight_shape=np.array([64, -64])),
            "does not have the elements of weight_shape, [64, -64]",
        ),
        ("packed-int4", of_module(weight_packed=None), "tensor weight_packed is missing"),
        ("packed-int4-asym", of_module(weight_zero_point=None), "tensor weight_zero_point [8, 4] is missing"),
        (
            "packed-int8-ordered",
            of_module(weight_g_idx=np.full(64, 9, np.int32)),
            "weight_g_idx has groups from 9 to 9",
        ),
        ("int8", of_module(weight_scale=None), "tensor weight_scale [64, 1] is missing"),
        ("int8", of_module(weight=np.ones((64, 64), np.float16)), "tensor weight has dtype float16; supported: int8"),
        ("int8-asym", of_module(weight_zero_point=None), "tensor weight_zero_point [64, 1] is missing"),
        (
            "compressed-fp8",
            of_module(weight_scale=np.ones((32, 2), np.float16)),
            "shape [32, 2], but the weight requires [64",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_compressed_tensors(method: str, tensors: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, METHODS[method], tensors=tensors)
    message = problems_of(tmp_path)
    assert problem in message
    assert MODULE in message


def test_zero_points_beyond_four_bits(tmp_path: Path) -> None:
    """Of numbers of four bits in bytes."""
    weights = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}
    config = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    make_quantized(tmp_path, METHODS["int8-asym"], config=config)
    assert f"{MODULE}: zero points are -9 to 9, but must be from -8 to 7" in problems_of(tmp_path)


@pytest.mark.parametrize("algorithm", ["NVFP4", None])
def test_modelopts_other_formats(algorithm: str | None, tmp_path: Path) -> None:
    make_quantized(tmp_path, METHODS["modelopt"], config={"quant_algo": algorithm})
    wanted = f"quant_algo {algorithm!r} is not supported; supported: 'FP8'" if algorithm else "quant_algo is missing"
    assert wanted in problems_of(tmp_path)


def test_an_order_without_its_groups(tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq(ordered=True), tensors=of_module(g_idx=None))
    assert f"{MODULE}: tensor g_idx [64] is missing" in problems_of(tmp_path)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq(), tensors=of_module(scales=None, qzeros=words(1, 1)))
    message = problems_of(tmp_path)
    assert "scales [4, 64] is missing" in message
    assert "qzeros has shape [1, 1]" in message
    make_quantized(tmp_path / "many", gptq(), config={"sym": True}, num_hidden_layers=8)
    assert "... and 16 more" in problems_of(tmp_path / "many")
    make_quantized(tmp_path / "config", gptq(), config={"bits": 3, "sym": 1})
    (tmp_path / "config/model.safetensors").unlink()
    message = problems_of(tmp_path / "config")
    assert all(part in message for part in ("bits 3", "sym must be", "no weights"))


@pytest.mark.parametrize("method", ["aqlm", "hqq", "bitsandbytes"])
def test_methods_that_are_refused(method: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq(), config={"quant_method": method})
    message = problems_of(tmp_path, Unsupported)
    assert f"is quantized by {method} (quantization_config), which is not supported; supported: gptq" in message
    assert "use the original checkpoint, and quantize at build time: --quantization int8 or int4" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_scales": None}, "gate_up_proj: tensor scales [7, 128, 2] is missing"),
        ({"_scales": np.zeros((7, 128, 1), np.uint8)}, "tensor scales has shape [7, 128, 1]"),
        ({"_blocks": np.zeros((7, 128, 2, 8), np.uint8)}, "tensor blocks must be uint8 [experts, outputs, groups, 16]"),
    ],
)
def test_experts_in_mxfp4(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_packed_experts(
        tmp_path, {f"model.layers.0.mlp.experts.gate_up_proj{part}": new for part, new in change.items()}
    )
    assert message in problems_of(tmp_path)


def test_bitsandbytes_without_its_name(tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq(), config={"quant_method": None, "load_in_4bit": True})
    assert "bitsandbytes quantizes a model when it is loaded" in problems_of(tmp_path, Unsupported)


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq())
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": "gptq"}))
    assert "quantization_config must be an object, got 'gptq'" in problems_of(tmp_path)


def test_configs_that_differ(tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq())
    (tmp_path / "quantize_config.json").write_text('{"bits": 8, "group_size": 16, "damp_percent": 0.1}')
    message = problems_of(tmp_path)
    assert "quantization_config and quantize_config.json differ: bits is 4 in the first, but 8 in the second" in message
    (tmp_path / "quantize_config.json").write_text("{")
    assert "quantize_config.json is not valid JSON" in problems_of(tmp_path)


def test_a_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    make_quantized(tmp_path, gptq())
    content = json.loads((tmp_path / "config.json").read_text())
    said = content.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": said["group_size"]}))
    with Checkpoint.open(tmp_path) as found:
        assert "GPTQ int4 (groups of 16)" in found.rounded


def test_a_config_without_quantized_tensors(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", quantization_config=gptq().config)
    assert "the config names GPTQ, but no module has qweight" in problems_of(tmp_path)


@pytest.mark.parametrize(
    ("entry", "inside", "outside"),
    [
        ("lm_head", ["lm_head"], ["model.lm_head2", "x"]),
        ("model.layers.1", ["model.layers.1.mlp.up_proj"], ["model.layers.10.mlp.up_proj"]),
        ("up_proj", ["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.gate_up_proj"]),
        ("re:.*mlp.*", ["model.layers.1.mlp.up_proj"], ["model.layers.1.self_attn.q_proj"]),
        ("model.layers.*.mlp*", ["model.layers.1.mlp.up_proj"], ["model.layers.1.self_attn.q_proj"]),
    ],
)
def test_lists_of_modules(entry: str, inside: list[str], outside: list[str]) -> None:
    listed = ListedModules([entry])
    assert all(name in listed for name in inside)
    assert not any(name in listed for name in outside)
