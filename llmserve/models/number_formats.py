"""Number formats. An engine has three: one for its weights, one for its activations and one for its KV cache.

Code reads properties of a format and never compares its name (`tests/test_laws.py`). CONTRIBUTING.md describes how to
add a format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes  # noqa: F401 - registers the name bfloat16 with numpy
import numpy as np

UNROUNDED = "float"  # the precision of all floats
AUTO = "auto"  # cache format: the target's choice


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    name: str
    bits: int  # of a number, without its share of the scale
    group: int = 0  # numbers that share a scale; 0: floats, which have none
    scales: str = ""  # dtype of a scale
    has_zeros: bool = False  # each scale has a zero point of the same dtype
    mixes_heads: bool = False  # dimensions of queries and keys are mixed before they are rounded
    factors: int = 0  # numbers whose scales (and zero points) are multiples of the same float16; 0: not used
    quant_algo: str | None = None  # in an engine's config.json, modeled on TensorRT-LLM's names

    @property
    def is_rounded(self) -> bool:
        return self.group > 0

    @property
    def precision(self) -> str:
        """The precision that reports, gates and kernels distinguish: the name, or UNROUNDED."""
        return self.name if self.is_rounded else UNROUNDED

    @property
    def most(self) -> int:
        """The largest signed integer."""
        return (1 << self.bits - 1) - 1

    @property
    def bits_with_scales(self) -> float:
        of_group = 8 * np.dtype(self.scales).itemsize * (1 + self.has_zeros) if self.scales else 0
        of_factor = 16 * (1 + self.has_zeros) / self.factors if self.factors else 0
        return self.bits + of_group / max(1, self.group) + of_factor

    def num_groups(self, count: int) -> int:
        return -(-count // self.group) if self.is_rounded else 0

    def num_bytes(self, count: int) -> int:
        return int(count * self.bits_with_scales / 8)


AS_COMPUTED = NumberFormat(name=UNROUNDED, bits=32)
INT8_ACTIVATIONS = NumberFormat(name="int8", bits=8, group=32, scales="float32")  # groups of one token


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat(NumberFormat):
    values: str  # dtype of the numbers before they are packed
    activations: NumberFormat = AS_COMPUTED  # of the values that weights are multiplied with
    short: str = ""  # in names of engine directories
    keeps_blocks: bool = False  # each matrix keeps its format from a GGUF file, one of BLOCKS or INT8
    tolerance: float = 0.0  # largest accepted error of a self-test, relative to the largest logit
    wider: WeightFormat | None = None  # format of the head, and of rows whose rounding costs most
    most_bits: float = 0.0  # maximum of the average bits of the layers' weights, including such rows
    least_exponent: int = 0  # smallest exponent of 2 that equalization applies, if sizes are measured
    usual_loss: float = 0.0  # nats: the most that a correct engine in docs/quantization.md loses
    weight_only_algo: str | None = None  # TensorRT-LLM's name of its weight-only format with as many bits


FLOAT16 = WeightFormat(name="float16", bits=16, values="float16", short="fp16", tolerance=5e-3)
BFLOAT16 = WeightFormat(name="bfloat16", bits=16, values="bfloat16", short="bf16", tolerance=4e-2)
FLOAT32 = WeightFormat(name="float32", bits=32, values="float32", short="fp32", tolerance=1e-4)
INT8 = WeightFormat(
    name="int8", bits=8, values="int8", group=32, scales="float16", activations=INT8_ACTIVATIONS, least_exponent=1,
    quant_algo="W8A8_INT8_GROUPED", usual_loss=0.01, weight_only_algo="W8A16",
)  # fmt: skip
INT4 = WeightFormat(
    # At four bits, uneven columns cost more than activations gain, unless their channels differ widely.
    name="int4", bits=4, values="uint8", group=32, scales="uint8", has_zeros=True, activations=INT8_ACTIVATIONS,
    wider=INT8, most_bits=4.9, least_exponent=3, quant_algo="W4A8_INT8_GROUPED", weight_only_algo="W4A16",
    usual_loss=0.03,
)  # fmt: skip


def _of_blocks(
    name: str, bits: int, group: int, scales: str, *, minima: bool = False, factors: int = 0
) -> WeightFormat:
    """The zero points (`has_zeros`) are minima, which are subtracted."""
    return WeightFormat(
        name=name, bits=bits, values="uint8", group=group, scales=scales, has_zeros=minima, factors=factors,
        activations=INT8_ACTIVATIONS,
    )  # fmt: skip


BLOCKS: Mapping[str, WeightFormat] = {  # by ggml's names; Q8_0 is INT8
    each.name: each
    for each in (
        _of_blocks("Q4_0", 4, 32, "float16"),
        _of_blocks("Q4_1", 4, 32, "float16", minima=True),
        _of_blocks("Q5_0", 5, 32, "float16"),
        _of_blocks("Q5_1", 5, 32, "float16", minima=True),
        _of_blocks("Q4_K", 4, 32, "uint8", minima=True, factors=256),
        _of_blocks("Q5_K", 5, 32, "uint8", minima=True, factors=256),
        _of_blocks("Q6_K", 6, 16, "int8", factors=256),
        _of_blocks("Q3_K", 3, 16, "int8", factors=256),
        _of_blocks("Q2_K", 2, 16, "uint8", factors=128),  # scale and minimum share a byte; two factors for 256 numbers
        _of_blocks("IQ4_NL", 4, 32, "float16"),
        _of_blocks("IQ4_XS", 4, 32, "int8", factors=256),
        _of_blocks("MXFP4", 4, 32, "uint8"),
    )
}
GGUF = WeightFormat(
    name="gguf", bits=8, values="uint8", group=32, scales="float16", activations=INT8_ACTIVATIONS, keeps_blocks=True,
    quant_algo="GGUF", usual_loss=0.01,
)  # fmt: skip
# Keys have a scale for each group of dimensions, values one for each token and head.
INT8_CACHE = NumberFormat(name="int8", bits=8, group=32, scales="float32", quant_algo="INT8")

FLOATS: Mapping[str, WeightFormat] = {each.name: each for each in (FLOAT16, BFLOAT16, FLOAT32)}
ROUNDED: Mapping[str, WeightFormat] = {each.name: each for each in (INT8, INT4)}
QUANTIZED: Mapping[str, WeightFormat] = {**ROUNDED, GGUF.name: GGUF}
WEIGHTS: Mapping[str, WeightFormat] = {**FLOATS, **QUANTIZED}
CACHES: Mapping[str, NumberFormat] = {**FLOATS, INT8_CACHE.name: INT8_CACHE}
