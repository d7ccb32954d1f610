"""compressed-tensors, as LLM Compressor writes it: groups of modules, each with a scheme and one of these formats.

    int-quantized, naive-quantized    weight int8 [outputs, inputs]
    float-quantized                   weight float8_e4m3fn [outputs, inputs]
    pack-quantized                    weight_packed int32 [outputs, inputs * bits / 32], weight_shape [2]
    mxfp4- and nvfp4-pack-quantized   `fp4.py`

    weight_scale       by the scheme's strategy one number, [outputs, 1], [outputs, groups] or one per block
    weight_zero_point  likewise, int8; beside packed weights packed int32 [outputs * bits / 32, groups]
    weight_g_idx       int32 [inputs], the group of each input, with actorder `group`

A packed number is the value plus half its range, from the lowest bits on. From compressed-tensors' quant_args.py,
compressors/ and quantization/lifecycle/forward_helpers.py. Scales of activations and of the KV cache are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmserve.checkpoint.formats.base import (
    DOTTED,
    FLOAT8,
    OF_ACTIVATIONS,
    SCALE_DTYPES,
    WORDS,
    Block,
    Module,
    ModuleCheck,
    StoredWeight,
)
from llmserve.checkpoint.formats.fp4 import fp4_weight
from llmserve.checkpoint.formats.listed import ListedModules, listed_modules
from llmserve.checkpoint.formats.packing import E4M3, unpacked
from llmserve.checkpoint.formats.scaled_rows import Numbers, ScaledRows, blocks_of
from llmserve.checkpoint.formats.scheme import KINDS, MX, NV, PACKED, Scheme, read_scheme
from llmserve.checkpoint.stored_tensor import Tensor
from llmserve.models.config import ConfigReader

EVERY = "Linear"  # the target that matches every linear module
SCALE, ZERO, ORDER = "weight_scale", "weight_zero_point", "weight_g_idx"
PARTS = frozenset({"weight_packed", SCALE})


@dataclass(frozen=True, slots=True)
class Group:
    targets: ListedModules
    is_every: bool
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    groups: Sequence[Group]
    kept: ListedModules  # modules that are not quantized

    name = "compressed-tensors"
    unused = OF_ACTIVATIONS
    separator, weight_suffix = DOTTED

    @property
    def main(self) -> str:
        """Empty: no weight is quantized, only the KV cache or activations."""
        return "weight_packed or weight_scale" if self.groups else ""

    def weight(self, module: Module, problems: list[str]) -> StoredWeight | None:
        info = module.tensors.get("weight")
        if not PARTS & module.tensors.keys() and (info is None or info.dtype not in ("int8", *FLOAT8)):
            return None
        check = ModuleCheck(module, problems)
        check.not_listed(self.kept, "ignore")
        scheme = self._scheme_of(module.name)
        if scheme is None:
            check.wrong("it is quantized, but no group in the config includes it")
            return None
        if scheme.format in (MX, NV):
            return fp4_weight(module, check, is_nvidia=scheme.format == NV)
        main = "weight_packed" if scheme.format == PACKED else "weight"
        if main not in module.tensors:
            check.wrong(f"tensor {main} is missing")
        if not check.passed:
            return None
        shape = _packed_shape(module, scheme, check) if scheme.format == PACKED else _shape(module, scheme, check)
        if shape is None or not check.passed or not scheme.fits(shape, check):
            return None
        others = _check_others(module, scheme, shape, check)
        expand = partial(_expand_packed if scheme.format == PACKED else _expand, module, scheme, shape)
        return StoredWeight(shape, scheme.kind(shape), main, others, expand)

    def _scheme_of(self, module: str) -> Scheme | None:
        named = (group.scheme for group in self.groups if module in group.targets)
        others = (group.scheme for group in self.groups if group.is_every)
        return next(named, None) or next(others, None)


def _shape(module: Module, scheme: Scheme, check: ModuleCheck) -> Block:
    return check.matrix("weight", FLOAT8 if scheme.is_float else ("int8",))


def _packed_shape(module: Module, scheme: Scheme, check: ModuleCheck) -> Block | None:
    stored = check.matrix("weight_packed", WORDS)
    check.expect("weight_shape", (2,), ("int64", "int32"))
    if not check.passed:
        return None
    num_outputs, num_inputs = (int(size) for size in module.read("weight_shape"))
    if num_inputs < 1 or stored != (num_outputs, -(-num_inputs * scheme.bits // 32)):
        check.wrong(
            f"weight_packed {list(stored)} does not have the elements of weight_shape, {[num_outputs, num_inputs]}"
        )
    return num_outputs, num_inputs


def _check_others(module: Module, scheme: Scheme, shape: Block, check: ModuleCheck) -> frozenset[str]:
    """Check all tensors except the numbers, and return their names."""
    parts = {SCALE, "weight_shape"} if scheme.format == PACKED else {SCALE}
    scales, *same = scheme.scale_shapes(shape)
    check.expect(SCALE, scales, SCALE_DTYPES, *same)
    if scheme.symmetric:
        if ZERO in module.tensors and module.read(ZERO).any():
            check.wrong("it has zero points, but the config describes it as symmetric")
    elif scheme.format == PACKED:
        check.expect(ZERO, (-(-scales[0] * scheme.bits // 32), scales[1]), WORDS)
    else:
        check.expect(ZERO, scales, ("int8",), *same)
        half = 2 ** (scheme.bits - 1)
        if check.passed and ((zeros := module.read(ZERO)).min() < -half or zeros.max() >= half):
            check.wrong(f"zero points are {zeros.min()} to {zeros.max()}, but must be from {-half} to {half - 1}")
    if scheme.has_order:
        check.group_indexes(ORDER, shape[1], shape[1] // scheme.group_size)
        parts.add(ORDER)
    return frozenset((parts | {ZERO}) & module.tensors.keys())


def _expand(module: Module, scheme: Scheme, shape: Block) -> ScaledRows:
    stored = module.read("weight")
    zeros = None if scheme.symmetric else module.read(ZERO)

    def numbers(rows: slice) -> Tensor:
        values: Tensor = np.take(E4M3, stored[rows].view(np.uint8)) if scheme.is_float else stored[rows]
        return values

    return _scaled(module, scheme, shape, numbers, zeros)


def _expand_packed(module: Module, scheme: Scheme, shape: Block) -> ScaledRows:
    words, (height, width) = module.read("weight_packed"), scheme.scale_shapes(shape)[0]
    zeros = np.full((height, width), 2 ** (scheme.bits - 1), np.uint8)
    if not scheme.symmetric:
        zeros = np.ascontiguousarray(unpacked(module.read(ZERO).T, scheme.bits).T[:height])

    def numbers(rows: slice) -> Tensor:
        return unpacked(words[rows], scheme.bits)[:, : shape[1]]

    return _scaled(module, scheme, shape, numbers, zeros)


def _scaled(module: Module, scheme: Scheme, shape: Block, numbers: Numbers, zeros: Tensor | None) -> ScaledRows:
    height, width = scheme.block(shape)
    stored = scheme.scale_shapes(shape)[0]
    block_of = module.read(ORDER).astype(np.intp) if scheme.has_order else blocks_of(shape[1], width)
    scales = module.read(SCALE).reshape(stored)
    return ScaledRows(shape, numbers, scales, None if zeros is None else zeros.reshape(stored), height, block_of)


def compressed_tensors(reader: ConfigReader) -> CompressedTensors:
    reader.expect("quantization_status", "compressed", "frozen")  # early versions wrote the second for both
    sparsity = reader.get("sparsity_config", {})
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        reader.problems.append(
            "sparsity_config: sparse formats are not supported; save it without sparsity compression"
        )
    transforms = reader.get("transform_config", {})
    if not isinstance(transforms, Mapping) or transforms.get("config_groups"):
        reader.problems.append("transform_config is not supported, as it would also transform activations")
    groups = reader.get("config_groups")
    if not isinstance(groups, Mapping) or not (groups or reader.get("kv_cache_scheme")):
        reader.problems.append(f"config_groups must be an object with the groups of modules, got {groups!r}")
        groups = {}
    made = [_group(reader, name, group) for name, group in groups.items()]
    kept = listed_modules(reader.get("ignore"), "ignore", reader.problems)
    return CompressedTensors(tuple(group for group in made if group is not None), kept)


def _group(reader: ConfigReader, name: str, group: Any) -> Group | None:
    """None for a group whose weights are not quantized, or if problems were added."""
    key = f"config_groups {name!r}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights") or {}, Mapping):
        reader.problems.append(f"{key} must be an object with targets and weights")
        return None
    if not group.get("weights"):
        return None
    format = group.get("format") or reader.get("format")
    if not isinstance(format, str) or format not in KINDS:
        reader.problems.append(f"{key}: format {format!r} is not supported; supported: {', '.join(KINDS)}")
        return None
    targets = group.get("targets")
    listed = listed_modules(targets, f"{key}: targets", reader.problems)
    scheme = read_scheme(group["weights"], format, key, reader.problems)
    return None if scheme is None else Group(listed, isinstance(targets, list) and EVERY in targets, scheme)
