"""GPTQ, as AutoGPTQ, GPTQModel and Optimum write it: packed along the inputs, with a zero point per group and output.

    qweight  int32 [inputs * bits / 32, outputs]    from the lowest bits on, consecutive inputs
    qzeros   int32 [groups, outputs * bits / 32]    likewise consecutive outputs; in `gptq` (version 1) each less one
    scales   float [groups, outputs]
    g_idx    int32 [inputs]                         the group of each input; may be missing where groups are in order

From AutoGPTQ's qlinear_cuda.py and GPTQModel's utils/model.py. Version 1 stores a zero point 0 as -1, which programs
read as 0, as 2**bits, or as a borrow from its neighbour: such files are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from llmserve.checkpoint.formats.listed import Pattern
from llmserve.checkpoint.formats.packing import Bytes, unpacked
from llmserve.checkpoint.formats.scaled_rows import ScaledRows
from llmserve.checkpoint.stored_tensor import Tensor
from llmserve.models.config import ConfigReader

SHIFTS = {"gptq": 1, "gptq_v2": 0}  # what to add to a stored zero point, by the name of the format


@dataclass(frozen=True, slots=True)
class Settings:
    bits: int
    group_size: int  # -1: all inputs
    symmetric: bool
    has_order: bool  # desc_act: inputs were processed in another order, so g_idx is required


@dataclass(frozen=True, slots=True)
class Gptq:
    settings: Settings
    shift: int
    special: Sequence[tuple[Pattern, Settings | None]] = ()  # settings of some modules; None: not quantized

    name = "GPTQ"
    main = "qweight"
    unused = NOTHING
    separator, weight_suffix = DOTTED

    def weight(self, module: Module, problems: list[str]) -> StoredWeight | None:
        if self.main not in module.tensors:
            return None
        settings = next((own for pattern, own in self.special if pattern.matches(module.name)), self.settings)
        check = ModuleCheck(module, problems)
        if settings is None:
            check.wrong("it is quantized, but the config lists it as unquantized")
            return None
        rows, num_outputs = check.matrix("qweight", WORDS)
        per_word = 32 // settings.bits
        num_inputs = rows * per_word
        group_size = settings.group_size if settings.group_size > 0 else max(1, num_inputs)
        if not check.passed or not check.divides(group_size, num_inputs):
            return None
        if num_outputs % per_word:
            check.wrong(f"its {num_outputs} outputs are not a multiple of {per_word}")
        num_groups = num_inputs // group_size
        check.expect("qzeros", (num_groups, num_outputs // per_word), WORDS)
        check.expect("scales", (num_groups, num_outputs), SCALE_DTYPES)
        if settings.has_order or "g_idx" in module.tensors:
            check.group_indexes("g_idx", num_inputs, num_groups)
        if check.passed:
            self._check_zeros(module, settings, check)
        return StoredWeight(
            shape=(num_outputs, num_inputs),
            kind=f"GPTQ int{settings.bits} ({grouped(settings.group_size)})",
            main=self.main,
            others=frozenset({"qzeros", "scales", "g_idx"} & module.tensors.keys()),
            expand=partial(self._expand, module, settings, (num_outputs, num_inputs)),
        )

    def _check_zeros(self, module: Module, settings: Settings, check: ModuleCheck) -> None:
        largest = 2**settings.bits - 1
        stored = unpacked(module.read("qzeros"), settings.bits)
        if self.shift and (stored == largest).any():
            check.wrong(
                f"a zero point in qzeros is {largest} + 1, but must be from 0 to {largest}; save it again with "
                '"checkpoint_format": "gptq_v2"'
            )
        elif settings.symmetric and (stored != (largest + 1) // 2 - self.shift).any():
            check.wrong(
                f"sym is true in the config, but not all zero points are {(largest + 1) // 2}: "
                "sym, checkpoint_format or packing_format is wrong"
            )

    def _expand(self, module: Module, settings: Settings, shape: tuple[int, int]) -> ScaledRows:
        words: Tensor = module.read("qweight")
        scales = np.ascontiguousarray(module.read("scales").T)
        zeros = np.ascontiguousarray(unpacked(module.read("qzeros"), settings.bits).T) + np.uint8(self.shift)
        block_of = None
        if "g_idx" in module.tensors:
            block_of = module.read("g_idx").astype(np.intp)
            if np.array_equal(block_of, np.arange(shape[1]) // (shape[1] // scales.shape[1])):
                block_of = None

        def numbers(rows: slice) -> Bytes:
            return unpacked(words[:, rows].T, settings.bits)

        return ScaledRows(shape, numbers, scales, zeros, block_of=block_of)


def gptq(reader: ConfigReader) -> Gptq:
    """Read a config written by AutoGPTQ or GPTQModel; problems are added to the reader's."""
    bits = reader.integer("bits", maximum=32)
    reader.expect("bits", 4, 8)
    kind = str(reader.get("checkpoint_format", reader.get("format", "gptq"))).lower()
    if reader.get("is_marlin_format"):
        kind = "marlin"
    if kind not in SHIFTS:
        reader.problems.append(
            f"checkpoint_format {kind!r} is not supported; supported: {', '.join(SHIFTS)} (GPTQModel converts to them)"
        )
    if rotation := reader.get("rotation"):
        reader.problems.append(
            f"rotation {rotation!r} is not supported, as it would also transform activations; quantize it again "
            "without rotation"
        )
    settings = Settings(
        bits=bits if bits in (4, 8) else 4,
        group_size=read_group_size(reader.get("group_size", -1), "group_size", reader.problems),
        symmetric=reader.flag("sym"),
        has_order=reader.flag("desc_act"),
    )
    return Gptq(settings, SHIFTS.get(kind, 0), tuple(_special(reader, settings)))


def _special(reader: ConfigReader, settings: Settings) -> list[tuple[Pattern, Settings | None]]:
    """GPTQModel's `dynamic`: settings that differ, by pattern; `-:` marks modules that are not quantized."""
    dynamic = reader.get("dynamic", {})
    if not isinstance(dynamic, Mapping):
        reader.problems.append(f"dynamic must be an object, got {dynamic!r}")
        return []
    found: list[tuple[Pattern, Settings | None]] = []
    for text, own in dynamic.items():
        try:
            pattern = Pattern(text.removeprefix("-:").removeprefix("+:"))
        except ValueError as error:
            reader.problems.append(f"dynamic: {error}")
            continue
        if text.startswith("-:"):
            found.append((pattern, None))
        elif isinstance(own, Mapping):
            found.append((pattern, overridden(own, settings, f"dynamic {text!r}", reader.problems)))
        else:
            reader.problems.append(f"dynamic {text!r} must be an object, got {own!r}")
    return found


def overridden(own: Mapping[str, Any], settings: Settings, key: str, problems: list[str]) -> Settings:
    changed = replace(settings, group_size=read_group_size(own.get("group_size", settings.group_size), key, problems))
    if (bits := own.get("bits", settings.bits)) not in (4, 8) or not isinstance(bits, int):
        problems.append(f"{key}: bits {bits!r} is not supported; supported: 4, 8")
    else:
        changed = replace(changed, bits=bits)
    flags = {"sym": changed.symmetric, "desc_act": changed.has_order}
    for name in flags:
        value = own.get(name, flags[name])
        if not isinstance(value, bool):
            problems.append(f"{key}: {name} must be true or false, got {value!r}")
        else:
            flags[name] = value
    return replace(changed, symmetric=flags["sym"], has_order=flags["desc_act"])
