"""Unpacks numbers of four or eight bits from larger words, and small floats."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# every value of a byte or half a byte: a look-up is faster than a conversion
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate((E2M1, -E2M1))
EXPONENTS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)  # 2 ** (byte - 127)


def unpacked(words: NDArray[Any], bits: int) -> Bytes:
    """[..., n] words of 32 bits -> [..., n * 32 / bits] numbers of 4 or 8 bits, the lowest first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return octets if bits == 8 else halves(octets)


def halves(octets: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 2 n] four-bit numbers, the low one of each byte first."""
    wide = octets.astype(np.uint16)
    return (wide & 0xF | wide << 4 & 0xF00).view(np.uint8)
