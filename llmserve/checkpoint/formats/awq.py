"""AWQ, in AutoAWQ's `gemm` order: packed along the outputs, with a zero point per group and output.

    qweight  int32 [inputs, outputs / 8]    of eight consecutive outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7
    qzeros   int32 [groups, outputs / 8]    likewise; as they are
    scales   float [groups, outputs]

From AutoAWQ's modules/linear/gemm.py and utils/packing_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from llmserve.checkpoint.formats.base import (
    DOTTED,
    NOTHING,
    SCALE_DTYPES,
    WORDS,
    Module,
    ModuleCheck,
    StoredWeight,
    grouped,
    read_group_size,
)
from llmserve.checkpoint.formats.listed import ListedModules, listed_modules
from llmserve.checkpoint.formats.packing import Bytes, unpacked
from llmserve.checkpoint.formats.scaled_rows import ScaledRows
from llmserve.checkpoint.stored_tensor import Tensor
from llmserve.models.config import ConfigReader

PER_WORD = 8
MIDDLE = 8  # of four bits: the zero point of symmetric weights
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # position in a word of each of eight outputs


@dataclass(frozen=True, slots=True)
class Awq:
    group_size: int  # -1: all inputs
    symmetric: bool  # every zero point is the middle; they are stored nevertheless
    kept: ListedModules  # modules that are not quantized

    name = "AWQ"
    main = "qweight"
    unused = NOTHING
    separator, weight_suffix = DOTTED

    def weight(self, module: Module, problems: list[str]) -> StoredWeight | None:
        if self.main not in module.tensors:
            return None
        check = ModuleCheck(module, problems)
        check.not_listed(self.kept, "modules_to_not_convert")
        num_inputs, num_words = check.matrix("qweight", WORDS)
        group_size = self.group_size if self.group_size > 0 else max(1, num_inputs)
        if not check.passed or not check.divides(group_size, num_inputs):
            return None
        shape = (num_words * PER_WORD, num_inputs)
        check.expect("qzeros", (num_inputs // group_size, num_words), WORDS)
        check.expect("scales", (num_inputs // group_size, shape[0]), SCALE_DTYPES)
        if self.symmetric and check.passed and (unpacked(module.read("qzeros"), 4) != MIDDLE).any():
            check.wrong(f"zero_point is false in the config, but not all zero points are {MIDDLE}")
        others = frozenset({"qzeros", "scales"} & module.tensors.keys())
        kind = f"AWQ int4 ({grouped(self.group_size)})"
        return StoredWeight(shape, kind, self.main, others, partial(_expand, module, shape))


def _expand(module: Module, shape: tuple[int, int]) -> ScaledRows:
    words: Tensor = module.read("qweight")
    scales = np.ascontiguousarray(module.read("scales").T)
    zeros = np.ascontiguousarray(_in_order(module.read("qzeros")).T)

    def numbers(rows: slice) -> Bytes:
        first = rows.start // PER_WORD
        of_words = _in_order(words[:, first : -(-rows.stop // PER_WORD)])
        begin = rows.start - first * PER_WORD
        return np.ascontiguousarray(of_words[:, begin : begin + rows.stop - rows.start].T)

    return ScaledRows(shape, numbers, scales, zeros)


def _in_order(words: Tensor) -> Bytes:
    """[n, words] -> [n, outputs]."""
    return unpacked(words, 4).reshape(len(words), -1, PER_WORD)[:, :, PLACES].reshape(len(words), -1)


def awq(reader: ConfigReader) -> Awq:
    """Read a config written by AutoAWQ or GPTQModel; problems are added to the reader's."""
    reader.integer("bits", 4, maximum=32)
    reader.expect("bits", 4)
    order = str(reader.get("version", reader.get("format", "gemm"))).lower()
    if order != "gemm":
        reader.problems.append(
            f"version {order!r} is not supported; supported: 'gemm', which AutoAWQ writes with {{'version': 'GEMM'}}"
        )
    has_zeros = reader.flag("zero_point", True)  # GPTQModel's default is false
    kept = listed_modules(reader.get("modules_to_not_convert"), "modules_to_not_convert", reader.problems)
    return Awq(read_group_size(reader.get("group_size", 128), "group_size", reader.problems), not has_zeros, kept)
