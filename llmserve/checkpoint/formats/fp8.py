"""FP8: weights in float8_e4m3fn with a scale per block, output or tensor, under the names that several programs use.

    weight            float8_e4m3fn [outputs, inputs]
    weight_scale_inv  [rows of blocks, columns of blocks], the last of which may be narrower; or one number
    weight_scale      one number, or [outputs, 1]

A stored number is multiplied by either; "inverse" refers to the scale used for rounding. Only GPTQModel
stores the rounding scale itself as weight_scale_inv, marked by weight_scale_semantics: a number is divided by it.
Scales of blocks in uint8 or float8_e8m0fnu are exponents. Scales of activations and of the KV cache are not used.

From transformers' integrations/finegrained_fp8.py and fbgemm_fp8.py, vLLM's quantization/fp8.py, ModelOpt's export and
GPTQModel's nn_modules/qlinear/fp8.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from llmserve.checkpoint.formats.base import (
    DOTTED,
    EXPONENT_DTYPES,
    FLOAT8,
    OF_ACTIVATIONS,
    SCALE_DTYPES,
    Block,
    Module,
    ModuleCheck,
    StoredWeight,
    at_most,
    in_words,
    read_block,
)
from llmserve.checkpoint.formats.listed import ListedModules, listed_modules
from llmserve.checkpoint.formats.packing import E4M3, EXPONENTS
from llmserve.checkpoint.formats.scaled_rows import ScaledRows, blocks_of
from llmserve.checkpoint.stored_tensor import Tensor
from llmserve.models.config import ConfigReader

SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True, slots=True)
class Fp8:
    block: Block | None  # outputs and inputs that share a scale; None: one scale per output, or a single one
    kept: ListedModules
    kept_key: str
    divides: bool = False  # numbers are divided by the stored scales

    name = "FP8"
    main = "a weight in float8_e4m3fn"
    unused = OF_ACTIVATIONS
    separator, weight_suffix = DOTTED

    def weight(self, module: Module, problems: list[str]) -> StoredWeight | None:
        info, scales = module.tensors.get("weight"), [part for part in SCALES if part in module.tensors]
        if info is None or not (info.dtype in FLOAT8 or scales):
            return None
        check = ModuleCheck(module, problems)
        check.not_listed(self.kept, self.kept_key)
        shape = check.matrix("weight", FLOAT8)
        if len(scales) != 1:
            check.wrong(f"it must have either {' or '.join(SCALES)}" + (", but has both" if scales else ""))
        if not check.passed:
            return None
        (part,) = scales
        block = _scale_block(module, part, shape, self.block, check)
        expand = partial(_expand, module, part, shape, block, self.divides)
        return StoredWeight(shape, f"FP8 ({in_words(self.block or block, shape)})", "weight", frozenset(scales), expand)


def _scale_block(module: Module, part: str, shape: Block, block: Block | None, check: ModuleCheck) -> Block:
    """How many outputs and inputs share a scale of `part`, from its shape and the config."""
    stored = module.tensors[part].shape
    if int(np.prod(stored)) == 1 and block is None:
        check.expect(part, (), SCALE_DTYPES, stored)
        return shape
    block = None if block is None else at_most(block, shape)
    if block is None:
        check.expect(part, (shape[0], 1), SCALE_DTYPES, (shape[0],))
        return 1, shape[1]
    check.expect(part, (-(-shape[0] // block[0]), -(-shape[1] // block[1])), (*SCALE_DTYPES, *EXPONENT_DTYPES))
    return block


def _expand(module: Module, part: str, shape: Block, block: Block, divides: bool) -> ScaledRows:
    stored = module.read("weight").view(np.uint8)
    scales = module.read(part).reshape(-(-shape[0] // block[0]), -1)
    if scales.dtype.itemsize == 1:
        scales = EXPONENTS[scales.view(np.uint8)]
    if divides:
        with np.errstate(divide="ignore"):  # reported when the values are used
            scales = np.float32(1) / scales.astype(np.float32)

    def numbers(rows: slice) -> Tensor:
        return np.take(E4M3, stored[rows])

    return ScaledRows(shape, numbers, scales, block_rows=block[0], block_of=blocks_of(shape[1], block[1]))


def fp8(reader: ConfigReader) -> Fp8:
    """Formats of DeepSeek, Qwen and others (blocks), of AutoFP8 and vLLM (tensors), and of GPTQModel (any)."""
    reader.expect("fmt", "e4m3", "float8_e4m3fn")
    reader.expect("activation_scheme", "dynamic", "static")
    reader.expect("weight_scale_semantics", "inverse")
    key = "modules_to_not_convert" if reader.get("modules_to_not_convert") is not None else "ignored_layers"
    return Fp8(
        read_block(reader.get("weight_block_size"), "weight_block_size", reader.problems),
        listed_modules(reader.get(key), key, reader.problems),
        key,
        divides=reader.get("weight_scale_semantics") is not None,
    )


def fbgemm(reader: ConfigReader) -> Fp8:
    """FBGEMM's format: one scale per output."""
    key = "modules_to_not_convert"
    return Fp8(None, listed_modules(reader.get(key), key, reader.problems), key)


def modelopt(reader: ConfigReader) -> Fp8:
    """The format of NVIDIA's ModelOpt without packed numbers."""
    if reader.get("quant_algo") is None:
        reader.problems.append("quant_algo is missing")
    reader.expect("quant_algo", "FP8")
    key = "ignore" if reader.get("exclude_modules") is None else "exclude_modules"
    return Fp8(None, listed_modules(reader.get(key), key, reader.problems), key)
