"""Four-bit weights in float4_e2m1fn: MXFP4, with an exponent per 32 inputs, and NVFP4, with two scales.

    weight_packed        uint8 [outputs, inputs / 2]    two consecutive inputs, the low half first
    weight_scale         MXFP4: uint8 or float8_e8m0fnu [outputs, inputs / 32], exponents; NVFP4: float8_e4m3fn by 16
    weight_global_scale  NVFP4: float32 [1], what the other scales were multiplied by

From compressed-tensors' compressors/nvfp4, mxfp4 and mx_utils.py. gpt-oss packs its experts the same way.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from llmserve.checkpoint.formats.base import EXPONENT_DTYPES, Block, Module, ModuleCheck, StoredWeight
from llmserve.checkpoint.formats.packing import E2M1, E4M3, EXPONENTS, halves
from llmserve.checkpoint.formats.scaled_rows import ScaledRows
from llmserve.checkpoint.stored_tensor import Tensor

MX_GROUP, NV_GROUP = 32, 16
GLOBAL = "weight_global_scale"


def fp4_weight(module: Module, check: ModuleCheck, *, is_nvidia: bool) -> StoredWeight | None:
    if "weight_packed" not in module.tensors:
        check.wrong("tensor weight_packed is missing")
        return None
    rows, num_bytes = check.matrix("weight_packed", ("uint8",))
    shape, group = (rows, 2 * num_bytes), NV_GROUP if is_nvidia else MX_GROUP
    if not check.passed or not check.divides(group, shape[1]):
        return None
    check.expect("weight_scale", (rows, shape[1] // group), ("float8_e4m3fn",) if is_nvidia else EXPONENT_DTYPES)
    if is_nvidia:
        check.expect(GLOBAL, (1,), ("float32",), ())
        if check.passed and not module.read(GLOBAL).all():
            check.wrong(f"{GLOBAL} is 0")
    others = frozenset({"weight_scale", *([GLOBAL] if is_nvidia else [])} & module.tensors.keys())
    return StoredWeight(
        shape, "NVFP4" if is_nvidia else "MXFP4", "weight_packed", others, partial(_expand, module, shape, is_nvidia)
    )


def _expand(module: Module, shape: Block, is_nvidia: bool) -> ScaledRows:
    stored, scales = module.read("weight_packed"), module.read("weight_scale").view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):  # reported when the values are used
        scales = E4M3[scales] / module.read(GLOBAL).reshape(1, 1) if is_nvidia else EXPONENTS[scales]

    def numbers(rows: slice) -> Tensor:
        values: Tensor = np.take(E2M1, halves(stored[rows]))
        return values

    return ScaledRows(shape, numbers, scales)
