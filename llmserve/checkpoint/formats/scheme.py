"""How compressed-tensors rounds the weights of a group of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.checkpoint.formats.base import Block, ModuleCheck, at_most, in_words, read_block, read_group_size
from llmserve.models.config import ConfigReader

PACKED = "pack-quantized"
MX, NV = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
# what a format can hold: type and bits
KINDS: Mapping[str, tuple[tuple[str, int], ...]] = {
    PACKED: (("int", 4), ("int", 8)),
    "int-quantized": (("int", 4), ("int", 8)),
    "naive-quantized": (("int", 4), ("int", 8), ("float", 8)),
    "float-quantized": (("float", 8),),
    MX: (("float", 4),),
    NV: (("float", 4),),
}
STRATEGIES = ("tensor", "channel", "group", "block")
ORDERED = ("group", "dynamic")  # values of `actorder`: inputs were processed in another order


@dataclass(frozen=True, slots=True)
class Scheme:
    format: str  # a key of KINDS
    type: str  # int or float
    bits: int
    strategy: str
    symmetric: bool = True
    group_size: int = -1
    block_structure: Block = (1, 1)
    has_order: bool = False

    @property
    def is_float(self) -> bool:
        return self.type == "float"

    def block(self, shape: Block) -> Block:
        """How many outputs and inputs share a scale."""
        whole = {"tensor": shape, "channel": (1, shape[1]), "group": (1, self.group_size)}
        return whole.get(self.strategy) or at_most(self.block_structure, shape)

    def scale_shapes(self, shape: Block) -> tuple[tuple[int, ...], ...]:
        """The scales' shape as a matrix, and equivalent shapes."""
        height, width = self.block(shape)
        others = {"tensor": ((1,), ()), "channel": ((shape[0],),)}
        return ((-(-shape[0] // height), -(-shape[1] // width)), *others.get(self.strategy, ()))

    def fits(self, shape: Block, check: ModuleCheck) -> bool:
        return self.strategy != "group" or check.divides(self.group_size, shape[1])

    def kind(self, shape: Block) -> str:
        name = f"fp{self.bits}" if self.is_float else f"int{self.bits}"
        block = self.block_structure if self.strategy == "block" else self.block(shape)
        return f"compressed-tensors {name} ({in_words(block, shape)})"


def read_scheme(weights: Mapping[str, Any], format: str, key: str, problems: list[str]) -> Scheme | None:
    """Read a group's `weights`; None if problems were added to `problems`."""
    reader = ConfigReader(weights)
    kind = (str(reader.get("type", "int")).lower(), reader.integer("num_bits", 8))
    if kind not in KINDS[format]:
        supported = ", ".join(f"{name} {bits}" for name, bits in KINDS[format])
        reader.problems.append(f"type and num_bits {kind[0]} {kind[1]!r} do not fit {format}; supported: {supported}")
    size = reader.get("group_size")
    group_size = -1 if size is None else read_group_size(size, "group_size", reader.problems)
    inferred = "tensor" if size is None else "group" if group_size > 0 else "channel"
    strategy = str(reader.get("strategy", inferred)).lower()
    if format in (MX, NV):
        wanted = ("group", 32) if format == MX else ("tensor_group", 16)
        if (strategy, group_size) != wanted:
            reader.problems.append(f"{format} has strategy {wanted[0]!r} and group_size {wanted[1]}")
    elif strategy not in STRATEGIES:
        reader.problems.append(f"strategy {strategy!r} is not supported; supported: {', '.join(STRATEGIES)}")
    if strategy == "group" and group_size < 1:
        reader.problems.append("strategy 'group' requires a positive group_size")
    reader.expect("dynamic", False)
    order = reader.get("actorder")
    block = read_block(reader.get("block_structure"), "block_structure", reader.problems)
    if strategy == "block" and block is None:
        reader.problems.append("strategy 'block' requires a block_structure")
    scheme = Scheme(
        format, kind[0], kind[1] if kind in KINDS[format] else 8, strategy, reader.flag("symmetric", True), group_size,
        block or (1, 1), order is True or str(order).lower() in ORDERED,
    )  # fmt: skip
    if strategy != "group" and scheme.has_order:
        reader.problems.append(f"actorder {order!r} requires strategy 'group'")
    if scheme.is_float and not scheme.symmetric:
        reader.problems.append("floats must be symmetric")
    problems += [f"{key}: {problem}" for problem in reader.problems]
    return None if reader.problems else scheme
