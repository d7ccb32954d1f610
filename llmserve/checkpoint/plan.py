"""The weight plan: which checkpoint tensors become which parameter, checked both ways before anything is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from llmserve.checkpoint.reader import MAX_LISTED, Checkpoint
from llmserve.checkpoint.stored_tensor import DTYPES, FLOAT_DTYPES, Tensor
from llmserve.errors import CheckpointError, raise_problems
from llmserve.models.spec import Combine, Param

CHUNK_ELEMENTS = 1 << 22  # rows are converted in pieces of about this size, to keep temporaries small
SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize's guard


class WeightPlan:
    """Parameters by name, loaded one at a time from an open checkpoint."""

    def __init__(self, checkpoint: Checkpoint, params: Sequence[Param]) -> None:
        self._checkpoint = checkpoint
        self._params = {param.name: param for param in params}

    @property
    def params(self) -> Sequence[Param]:
        return tuple(self._params.values())

    def load(self, name: str, dtype: str) -> Tensor:
        """The parameter `name`, combined and cast to `dtype` (a key of FLOAT_DTYPES).

        Contiguous, perhaps a read-only view of the file. Holds the result and one source tensor. Raises CheckpointError
        when a number is not finite, or does not fit `dtype`.
        """
        param = self._params[name]
        source = param.sources[0]
        if param.combine is Combine.COPY and self._checkpoint.tensors[source].dtype == dtype:
            result = np.ascontiguousarray(self._checkpoint.read(source))
            for rows in _row_chunks(result):
                _check_finite(result[rows], result[rows], self._checkpoint.stored_name(source))
        else:
            result = self._combine(param, dtype)
        self._check_duplicates(param)
        return result

    def _combine(self, param: Param, dtype: str) -> Tensor:
        result = np.empty(param.shape, DTYPES[dtype])
        start = 0
        for source, shape in zip(param.sources, param.source_shapes, strict=True):
            self._fill(result[start : start + shape[0]], source, param.combine)
            start += shape[0]
        return result

    def _fill(self, target: Tensor, source: str, combine: Combine) -> None:
        """Cast one source into its place. A function of its own, so that a source is released before the next."""
        tensor = self._checkpoint.rows(source)
        for rows in _row_chunks(target):
            piece = tensor[rows]
            if combine is Combine.NORMALIZE_ROWS:
                piece = _normalize_rows(piece)
            with np.errstate(over="ignore"):  # reported below, with the tensor's name
                np.copyto(target[rows], piece, casting="unsafe")
            _check_finite(target[rows], piece, self._checkpoint.stored_name(source))

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


def _source_problems(checkpoint: Checkpoint, source: str, shape: tuple[int, ...]) -> list[str]:
    info, name = checkpoint.tensors.get(source), checkpoint.stored_name(source)
    if info is None:
        return [f"tensor {name} {list(shape)} is missing"]
    problems = []
    if info.shape != shape:
        problems.append(f"tensor {name} has shape {list(info.shape)}, {checkpoint.config_name} asks for {list(shape)}")
    if info.dtype not in FLOAT_DTYPES:
        problems.append(f"tensor {name} has dtype {info.dtype}; supported: {', '.join(FLOAT_DTYPES)}")
    return problems


def _row_chunks(tensor: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, tensor.size // max(1, len(tensor))))
    for start in range(0, len(tensor), rows):
        yield slice(start, min(start + rows, len(tensor)))


def _normalize_rows(rows: Tensor) -> Tensor:
    """Each row divided by its L2 norm, in float32. The sum is taken in float64, so its order cannot matter."""
    values = rows.astype(np.float32)
    norms = np.sqrt(np.square(values, dtype=np.float64).sum(axis=1, keepdims=True)).astype(np.float32)
    normalized: Tensor = values / np.maximum(norms, np.float32(SMALLEST_NORM))
    return normalized


def _check_finite(target: Tensor, source: Tensor, name: str) -> None:
    if np.isfinite(target).all():
        return
    if not np.isfinite(source).all():
        raise CheckpointError(f"tensor {name} has NaN or infinite values: the checkpoint is damaged")
    raise CheckpointError(f"tensor {name} does not fit {target.dtype} (a value overflows); build with --dtype bfloat16")
