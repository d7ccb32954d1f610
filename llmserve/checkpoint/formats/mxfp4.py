"""MXFP4 as gpt-oss has it: the matrices of all experts of a layer, in float4_e2m1fn with an exponent per 32 inputs.

    NAME_blocks  uint8 [experts, outputs, inputs / 32, 16]    two consecutive inputs per byte, the low half first
    NAME_scales  uint8 [experts, outputs, inputs / 32]        exponents

They represent NAME [experts, inputs, outputs], as in transformers. From transformers' integrations/mxfp4.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from llmserve.checkpoint.formats.base import NOTHING, Module, ModuleCheck, StoredWeight
from llmserve.checkpoint.formats.packing import E2M1, EXPONENTS, halves
from llmserve.checkpoint.stored_tensor import Tensor
from llmserve.models.config import ConfigReader

GROUP, GROUP_BYTES = 32, 16
KEPT_EXPERTS = 2  # expanded at a time: rows are requested in pieces


@dataclass(frozen=True, slots=True)
class Mxfp4:
    name = "MXFP4"
    main = "experts' blocks"
    unused = NOTHING
    separator, weight_suffix = "_", ""

    def weight(self, module: Module, problems: list[str]) -> StoredWeight | None:
        info = module.tensors.get("blocks")
        if info is None:
            return None
        check = ModuleCheck(module, problems)
        if info.dtype != "uint8" or len(info.shape) != 4 or info.shape[3] != GROUP_BYTES or 0 in info.shape:
            check.wrong(
                f"tensor blocks must be uint8 [experts, outputs, groups, 16], got {info.dtype} {list(info.shape)}"
            )
            return None
        experts, outputs, groups, _ = info.shape
        check.expect("scales", (experts, outputs, groups), ("uint8",))
        if not check.passed:
            return None
        shape = (experts, groups * GROUP, outputs)
        return StoredWeight(shape, "MXFP4", "blocks", frozenset({"scales"}), partial(ExpertRows, module))


class ExpertRows:
    def __init__(self, module: Module) -> None:
        self._blocks, self._scales = module.read("blocks"), module.read("scales")
        self._matrix = lru_cache(KEPT_EXPERTS)(self._expanded)

    def __getitem__(self, experts: slice, /) -> Tensor:
        found = [self._matrix(expert) for expert in range(*experts.indices(len(self._blocks)))]
        matrices = found[0][np.newaxis] if len(found) == 1 else np.stack(found)  # a single expert is not copied
        return matrices.swapaxes(1, 2)

    def _expanded(self, expert: int) -> Tensor:
        numbers = np.take(E2M1, halves(self._blocks[expert]))
        with np.errstate(over="ignore", invalid="ignore"):  # reported when the values are used
            numbers *= EXPONENTS[self._scales[expert]][:, :, np.newaxis]
        return numbers.reshape(len(numbers), -1)


def mxfp4(reader: ConfigReader) -> Mxfp4:
    """The tensors show which modules are stored otherwise."""
    return Mxfp4()
