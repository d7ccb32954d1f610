"""The interface of a quantization format: it finds the weight of a linear module among its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from llmserve.checkpoint.formats.listed import ListedModules
from llmserve.checkpoint.stored_tensor import Rows, Tensor, TensorInfo

SCALE_DTYPES = ("float16", "bfloat16", "float32")
WORDS = ("int32",)  # dtypes of packed numbers
FLOAT8 = ("float8_e4m3fn",)
EXPONENT_DTYPES = ("uint8", "float8_e8m0fnu")
NOTHING: frozenset[str] = frozenset()
DOTTED = ".", ".weight"  # how most modules' names are joined with the names of their tensors and their weight
# describe how activations and the KV cache were rounded
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

    shape: tuple[int, ...]  # shape of the weight: outputs, inputs; with experts before them
    kind: str  # for display: "GPTQ int4 (groups of 128)"
    main: str  # the tensor with the numbers
    others: frozenset[str]  # the weight's other tensors
    expand: Callable[[], Rows]  # reads the tensors


class Format(Protocol):
    """A format, with the settings in a checkpoint's config."""

    @property
    def name(self) -> str: ...

    @property
    def main(self) -> str:
        """The tensor that identifies a module of this format, such as `qweight`. Empty if there may be none."""
        ...

    @property
    def separator(self) -> str:
        """The separator between a module's name and its tensors' names."""
        ...

    @property
    def weight_suffix(self) -> str:
        """The suffix that makes a module's name its weight's name."""
        ...

    @property
    def unused(self) -> frozenset[str]:
        """Tensors that any module may have and that do not affect weights, such as scales of activations."""
        ...

    def weight(self, module: Module, problems: list[str]) -> StoredWeight | None:
        """None if the module is not in this format, or if problems were added to `problems`.

        Checks shapes and types, and the small zero points and group indexes; scales are checked when they are used.
        """
        ...


class ModuleCheck:
    """Collects problems with the tensors of one module."""

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
        """`others`: equivalent shapes."""
        info = self._module.tensors.get(part)
        if info is None:
            self.wrong(f"tensor {part} {list(shape)} is missing")
            return
        if info.shape not in (shape, *others):
            self.wrong(f"tensor {part} has shape {list(info.shape)}, but the weight requires {list(shape)}")
        if info.dtype not in dtypes:
            self.wrong(f"tensor {part} has dtype {info.dtype}; supported: {', '.join(dtypes)}")

    def matrix(self, part: str, dtypes: Iterable[str]) -> tuple[int, int]:
        """The shape of one of the module's tensors; (0, 0) if it is not a matrix with elements."""
        info = self._module.tensors[part]
        if info.dtype not in dtypes:
            self.wrong(f"tensor {part} has dtype {info.dtype}; supported: {', '.join(dtypes)}")
        if len(info.shape) != 2 or 0 in info.shape:
            self.wrong(f"tensor {part} has shape {list(info.shape)}; a matrix is required")
            return 0, 0
        return info.shape[0], info.shape[1]

    def not_listed(self, kept: ListedModules, key: str) -> None:
        """Check that the config does not list this quantized module as unquantized."""
        if self._module.name in kept:
            self.wrong(f"it is quantized, but the config lists it as unquantized ({key})")

    def group_indexes(self, part: str, num_inputs: int, num_groups: int) -> None:
        """The group of each input."""
        self.expect(part, (num_inputs,), ("int32", "int64"))
        if self.passed:
            groups = self._module.read(part)
            if groups.min() < 0 or groups.max() >= num_groups:
                self.wrong(f"{part} has groups from {groups.min()} to {groups.max()}, not 0 to {num_groups - 1}")

    def divides(self, group_size: int, num_inputs: int) -> bool:
        if num_inputs % group_size:
            self.wrong(f"groups of {group_size} do not divide its {num_inputs} inputs")
        return num_inputs % group_size == 0


def grouped(group_size: int) -> str:
    """A description; if not positive, all inputs of an output are one group."""
    return f"groups of {group_size}" if group_size > 0 else "per channel"


def read_group_size(value: Any, key: str, problems: list[str]) -> int:
    """Read a config's group size: a positive number, or -1 for all inputs."""
    if isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0):
        return value
    problems.append(f"{key} must be -1 or a positive integer, got {value!r}")
    return -1


def read_block(value: Any, key: str, problems: list[str]) -> Block | None:
    """Read a config's block size: outputs and inputs per block, or null."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        problems.append(f"{key} must be two positive integers, got {value!r}")
        return None
    return value[0], value[1]


def at_most(block: Block, shape: Block) -> Block:
    return min(block[0], shape[0]), min(block[1], shape[1])


def in_words(block: Block, shape: Block) -> str:
    """Describe which part of a weight shares a scale."""
    if block == shape:
        return "per tensor"
    if block[0] == 1:
        return grouped(block[1] if block[1] < shape[1] else -1)
    return f"blocks of {block[0]}x{block[1]}"
