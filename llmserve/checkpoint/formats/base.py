"""What a quantization format does: it finds the weight of a linear module among the tensors that stand for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from llmserve.checkpoint.formats.listed import ListedModules
from llmserve.checkpoint.stored_tensor import Rows, Tensor, TensorInfo

SCALE_DTYPES = ("float16", "bfloat16", "float32")
WORDS = ("int32",)  # of packed numbers
FLOAT8 = ("float8_e4m3fn",)
EXPONENT_DTYPES = ("uint8", "float8_e8m0fnu")
NOTHING: frozenset[str] = frozenset()
DOTTED = ".", ".weight"  # what joins most modules' names with those of their tensors and their weight
# what says how activations and the KV cache were rounded
OF_ACTIVATIONS = frozenset(
    (
        *(f"{what}_{how}" for what in "qkv" for how in ("scale", "zero_point", "global_scale")),
        *(f"{what}_{how}" for what in ("input", "output") for how in ("scale", "zero_point", "global_scale")),
        "activation_scale", "input_scale_ub", "kv_scale", "prob_scale", "prob_output_scale",
    )
)  # fmt: skip
Block = tuple[int, int]  # outputs and inputs


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of one module, by the last part of their names."""

    name: str
    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight that is ready to be expanded."""

    shape: tuple[int, ...]  # of the weight: outputs, inputs; with experts before them
    kind: str  # for people: "GPTQ int4 (groups of 128)"
    main: str  # the tensor with its numbers
    others: frozenset[str]  # the other tensors that belong to it
    expand: Callable[[], Rows]  # reads the tensors


class Format(Protocol):
    """A format, and what a checkpoint's config says about it."""

    @property
    def name(self) -> str: ...

    @property
    def main(self) -> str:
        """Which tensor a module of this format has, in words: `qweight`. Empty: there may be no such module."""
        ...

    @property
    def separator(self) -> str:
        """Between the name of a module and those of its tensors."""
        ...

    @property
    def weight_suffix(self) -> str:
        """Behind the name of a module, in the name of its weight."""
        ...

    @property
    def unused(self) -> frozenset[str]:
        """Tensors that any module may have and that say nothing about weights: scales of activations."""
        ...

    def weight(self, module: Module, problems: list[str]) -> StoredWeight | None:
        """None where the module is not in this format, or something is wrong with it, which is added to `problems`.

        Shapes and types are checked, and zero points and indexes of groups, which are small; scales when they are used.
        """
        ...


class ModuleCheck:
    """What is wrong with the tensors of one module."""

    def __init__(self, module: Module, problems: list[str]) -> None:
        self._module = module
        self._problems = problems
        self._num_before = len(problems)

    @property
    def passed(self) -> bool:
        return len(self._problems) == self._num_before

    def wrong(self, problem: str) -> None:
        self._problems.append(f"{self._module.name}: {problem}")

    def expect(self, part: str, shape: tuple[int, ...], dtypes: Iterable[str], *others: tuple[int, ...]) -> None:
        """`others`: shapes that mean the same."""
        info = self._module.tensors.get(part)
        if info is None:
            self.wrong(f"tensor {part} {list(shape)} is missing")
            return
        if info.shape not in (shape, *others):
            self.wrong(f"tensor {part} has shape {list(info.shape)}, the weight asks for {list(shape)}")
        if info.dtype not in dtypes:
            self.wrong(f"tensor {part} has dtype {info.dtype}; supported: {', '.join(dtypes)}")

    def matrix(self, part: str, dtypes: Iterable[str]) -> tuple[int, int]:
        """The shape of a tensor that the module has; (0, 0) where it is no matrix with elements."""
        info = self._module.tensors[part]
        if info.dtype not in dtypes:
            self.wrong(f"tensor {part} has dtype {info.dtype}; supported: {', '.join(dtypes)}")
        if len(info.shape) != 2 or 0 in info.shape:
            self.wrong(f"tensor {part} has shape {list(info.shape)}, which is not a matrix")
            return 0, 0
        return info.shape[0], info.shape[1]

    def not_listed(self, kept: ListedModules, key: str) -> None:
        """The module is quantized, so the config's list of others must not have it."""
        if self._module.name in kept:
            self.wrong(f"it is quantized, but the config says that it is not ({key})")

    def group_indexes(self, part: str, num_inputs: int, num_groups: int) -> None:
        """The group of each input."""
        self.expect(part, (num_inputs,), ("int32", "int64"))
        if self.passed:
            groups = self._module.read(part)
            if groups.min() < 0 or groups.max() >= num_groups:
                self.wrong(f"{part} has groups from {groups.min()} to {groups.max()}, of 0 to {num_groups - 1}")

    def divides(self, group_size: int, num_inputs: int) -> bool:
        if num_inputs % group_size:
            self.wrong(f"groups of {group_size} do not divide its {num_inputs} inputs")
        return num_inputs % group_size == 0


def grouped(group_size: int) -> str:
    """In words; no positive number: all inputs of an output are one group."""
    return f"groups of {group_size}" if group_size > 0 else "per channel"


def read_group_size(value: Any, key: str, problems: list[str]) -> int:
    """Of a config: a positive number, or -1 for all inputs."""
    if isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0):
        return value
    problems.append(f"{key} must be -1 or a positive integer, got {value!r}")
    return -1


def read_block(value: Any, key: str, problems: list[str]) -> Block | None:
    """Of a config: how many outputs and inputs a block has, or null."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        problems.append(f"{key} must be two positive integers, got {value!r}")
        return None
    return value[0], value[1]


def at_most(block: Block, shape: Block) -> Block:
    return min(block[0], shape[0]), min(block[1], shape[1])


def in_words(block: Block, shape: Block) -> str:
    """Which part of a weight shares a scale."""
    if block == shape:
        return "per tensor"
    if block[0] == 1:
        return grouped(block[1] if block[1] < shape[1] else -1)
    return f"blocks of {block[0]}x{block[1]}"
