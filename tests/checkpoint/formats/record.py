"""Linear modules as the programs that quantize write them, and the weights that they make of them again.

    python -m tests.checkpoint.formats.record SCRATCH

writes `recorded/NAME.safetensors`: the module's tensors as they are in a checkpoint, `expected`, the weight in float32
as the program itself has it, and the checkpoint's quantization config as metadata. SCRATCH has, unpacked and not
installed, `autogptq` (auto_gptq 0.7.1's wheel), `autoawq` (autoawq 0.2.9's source), `autoround` (auto-round 0.16.1's
wheel) and `compressed` (`pip install --target` of compressed-tensors 0.20.0 and loguru). FP8 and the experts' MXFP4 are
transformers' 5.23.0. What is run of AutoGPTQ, AutoAWQ and AutoRound is their plain torch code, their scales widened
to float32, so that nothing is rounded.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RECORDED = Path(__file__).parent / "recorded"
OUTPUTS, INPUTS = 32, 64
Tensors = dict[str, torch.Tensor]


def main() -> None:
    scratch = Path(sys.argv[1])
    sys.path.insert(0, str(scratch / "compressed"))
    RECORDED.mkdir(exist_ok=True)
    torch.manual_seed(0)
    for bits in (4, 8):
        for symmetric in (True, False):
            for ordered in (False, True):
                record_gptq(scratch, bits, symmetric=symmetric, ordered=ordered)
    record_awq(scratch, 16)
    record_awq(scratch, -1)
    for name, weights in SCHEMES.items():
        record_compressed(name, weights)
    record_fp8()
    record_experts()
    record_auto_round(scratch)


def record(name: str, tensors: Tensors, expected: torch.Tensor, config: Mapping[str, Any]) -> None:
    kept = {key: tensor.detach().contiguous() for key, tensor in tensors.items()} | {"expected": expected.contiguous()}
    save_file(kept, RECORDED / f"{name}.safetensors", {"config": json.dumps(config)})


def record_gptq(scratch: Path, bits: int, *, symmetric: bool, ordered: bool) -> None:
    module: Any = load_file(scratch / "autogptq/auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
    group_size = 16
    order = torch.randperm(INPUTS) if ordered else torch.arange(INPUTS)
    g_idx = (order // group_size).to(torch.int32)
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    scales = torch.rand(OUTPUTS, INPUTS // group_size) * 0.02 + 0.005
    scales = scales.half().float()
    largest = 2**bits - 1
    zeros = (
        torch.full_like(scales, (largest + 1) // 2) if symmetric else torch.randint(1, largest, scales.shape).float()
    )
    levels = torch.randint(0, largest + 1, (OUTPUTS, INPUTS))
    linear.weight.data = (levels - zeros[:, g_idx.long()]) * scales[:, g_idx.long()]
    packed = module.QuantLinear(bits, group_size, INPUTS, OUTPUTS, False, weight_dtype=torch.float32)
    packed.pack(linear, scales.clone(), zeros.clone(), g_idx)
    packed.autogptq_cuda_available = False
    expected = packed(torch.eye(INPUTS)).T
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    parts["scales"] = parts["scales"].half()
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": ordered}
    name = f"gptq-int{bits}{'-sym' if symmetric else ''}{'-ordered' if ordered else ''}"
    record(name, parts, expected, config)
    if not ordered:  # GPTQModel's convert_gptq_v1_to_v2_format_module adds this to the words
        parts["qzeros"] = parts["qzeros"] + sum(1 << shift for shift in range(0, 32, bits))
        record(f"{name}-v2", parts, expected, config | {"checkpoint_format": "gptq_v2"})


def record_awq(scratch: Path, group_size: int) -> None:
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):  # whose __init__ imports CUDA
        package = types.ModuleType(name)
        package.__path__ = [str(scratch / "autoawq" / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.modules["awq.utils.utils"] = types.ModuleType("awq.utils.utils")
    sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"  # type: ignore[attr-defined]
    gemm: Any = importlib.import_module("awq.modules.linear.gemm")
    width = group_size if group_size > 0 else INPUTS
    scales = (torch.rand(INPUTS // width, OUTPUTS) * 0.02 + 0.005).half()
    zeros = torch.randint(0, 16, scales.shape)
    levels = torch.randint(0, 16, (INPUTS, OUTPUTS))
    each = torch.arange(INPUTS) // width
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = ((levels - zeros[each]) * scales.float()[each]).T.contiguous()
    packed = gemm.WQLinear_GEMM.from_linear(linear, 4, width, scales=scales, zeros=zeros)
    expected = gemm.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, width).T
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    record(f"awq-{'channel' if group_size < 0 else 'group'}", parts, expected, config)


def record_auto_round(scratch: Path) -> None:
    """Its own packing and that of GPTQ, which differ in zero points; its AWQ is AutoAWQ's."""
    folder = scratch / "autoround"
    for name in ("auto_round", "auto_round.utils", "auto_round_extension", "auto_round_extension.torch"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.modules["auto_round.utils"].get_packing_device = lambda device: "cpu"  # type: ignore[attr-defined]
    group_size = 16
    for packing, module in (("auto_round:auto_gptq", "qlinear_torch_zp"), ("auto_round", "qlinear_torch")):
        for bits in (4, 8):
            scales = (torch.rand(OUTPUTS, INPUTS // group_size) * 0.02 + 0.005).half().float()
            zeros = torch.randint(1, 2**bits, scales.shape)
            levels = torch.randint(0, 2**bits, (OUTPUTS, INPUTS))
            each = torch.arange(INPUTS) // group_size
            linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
            linear.weight.data = (levels - zeros[:, each]) * scales[:, each]
            kind: Any = importlib.import_module(f"auto_round_extension.torch.{module}")
            packed = kind.QuantLinear(bits, group_size, INPUTS, OUTPUTS, bias=False)
            packed.device = "cpu"
            packed.pack(linear, scales, zeros)
            parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
            packed.scales = packed.scales.float()
            config = {"quant_method": "auto-round", "packing_format": packing, "bits": bits, "data_type": "int"}
            config |= {"group_size": group_size, "sym": False}
            record(
                f"{packing.replace('_', '-').replace(':', '-')}-int{bits}", parts, packed(torch.eye(INPUTS)).T, config
            )


INT4: dict[str, Any] = {"num_bits": 4, "type": "int"}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
FP4: dict[str, Any] = {"num_bits": 4, "type": "float"}
SCHEMES: dict[str, dict[str, Any]] = {
    "pack-quantized/int4-group-sym": INT4 | {"strategy": "group", "group_size": 16, "symmetric": True},
    "pack-quantized/int4-group-asym": INT4 | {"strategy": "group", "group_size": 16, "symmetric": False},
    "pack-quantized/int4-channel-sym": INT4 | {"strategy": "channel", "symmetric": True},
    "pack-quantized/int4-channel-asym": INT4 | {"strategy": "channel", "symmetric": False},
    "pack-quantized/int8-group-asym": INT8 | {"strategy": "group", "group_size": 32, "symmetric": False},
    "pack-quantized/int8-channel-sym": INT8 | {"strategy": "channel", "symmetric": True},
    "int-quantized/int8-tensor-sym": INT8 | {"strategy": "tensor", "symmetric": True},
    "int-quantized/int8-channel-sym": INT8 | {"strategy": "channel", "symmetric": True},
    "int-quantized/int8-channel-asym": INT8 | {"strategy": "channel", "symmetric": False},
    "int-quantized/int8-group-asym": INT8 | {"strategy": "group", "group_size": 16, "symmetric": False},
    "float-quantized/fp8-tensor": FP8 | {"strategy": "tensor", "symmetric": True},
    "float-quantized/fp8-channel": FP8 | {"strategy": "channel", "symmetric": True},
    "float-quantized/fp8-group": FP8 | {"strategy": "group", "group_size": 32, "symmetric": True},
    "float-quantized/fp8-block": FP8 | {"strategy": "block", "block_structure": [16, 24], "symmetric": True},
    "mxfp4-pack-quantized/mxfp4": FP4 | {"strategy": "group", "group_size": 32, "symmetric": True},
    "nvfp4-pack-quantized/nvfp4": FP4 | {"strategy": "tensor_group", "group_size": 16, "symmetric": True},
}


def record_compressed(name: str, weights: Mapping[str, Any]) -> None:
    compressors: Any = importlib.import_module("compressed_tensors.compressors")
    quantization: Any = importlib.import_module("compressed_tensors.quantization")
    kind, _, label = name.partition("/")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = compressors.BaseCompressor.get_value_from_registry(kind)
    state: Tensors = {"weight": torch.randn(OUTPUTS, INPUTS) * 0.1}
    shape = {
        "tensor": (1,),
        "channel": (OUTPUTS, 1),
        "block": tuple(
            -(-n // k) for n, k in zip((OUTPUTS, INPUTS), weights.get("block_structure", (1, 1)), strict=True)
        ),
    }.get(weights["strategy"], (OUTPUTS, INPUTS // weights.get("group_size", INPUTS)))
    largest = {"int": 2 ** (weights["num_bits"] - 1) - 1, "float": 448 if weights["num_bits"] == 8 else 6}
    state["weight_scale"] = (torch.rand(shape) + 0.5) * 0.25 / largest[weights["type"]]
    if not weights["symmetric"]:
        half = 2 ** (weights["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape).to(torch.int8)
    if kind.startswith("mxfp4"):
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(state["weight_scale"])))
    if kind.startswith("nvfp4"):
        state["weight_global_scale"] = torch.tensor([448 * 6 / 0.4])
        state["weight_scale"] = (state["weight_scale"] * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    compressed = compressor.compress(state, scheme)
    expected = compressor.decompress(compressed, scheme)["weight"].float()
    if kind.startswith("nvfp4"):  # which that rounds to bfloat16
        helpers: Any = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
        numbers = helpers.unpack_fp4_from_uint8(compressed["weight_packed"], OUTPUTS, INPUTS, torch.float32)
        arguments = {"scale": compressed["weight_scale"].float(), "global_scale": state["weight_global_scale"]}
        expected = quantization.lifecycle.forward.dequantize(numbers, args=scheme.weights, **arguments)
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}},
        "ignore": ["lm_head"],
    }
    record(f"compressed-{kind.removesuffix('-quantized')}-{label}", compressed, expected, config)


def record_fp8() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    dequantize: Any = Fp8Dequantize(None)
    weight = torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn)
    for name, shape, block in (("block", (2, 4), [16, 16]), ("tensor", (1, 1), None)):
        scale = torch.rand(shape) * 0.01
        expected = dequantize._dequantize_one(weight, scale, output_dtype=torch.float32)
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
        stored = scale if block else scale[0, 0]
        record(f"fp8-{name}", {"weight": weight, "weight_scale_inv": stored}, expected, config)


def record_experts() -> None:
    """Of gpt-oss: [experts, rows, groups, bytes]; the function gives transposed matrices."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (1, OUTPUTS, INPUTS // 32, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (1, OUTPUTS, INPUTS // 32), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    record("mxfp4-experts", {"blocks": blocks, "scales": scales}, expected, {"quant_method": "mxfp4"})


def load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
