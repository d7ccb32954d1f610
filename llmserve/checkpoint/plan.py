"""The weight plan: which checkpoint tensors become which parameter, checked in both directions before reading."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.blocks import BlockRows, blocks
from llmserve.checkpoint.floats import is_finite
from llmserve.checkpoint.integers import Integers, integers
from llmserve.checkpoint.products import LatentProduct
from llmserve.checkpoint.reader import MAX_LISTED, Checkpoint
from llmserve.checkpoint.rearranged import ReorderedRows, RowDifference, ScaledRows, StackedRows, row_order
from llmserve.checkpoint.stored_tensor import DTYPES, FLOAT_DTYPES, Rows, Tensor
from llmserve.errors import CheckpointError, raise_problems
from llmserve.models.spec import Combine, Param

CHUNK_ELEMENTS = 1 << 22  # rows are converted in pieces of about this size, to keep temporaries small
SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize's guard


@dataclass(frozen=True, slots=True)
class _Part:
    """A source tensor, and its rows in the parameter."""

    source: Rows
    dtype: np.dtype[Any]  # of the source
    stored_name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ParamRows:
    """A parameter in an engine's dtype. Any thread may request rows, which are then read, combined and cast.

    Rows are contiguous, and may be a read-only view of the file. A request raises CheckpointError if a number is not
    finite or does not fit `dtype`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    combine: Combine
    parts: tuple[_Part, ...]

    def __getitem__(self, rows: slice, /) -> Tensor:
        begin, end, _ = rows.indices(self.shape[0])
        inside = [part for part in self.parts if part.begin < end and begin < part.end]
        if len(inside) == 1 and inside[0].dtype == self.dtype and self.combine is not Combine.NORMALIZE_ROWS:
            (part,) = inside
            found = np.ascontiguousarray(part.source[begin - part.begin : end - part.begin])
            return _checked(found, part.stored_name)
        result = np.empty((max(0, end - begin), *self.shape[1:]), self.dtype)
        for part in inside:
            first, last = max(begin, part.begin), min(end, part.end)
            self._fill(result[first - begin : last - begin], part, first - part.begin)
        return result

    def integers(self, rows: slice, /) -> Integers | None:
        """Integers, if all of these rows are integers in the checkpoint and nothing changes them."""
        if self.combine is Combine.NORMALIZE_ROWS or len(self.shape) != 2:
            return None
        found = []
        for part in self.parts:
            first, last = max(rows.start, part.begin), min(rows.stop, part.end)
            if first < last:
                stored = integers(part.source, slice(first - part.begin, last - part.begin))
                if stored is None:
                    return None
                _checked(stored.steps, part.stored_name)
                found.append(stored)
        values = np.concatenate([each.values for each in found])
        return Integers(values, np.concatenate([each.steps for each in found]))

    def blocks(self, rows: slice, /) -> BlockRows | None:
        """Blocks, if these rows are blocks of one of `block_types` and nothing changes them."""
        found = []
        for part in self.parts:
            first, last = max(rows.start, part.begin), min(rows.stop, part.end)
            if first < last and (stored := blocks(part.source, slice(first - part.begin, last - part.begin))):
                _checked_scales(stored, part.stored_name)
                found.append(stored)
        if self.combine is Combine.NORMALIZE_ROWS or sum(len(each.blocks) for each in found) < rows.stop - rows.start:
            return None
        scales = np.concatenate([each.row_scale for each in found])
        return BlockRows(found[0].kind, np.concatenate([each.blocks for each in found]), scales)

    @property
    def block_types(self) -> list[tuple[int, int, str]]:
        """(begin, end, type) of runs of rows with blocks of one type; the type is empty for rows without blocks."""
        found: list[tuple[int, int, str]] = []
        for part in self.parts:
            stored = None if self.combine is Combine.NORMALIZE_ROWS else blocks(part.source, slice(0, 1))
            name = stored.kind.name if stored else ""
            if found and found[-1][2] == name:
                found[-1] = (found[-1][0], part.end, name)
            else:
                found.append((part.begin, part.end, name))
        return found

    def _fill(self, target: Tensor, part: _Part, first: int) -> None:
        """Cast rows of one source, from `first` on, to their place."""
        for rows in _row_chunks(target):
            piece = part.source[first + rows.start : first + rows.stop]
            if self.combine is Combine.NORMALIZE_ROWS:
                piece = _normalize_rows(piece)
            with np.errstate(over="ignore"):  # reported below, with the tensor's name
                np.copyto(target[rows], piece, casting="unsafe")
            _check_finite(target[rows], piece, part.stored_name)


class WeightPlan:
    """Parameters by name, loaded one at a time from an open checkpoint."""

    def __init__(self, checkpoint: Checkpoint, params: Sequence[Param]) -> None:
        self._checkpoint = checkpoint
        self._params = {param.name: param for param in params}

    @property
    def params(self) -> Sequence[Param]:
        return tuple(self._params.values())

    def load(self, name: str, dtype: str) -> Tensor:
        """The parameter `name`, combined and cast to `dtype` (a key of FLOAT_DTYPES); see `ParamRows`."""
        return self.rows(name, dtype)[:]

    def rows(self, name: str, dtype: str) -> ParamRows:
        """The same, in pieces."""
        param = self._params[name]
        dtype = "float32" if param.is_exact else dtype
        self._check_duplicates(param)
        if param.product:
            made = LatentProduct(param.product, [self._checkpoint.rows(source) for source in param.sources])
            stored_name = self._checkpoint.stored_name(param.sources[0])
            part = _Part(made, DTYPES["float32"], stored_name, 0, param.shape[0])
            return ParamRows(param.shape, DTYPES[dtype], param.combine, (part,))
        parts, begin = [], 0
        orders = param.orders or (None,) * len(param.sources)
        for source, shape, order in zip(param.sources, param.source_shapes, orders, strict=True):
            dtype_stored, stored_name = self._checkpoint.tensors[source].dtype, self._checkpoint.stored_name(source)
            rows, height = self._checkpoint.rows(source), math.prod(shape) // math.prod(param.shape[1:])
            if len(shape) != len(param.shape):
                rows = StackedRows(rows, height // shape[0], param.is_transposed)
            if param.difference:
                rows, height, dtype_stored = RowDifference(rows, param.difference), 1, "float32"
            if order is not None:
                rows = ReorderedRows(rows, row_order(height, order))
                height = len(rows.order)
            if param.factors:
                dtype_stored = "float32"
                rows = ScaledRows(rows, row_factors(param)[begin : begin + height])
            parts.append(_Part(rows, DTYPES[dtype_stored], stored_name, begin, begin + height))
            begin += height
        return ParamRows(param.shape, DTYPES[dtype], param.combine, tuple(parts))

    def _check_duplicates(self, param: Param) -> None:
        source = param.sources[0]
        for duplicate in (name for name in param.duplicates if name in self._checkpoint.tensors):
            first, second = self._checkpoint.read(source), self._checkpoint.read(duplicate)
            if not all(np.array_equal(first[rows], second[rows]) for rows in _row_chunks(first)):
                raise CheckpointError(
                    f"config.json says that {duplicate} is {source} (tie_word_embeddings), but the checkpoint has two "
                    'different tensors; set "tie_word_embeddings": false in config.json'
                )


def plan_weights(checkpoint: Checkpoint, params: Sequence[Param], ignored: Sequence[str]) -> WeightPlan:
    """Check that every source exists with the right shape, and that every tensor is claimed or ignored.

    `ignored` are regular expressions of whole tensor names. Raises one CheckpointError listing every problem.
    """
    tensors = checkpoint.tensors
    params = [_as_stored(param, tensors) for param in params]
    problems = []
    claimed = set()
    for param in params:
        for source, shape in zip(param.sources, param.source_shapes, strict=True):
            claimed.add(source)
            problems += _source_problems(checkpoint, source, shape)
        for duplicate in param.duplicates:
            claimed.add(duplicate)
            if duplicate in tensors:
                problems += _source_problems(checkpoint, duplicate, param.source_shapes[0])
    unknown = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    problems += [
        f"tensor {checkpoint.stored_name(name)} is not part of this architecture"
        for name in tensors
        if name not in claimed and name not in checkpoint.surplus and not unknown.fullmatch(name)
    ]
    problems = list(dict.fromkeys(problems))  # a tied tensor is checked twice
    if len(problems) > MAX_LISTED:
        problems[MAX_LISTED:] = [f"... and {len(problems) - MAX_LISTED} more"]
    raise_problems(CheckpointError, f"checkpoint {checkpoint.path} does not fit its {checkpoint.config_name}", problems)
    return WeightPlan(checkpoint, params)


def row_factors(param: Param) -> NDArray[np.float32]:
    """The factor of each row of a parameter that has factors."""
    counts, values = zip(*param.factors, strict=True)
    return np.repeat(np.array(values, np.float32), counts)


def _as_stored(param: Param, tensors: Collection[str]) -> Param:
    found: Param | None = param
    while found is not None and found.sources[0] not in tensors:
        found = found.otherwise
    return param if found is None else found


def named_as_stored(params: Sequence[Param], prefix: str, tensors: Collection[str]) -> list[Param]:
    """Sources without `prefix`, if no tensor has it: networks saved without their head do not."""
    found = any(param.sources[0].removeprefix(prefix) in tensors for param in params)
    if not found or any(name.startswith(prefix) for name in tensors):
        return list(params)
    return [
        replace(
            param,
            sources=tuple(name.removeprefix(prefix) for name in param.sources),
            duplicates=tuple(name.removeprefix(prefix) for name in param.duplicates),
        )
        for param in params
    ]


def _source_problems(checkpoint: Checkpoint, source: str, shape: tuple[int, ...]) -> list[str]:
    info, name = checkpoint.tensors.get(source), checkpoint.stored_name(source)
    if info is None:
        return [f"tensor {name} {list(shape)} is missing"]
    problems = []
    if info.shape != shape:
        problems.append(f"tensor {name} has shape {list(info.shape)}, {checkpoint.config_name} requires {list(shape)}")
    if info.dtype not in FLOAT_DTYPES:
        problems.append(f"tensor {name} has dtype {info.dtype}; supported: {', '.join(FLOAT_DTYPES)}")
    return problems


def _row_chunks(tensor: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, tensor.size // max(1, len(tensor))))
    for start in range(0, len(tensor), rows):
        yield slice(start, min(start + rows, len(tensor)))


def _normalize_rows(rows: Tensor) -> Tensor:
    """Divide each row by its L2 norm, in float32. The sum is in float64, so its order cannot matter."""
    values = rows.astype(np.float32)
    norms = np.sqrt(np.square(values, dtype=np.float64).sum(axis=1, keepdims=True)).astype(np.float32)
    normalized: Tensor = values / np.maximum(norms, np.float32(SMALLEST_NORM))
    return normalized


def _checked_scales(rows: BlockRows, name: str) -> None:
    for field in rows.kind.layout.names or ():
        if rows.kind.layout[field].kind == "f":
            _checked(np.ascontiguousarray(rows.blocks[field]), name)


def _checked(tensor: Tensor, name: str) -> Tensor:
    for rows in _row_chunks(tensor):
        _check_finite(tensor[rows], tensor[rows], name)
    return tensor


def _check_finite(target: Tensor, source: Tensor, name: str) -> None:
    if is_finite(target):
        return
    if not is_finite(source):
        raise CheckpointError(f"tensor {name} has NaN or infinite values; the checkpoint is damaged")
    raise CheckpointError(f"tensor {name} does not fit {target.dtype} (a value overflows); build with --dtype bfloat16")
