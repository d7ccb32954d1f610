"""How ggml stores numbers: each type has blocks of a number of elements, and a conversion to float32.

The layouts are those of ggml's `ggml-common.h`, the arithmetic and its order those of `dequantize_row_*` in
`ggml-quants.c` without fused multiply-adds, so that the values are bitwise identical on every machine. Names of
fields follow ggml's: `d` is a scale, `m` or `dmin` an offset, `qs` the low bits, `qh` the high ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

Blocks: TypeAlias = NDArray[Any]  # [blocks] in a type's layout
Values: TypeAlias = NDArray[np.float32]  # [blocks, elements]
Bytes: TypeAlias = NDArray[np.uint8]
SignedBytes: TypeAlias = NDArray[np.int8]

FOUR = np.uint8(4)
TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
SMALL, LARGE = 32, 256  # elements of a block: of the first types, and of K types


@dataclass(frozen=True, slots=True)
class BlockType:
    name: str
    num_elements: int
    layout: np.dtype[Any]
    expand: Callable[[Blocks], Values] | None = None  # None: the elements already are numbers
    codes: Callable[[Blocks], Bytes] | None = None  # [blocks, elements], before scales and minima of groups:
    items: Callable[[Blocks], Sequence[NDArray[Any]]] | None = None  # arrays [blocks], in the order of an engine file
    integers: Callable[[Blocks], SignedBytes] | None = None  # if elements are these numbers, times the block's `d`

    @property
    def num_bytes(self) -> int:
        return self.layout.itemsize


def _halves(qs: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 2 n]: all low halves, then all high halves."""
    return np.concatenate((qs & 0xF, qs >> 4), axis=-1)


def _bits(qh: Bytes) -> Bytes:
    """[blocks, n] bytes -> [blocks, 8 n] bits, the lowest first."""
    return np.unpackbits(qh, axis=-1, bitorder="little")


def _column(scales: NDArray[Any]) -> Values:
    """[blocks] or [blocks, groups] -> float32 with one more axis, for the elements."""
    return scales.astype(np.float32)[..., np.newaxis]


def _eight_bits(blocks: Blocks) -> SignedBytes:
    values: SignedBytes = blocks["qs"]
    return values


def _four_bits_signed(blocks: Blocks) -> SignedBytes:
    return _halves(blocks["qs"]).view(np.int8) - np.int8(8)


def _five_bits_signed(blocks: Blocks) -> SignedBytes:
    return _five_bits(blocks).view(np.int8) - np.int8(16)


def _q8_0(blocks: Blocks) -> Values:
    return _eight_bits(blocks) * _column(blocks["d"])


def _q4_0(blocks: Blocks) -> Values:
    return _column(blocks["d"]) * _four_bits_signed(blocks)


def _q4_1(blocks: Blocks) -> Values:
    return _column(blocks["d"]) * _halves(blocks["qs"]) + _column(blocks["m"])


def _five_bits(blocks: Blocks) -> Bytes:
    return _halves(blocks["qs"]) | np.left_shift(_bits(blocks["qh"]), FOUR)


def _q5_0(blocks: Blocks) -> Values:
    return _column(blocks["d"]) * _five_bits_signed(blocks)


def _q5_1(blocks: Blocks) -> Values:
    return _column(blocks["d"]) * _five_bits(blocks) + _column(blocks["m"])


def _scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """[blocks, 12] bytes -> two times [blocks, 8] numbers of six bits.

    The first four scales are the low bits of bytes 0 to 3, the first four minima those of 4 to 7. The others have their
    low four bits in the halves of bytes 8 to 11, and their high two bits above those of the first four.
    """
    scales, minima, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    return (
        np.concatenate((scales & 63, (rest & 0xF) | (scales >> 6) << 4), axis=1),
        np.concatenate((minima & 63, (rest >> 4) | (minima >> 6) << 4), axis=1),
    )


def _scaled_with_minima(blocks: Blocks, quants: Bytes) -> Values:
    """`quants` [blocks, 8, 32]: groups of 32 elements, each with its scale and minimum."""
    scales, minima = _scales_and_minima(blocks["scales"])
    d = _column(_column(blocks["d"]) * scales)
    dmin = _column(_column(blocks["dmin"]) * minima)
    values: Values = d * quants - dmin
    return values.reshape(len(blocks), LARGE)


def _scale(blocks: Blocks) -> Sequence[NDArray[Any]]:
    return [blocks["d"]]


def _scale_and_minimum(blocks: Blocks) -> Sequence[NDArray[Any]]:
    return [blocks["d"], blocks["m"]]


def _scales_of_groups(blocks: Blocks) -> Sequence[NDArray[Any]]:
    scales, minima = _scales_and_minima(blocks["scales"])
    return [blocks["d"], blocks["dmin"], *np.stack((scales, minima), axis=2).reshape(len(blocks), -1).T]


def _scales_of_half_groups(blocks: Blocks) -> Sequence[NDArray[Any]]:
    return [blocks["d"], *blocks["scales"].T]


def _four_bits(blocks: Blocks) -> Bytes:
    return _halves(blocks["qs"])


def _four_bits_k(blocks: Blocks) -> Bytes:
    return _halves(blocks["qs"].reshape(-1, 4, 32)).reshape(-1, LARGE)


def _q4_k(blocks: Blocks) -> Values:
    return _scaled_with_minima(blocks, _four_bits_k(blocks).reshape(-1, 8, 32))


def _five_bits_k(blocks: Blocks) -> Bytes:
    low = _halves(blocks["qs"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    planes = np.arange(8, dtype=np.uint8)[:, np.newaxis]  # bit i of the 32 high bytes belongs to group i
    high = np.left_shift(blocks["qh"][:, np.newaxis] >> planes & 1, FOUR)
    codes: Bytes = (low | high).reshape(-1, LARGE)
    return codes


def _q5_k(blocks: Blocks) -> Values:
    return _scaled_with_minima(blocks, _five_bits_k(blocks).reshape(-1, 8, 32))


def _six_bits_k(blocks: Blocks) -> Bytes:
    """Sixteen groups of 16 elements. Each half of a block has 64 low bytes and 32 high ones, for four runs of 32."""
    low = _halves(blocks["ql"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, np.newaxis]
    high = blocks["qh"].reshape(-1, 2, 1, 32) >> shifts & 3
    codes: Bytes = (low | np.left_shift(high, FOUR)).reshape(-1, LARGE)
    return codes


def _q6_k(blocks: Blocks) -> Values:
    quants = _six_bits_k(blocks).view(np.int8) - np.int8(32)
    d = _column(blocks["d"]) * blocks["scales"]
    values: Values = _column(d) * quants.reshape(-1, 16, 16)
    return values.reshape(len(blocks), LARGE)


def _two_bits_k(blocks: Blocks) -> Bytes:
    """Sixteen groups of 16 elements. Each half of a block has 32 bytes, for four runs of 32."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, np.newaxis]
    codes: Bytes = (blocks["qs"].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, LARGE)
    return codes


def _q2_k(blocks: Blocks) -> Values:
    d = _column(_column(blocks["d"]) * (blocks["scales"] & 0xF))
    dmin = _column(_column(blocks["dmin"]) * (blocks["scales"] >> 4))
    values: Values = d * _two_bits_k(blocks).reshape(-1, 16, 16) - dmin
    return values.reshape(len(blocks), LARGE)


def _scales_and_minima_of_half_groups(blocks: Blocks) -> Sequence[NDArray[Any]]:
    return [blocks["d"], blocks["dmin"], *blocks["scales"].T]


def _three_bits_k(blocks: Blocks) -> Bytes:
    """Like `_two_bits_k`; bit i of 32 more bytes is the highest bit of run i."""
    planes = np.arange(8, dtype=np.uint8)[:, np.newaxis]
    high = (blocks["hmask"][:, np.newaxis] >> planes & 1).reshape(-1, LARGE)
    codes: Bytes = _two_bits_k(blocks) | np.left_shift(high, np.uint8(2))
    return codes


def _scales_of_three_bits(blocks: Blocks) -> SignedBytes:
    """[blocks, 16]: low four bits in the halves of eight bytes, high two in the quarters of the next four."""
    low, high = _halves(blocks["scales"][:, :8]), blocks["scales"][:, 8:]
    quarters = (high[:, np.newaxis] >> np.arange(0, 8, 2, dtype=np.uint8)[:, np.newaxis] & 3).reshape(-1, 16)
    scales: SignedBytes = (low | np.left_shift(quarters, FOUR)).view(np.int8) - np.int8(32)
    return scales


def _q3_k(blocks: Blocks) -> Values:
    quants = _three_bits_k(blocks).view(np.int8) - np.int8(4)
    d = _column(blocks["d"]) * _scales_of_three_bits(blocks)
    values: Values = _column(d) * quants.reshape(-1, 16, 16)
    return values.reshape(len(blocks), LARGE)


def _scales_of_few_bits(blocks: Blocks) -> Sequence[NDArray[Any]]:
    return [blocks["d"], *_scales_of_three_bits(blocks).T]


def _iq4_nl(blocks: Blocks) -> Values:
    return _column(blocks["d"]) * UNEVEN[_halves(blocks["qs"])]


def _uneven_codes(blocks: Blocks) -> Bytes:
    return _halves(blocks["qs"].reshape(-1, 8, 16)).reshape(-1, LARGE)


def _uneven_scales(blocks: Blocks) -> SignedBytes:
    """[blocks, 8]: low four bits in the halves of four bytes, high two in a 16-bit number."""
    packed = blocks["scales_l"]
    low = np.stack((packed & 0xF, packed >> 4), axis=-1).reshape(-1, 8)
    high = (blocks["scales_h"][:, np.newaxis] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    scales: SignedBytes = (low | np.left_shift(high, FOUR)).view(np.int8) - np.int8(32)
    return scales


def _iq4_xs(blocks: Blocks) -> Values:
    d = _column(blocks["d"]) * _uneven_scales(blocks)
    values: Values = _column(d) * UNEVEN[_uneven_codes(blocks)].reshape(-1, 8, 32)
    return values.reshape(len(blocks), LARGE)


def _scales_of_uneven(blocks: Blocks) -> Sequence[NDArray[Any]]:
    return [blocks["d"], *_uneven_scales(blocks).T]


def _exponent(blocks: Blocks) -> Sequence[NDArray[Any]]:
    return [blocks["e"]]


def _mxfp4(blocks: Blocks) -> Values:
    """Four-bit numbers with an exponent. The table has twice each number, so the scale is half of a power of two."""
    exponents = blocks["e"].astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(0x00200000) << exponents, (exponents - np.uint32(1)) << np.uint32(23))
    values: Values = bits.astype(np.uint32).view(np.float32)[:, np.newaxis] * TWICE_E2M1[_halves(blocks["qs"])]
    return values


def _layout(**fields: tuple[DTypeLike, int]) -> np.dtype[Any]:
    return np.dtype([(name, kind, count) if count > 1 else (name, kind) for name, (kind, count) in fields.items()])


_HALF = ("<f2", 1)
TYPES: Mapping[int, BlockType] = {  # by the type's number in the file
    0: BlockType("F32", 1, np.dtype("<f4")),
    1: BlockType("F16", 1, np.dtype("<f2")),
    2: BlockType("Q4_0", SMALL, _layout(d=_HALF, qs=("u1", 16)),
                 _q4_0, _four_bits, _scale, integers=_four_bits_signed),
    3: BlockType("Q4_1", SMALL, _layout(d=_HALF, m=_HALF, qs=("u1", 16)),
                 _q4_1, _four_bits, _scale_and_minimum),
    6: BlockType("Q5_0", SMALL, _layout(d=_HALF, qh=("u1", 4), qs=("u1", 16)),
                 _q5_0, _five_bits, _scale, integers=_five_bits_signed),
    7: BlockType("Q5_1", SMALL, _layout(d=_HALF, m=_HALF, qh=("u1", 4), qs=("u1", 16)),
                 _q5_1, _five_bits, _scale_and_minimum),
    8: BlockType("Q8_0", SMALL, _layout(d=_HALF, qs=("i1", 32)),
                 _q8_0, integers=_eight_bits),
    10: BlockType("Q2_K", LARGE, _layout(scales=("u1", 16), qs=("u1", 64), d=_HALF, dmin=_HALF),
                  _q2_k, _two_bits_k, _scales_and_minima_of_half_groups),
    11: BlockType("Q3_K", LARGE, _layout(hmask=("u1", 32), qs=("u1", 64), scales=("u1", 12), d=_HALF),
                  _q3_k, _three_bits_k, _scales_of_few_bits),
    12: BlockType("Q4_K", LARGE, _layout(d=_HALF, dmin=_HALF, scales=("u1", 12), qs=("u1", 128)),
                  _q4_k, _four_bits_k, _scales_of_groups),
    13: BlockType("Q5_K", LARGE, _layout(d=_HALF, dmin=_HALF, scales=("u1", 12), qh=("u1", 32), qs=("u1", 128)),
                  _q5_k, _five_bits_k, _scales_of_groups),
    14: BlockType("Q6_K", LARGE, _layout(ql=("u1", 128), qh=("u1", 64), scales=("i1", 16), d=_HALF),
                  _q6_k, _six_bits_k, _scales_of_half_groups),
    20: BlockType("IQ4_NL", SMALL, _layout(d=_HALF, qs=("u1", 16)),
                  _iq4_nl, _four_bits, _scale),
    23: BlockType("IQ4_XS", LARGE, _layout(d=_HALF, scales_h=("<u2", 1), scales_l=("u1", 4), qs=("u1", 128)),
                  _iq4_xs, _uneven_codes, _scales_of_uneven),
    28: BlockType("F64", 1, np.dtype("<f8")),
    30: BlockType("BF16", 1, np.dtype(ml_dtypes.bfloat16)),
    39: BlockType("MXFP4", SMALL, _layout(e=("u1", 1), qs=("u1", 16)),
                  _mxfp4, _four_bits, _exponent),
}  # fmt: skip
SUPPORTED = ", ".join(kind.name for kind in TYPES.values())
UNSUPPORTED: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def type_name(type_id: int) -> str:
    """ggml's name of a type that is not in TYPES."""
    return UNSUPPORTED.get(type_id, f"number {type_id}, which this version does not know")
