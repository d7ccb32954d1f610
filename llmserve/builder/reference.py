"""Interprets the Program with numpy in float32: slow and simple; every engine is compared with it.

No cache: a full causal prefill. Each matrix is read when it is used, a piece of rows at a time and once for all
prompts, so memory is little more than the activations.

Shapes in names: T tokens, V vocabulary, N heads, D head size, R turned elements of a head.
"""

# ruff: noqa: N806 - names carry shapes

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder import row_ops
from llmserve.builder.activations import activation, gated_activation
from llmserve.builder.attention import attention, attention_in_integers, soft_capped
from llmserve.builder.delta_rule import convolution, delta_rule, selective_scan
from llmserve.builder.pieces import Each, Weight, is_little, one_by_one, row_pieces
from llmserve.builder.pooling import POSITIONAL, pool
from llmserve.builder.quantization import LINEAR_KINDS, Matrix, WeightPart, round_in_groups, round_weight
from llmserve.builder.routing import route
from llmserve.checkpoint.floats import to_float32
from llmserve.engine.adapters.sealed import AdapterPart
from llmserve.models.graph import Op, OpKind, Program
from llmserve.models.number_formats import FLOAT32, FLOATS, NumberFormat

MANY_TOKENS = 2048  # rows of all runs together; for so many, larger pieces of a matrix are faster
NEAR_ROWS = 4  # rows of an embedding: reading the rows in between takes less time than starting another piece

Load: TypeAlias = Callable[[str], Weight]


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt, with or without rounding of activations, keys and values.

    Runs without rounding may also have unrounded weights; such runs come last.
    """

    token_ids: Sequence[int]
    rounds: bool = True
    exact_weights: bool = False
    second_segment: int = 0  # position of the first token of a second text; 0: there is none
    hidden: Matrix | None = None  # another network's rows, one per token, if this one reads them


class Observer(Protocol):
    """Sees the inputs of matrices, of all runs."""

    def layer(self, op: Op, x: Matrix) -> None:
        """A linear layer, or all experts together."""

    def second(self, op: Op, expert: int, x: Matrix) -> None:
        """The second matrix of an expert, times the expert's weights; called for several experts at the same time."""


class ReferenceModel:
    """Computes a Program. `load` returns a parameter by name in any float dtype; computations are in float32.

    `quantized`: parameters that an engine quantizes, and how. They and their inputs are rounded as in the engine, and
    keys and values to `cache`. `adapter` is added to the matrices that it has parts for.
    """

    def __init__(
        self,
        program: Program,
        load: Load,
        *,
        quantized: Mapping[str, Sequence[WeightPart]] | None = None,
        cache: NumberFormat = FLOAT32,
        adapter: Sequence[AdapterPart] = (),
        each: Each = one_by_one,
        advance: Callable[[str, int], None] = lambda name, num_elements: None,
    ) -> None:
        self._program = program
        self._load = load
        self._quantized = quantized or {}
        self._cache = cache
        self._adapter = adapter
        self._each = each
        self._advance = advance
        # The cached keys and values are used if their last bit can change the choice of experts.
        self._has_routes = any(op.kind is OpKind.ROUTE for op in program.ops)

    def logits(self, token_ids: Sequence[int]) -> Matrix:
        """Logits after every token of the prompt, float32 [T, V]."""
        return self.logits_of([Run(token_ids)])[0]

    def logits_of(self, runs: Sequence[Run]) -> list[Matrix]:
        """Logits of several runs, computed together: each parameter is loaded once for all of them."""
        return self._execute(runs, None)

    def watch(self, runs: Sequence[Run], observer: Observer) -> None:
        """Run without computing logits."""
        self._execute(runs, observer)

    def _execute(self, runs: Sequence[Run], observer: Observer | None) -> list[Matrix]:
        tokens = [self._checked(run.token_ids) for run in runs]
        last_use = {name: i for i, op in enumerate(self._program.ops) for name in op.inputs}
        values: list[dict[str, Matrix]] = [{} for _ in runs]
        for i, op in enumerate(self._program.ops):
            inputs = [[known[name] for name in op.inputs] for known in values]
            if op.kind is OpKind.EMBED:
                outputs = self._embed(op, tokens, runs)
            elif op.kind in LINEAR_KINDS:
                read = [x for (x,) in inputs]
                if observer is not None:
                    observer.layer(op, np.concatenate(read))
                    if op.kind is OpKind.LOGITS:
                        return []
                outputs = self._linear(op, read, runs)
            elif op.kind is OpKind.EXPERTS:
                if observer is not None:
                    observer.layer(op, np.concatenate([_read_by_experts(op, *of_run) for of_run in inputs]))
                outputs = self._experts(op, inputs, runs, observer)
            else:
                outputs = self._others(op, inputs, runs)
            for known, output in zip(values, outputs, strict=True):
                assert output.shape[1] == op.width
                known[op.output] = output
                for name in op.inputs:
                    if last_use[name] == i:
                        known.pop(name, None)
        return [known[self._program.ops[-1].output] for known in values]

    def _checked(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        tokens = np.asarray(token_ids, dtype=np.int64)
        if tokens.ndim != 1 or not len(tokens) or tokens.min() < 0 or tokens.max() >= self._program.vocab_size:
            raise ValueError(f"token_ids must be a non-empty list of ids below {self._program.vocab_size}")
        return tokens

    def _embed(self, op: Op, tokens: Sequence[NDArray[np.int64]], runs: Sequence[Run]) -> list[Matrix]:
        """Reads only the used rows of the table, once for all runs, and few rows between them."""
        (name,) = op.weights
        table, scale = self._load(name), np.float32(op.number("scale"))
        self._advance(name, math.prod(table.shape))
        num_rows = int(op.number("rows")) or table.shape[0]
        places = [np.where(ids < num_rows, ids, 0) for ids in tokens]
        used = np.unique(np.concatenate(places))
        pieces = np.split(used, np.flatnonzero(np.diff(used) > NEAR_ROWS) + 1)
        slices = [slice(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]
        numbers = np.concatenate([np.arange(found.start, found.stop) for found in slices])

        @cache
        def rows(exact: bool) -> Matrix:
            parts = () if exact else self._quantized.get(name, ())
            return np.concatenate([round_weight(parts, table, s) if parts else to_float32(table[s]) for s in slices])

        of_runs = zip(places, runs, strict=True)
        return [rows(run.exact_weights)[np.searchsorted(numbers, ids)] * scale for ids, run in of_runs]

    def _small(self, name: str) -> Matrix:
        """Any parameter that is not a matrix."""
        weight = self._load(name)[:].astype(np.float32)
        self._advance(name, weight.size)
        return weight

    def _linear(self, op: Op, inputs: Sequence[Matrix], runs: Sequence[Run]) -> list[Matrix]:
        """Reads the matrix once for all runs."""
        name, *biases = op.weights
        source, parts = self._load(name), self._quantized.get(name)
        stacked = np.concatenate([self._rounded(name, x, run) for x, run in zip(inputs, runs, strict=True)])
        y = np.empty((len(stacked), source.shape[0]), np.float32)
        kept_exact = [run.exact_weights or not parts for run in runs]
        assert kept_exact == sorted(kept_exact), "runs with exact weights come last"
        end = sum(len(x) for x, exact in zip(inputs, kept_exact, strict=True) if not exact)

        def product(rows: slice) -> int:
            if end:
                y[:end, rows] = stacked[:end] @ round_weight(parts or (), source, rows).T
            if end < len(y):
                y[end:, rows] = stacked[end:] @ to_float32(source[rows]).T
            return int((rows.stop - rows.start) * source.shape[1])

        pieces = max((part.scheme.pieces for part in parts or ()), default=1 if len(stacked) < MANY_TOKENS else 8)
        for num_elements in self._each(product, row_pieces(source.shape, pieces)):
            self._advance(name, num_elements)
        for bias in biases:
            y += self._small(bias)
        self._add_adapter(name, stacked, y)
        if op.kind is OpKind.LOGITS:
            y = scaled_and_capped(op, y)
        return np.split(y, np.cumsum([len(x) for x in inputs])[:-1])

    def _add_adapter(self, name: str, x: Matrix, y: Matrix) -> None:
        """Add the adapter to the output of the matrix `name` for input `x`, rounded as in the engine."""
        for part in self._adapter:
            if part.shape.param == name:
                columns = slice(part.shape.begin, part.shape.begin + part.shape.rows)
                y[:, columns] += (x @ to_float32(part.down).T) @ to_float32(part.up).T

    def _experts(
        self, op: Op, inputs: Sequence[Sequence[Matrix]], runs: Sequence[Run], observer: Observer | None
    ) -> list[Matrix]:
        """An expert's matrices are read once for all runs; experts' outputs for a row are added in their order."""
        per_token, num_experts = int(op.number("experts_per_token")), int(op.number("num_experts"))
        activate = activation if op.number("plain") else gated_activation
        outputs = [np.zeros_like(x) for x, _ in inputs]
        biases = [self._small(name).reshape(num_experts, -1) for name in op.weights[2:]]
        biases = biases or [np.zeros((num_experts, 1), np.float32)] * 2

        def of_expert(expert: int) -> list[tuple[NDArray[np.int64], Matrix]]:
            """Returns for each run the rows that choose the expert, and its weighted outputs for them."""
            matrices: dict[bool, list[Matrix]] = {}
            found, read = [], []
            for (x, routes), run in zip(inputs, runs, strict=True):
                rows, places = np.nonzero(routes[:, :per_token] == expert)
                if not len(rows):
                    found.append((rows, x[rows]))
                    continue
                exact = run.exact_weights
                taken = x[rows]
                weights = routes[rows, per_token + places][:, None]
                if op.number("scales_inputs"):
                    taken, weights = taken * weights, np.ones_like(weights)
                gate_up, down = matrices.setdefault(exact, matrices.get(exact) or self._matrices(op, expert, exact))
                inner = activate(op, self._rounded(op.weights[0], taken, run) @ gate_up.T + biases[0][expert])
                y = self._rounded(op.weights[1], inner, run) @ down.T + biases[1][expert]
                found.append((rows, y * weights))
                if observer is not None:
                    read.append(inner * weights)
            if observer is not None and read:
                observer.second(op, expert, np.concatenate(read))
            return found

        for added in self._each(of_expert, range(num_experts)):
            for output, (rows, y) in zip(outputs, added, strict=True):
                output[rows] += y
        for name in op.weights[:2]:
            self._advance(name, math.prod(self._load(name).shape))
        return outputs

    def _matrices(self, op: Op, expert: int, exact: bool) -> list[Matrix]:
        """Gate and up as one matrix, and down."""
        found = []
        for name in op.weights[:2]:
            source, parts = self._load(name), self._quantized.get(name)
            height = source.shape[0] // int(op.number("num_experts"))
            rows = slice(expert * height, (expert + 1) * height)
            found.append(to_float32(source[rows]) if exact or not parts else round_weight(parts, source, rows))
        return found

    def _rounded(self, name: str, x: Matrix, run: Run) -> Matrix:
        """The input as the matrix `name` multiplies it."""
        parts = self._quantized.get(name)
        return round_in_groups(x, parts[0].scheme.format.activations) if run.rounds and parts else x

    def _others(self, op: Op, inputs: Sequence[Sequence[Matrix]], runs: Sequence[Run]) -> list[Matrix]:
        """Ops that work on each run separately."""
        weights = [self._small(name) for name in op.weights]

        def of_run(number: int) -> Matrix:
            return self._run(op, inputs[number], weights, runs[number])

        each = one_by_one if is_little(sum(x.size for read in inputs for x in read)) else self._each
        return list(each(of_run, range(len(runs))))

    def _run(self, op: Op, inputs: Sequence[Matrix], weights: Sequence[Matrix], run: Run) -> Matrix:
        if run.rounds and op.kind is OpKind.ATTENTION and self._cache.is_rounded:
            return attention_in_integers(op, self._cache, *inputs, *weights)
        if run.rounds and op.kind is OpKind.ATTENTION and self._has_routes:
            q, *kept = inputs
            dtype = FLOATS[self._cache.name].values
            inputs = (q, *(x.astype(dtype).astype(np.float32) for x in kept))
        if op.kind is OpKind.WITH_HIDDEN:
            assert run.hidden is not None, "the network reads hidden rows"
            return np.concatenate((*inputs, run.hidden), axis=1)
        if op.kind in POSITIONAL:
            return weights[0][POSITIONAL[op.kind](op, len(run.token_ids), run.second_segment, weights[0])]
        y: Matrix = OPERATIONS[op.kind](op, *inputs, *weights)
        return y


def _read_by_experts(op: Op, x: Matrix, routes: Matrix) -> Matrix:
    """Inputs with the same sums of products per row as the inputs of all chosen experts together; divided by their
    number if inputs are not scaled."""
    if not op.number("scales_inputs"):
        return x
    weights = routes[:, int(op.number("experts_per_token")) :]
    scaled: Matrix = x * np.sqrt(np.square(weights).sum(axis=1, keepdims=True))
    return scaled


def _rms_norm(op: Op, x: Matrix, weight: Matrix | None = None) -> Matrix:
    groups = x.reshape(len(x), int(op.number("groups")), -1)
    mean_square = np.square(groups).mean(axis=-1, keepdims=True)
    weight = np.ones(1, np.float32) if weight is None else weight + np.float32(op.number("offset"))
    weight = weight.reshape(groups.shape[1], -1) if op.number("own_weights") else weight
    normalized: Matrix = groups / np.sqrt(mean_square + np.float32(op.number("eps"))) * weight
    return normalized.reshape(x.shape)


def _layer_norm(op: Op, x: Matrix, weight: Matrix | None = None, bias: Matrix | None = None) -> Matrix:
    groups = x.reshape(len(x), int(op.number("groups")), -1)
    centered = groups - groups.mean(axis=-1, keepdims=True)
    variance = np.square(centered).mean(axis=-1, keepdims=True)
    normalized = (centered / np.sqrt(variance + np.float32(op.number("eps")))).reshape(x.shape)
    scaled: Matrix = normalized if weight is None else normalized * (weight + np.float32(op.number("offset")))
    return scaled if bias is None else scaled + bias


def _slice(op: Op, x: Matrix) -> Matrix:
    start = int(op.number("start"))
    return x[:, start : start + op.width]


def _rope(op: Op, x: Matrix) -> Matrix:
    """Rotate the pairs (i, i + R/2) of every head by position * inv_freq[i]; R <= D is twice their number."""
    inv_freq = np.asarray(op.attrs["inv_freq"])
    heads_TND = x.reshape(len(x), -1, int(op.number("head_dim")))
    angles = np.outer(np.arange(len(x)), inv_freq)  # float64: exact for long prompts
    cos, sin = ((f(angles) * op.number("scale")).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
    first, second, rest = np.split(heads_TND, (len(inv_freq), 2 * len(inv_freq)), axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1).reshape(x.shape)


def scaled_and_capped(op: Op, logits: Matrix) -> Matrix:
    return soft_capped(logits * np.float32(op.number("scale")), op.number("soft_cap"))


def _sigmoid_gate(op: Op, x: Matrix, gate: Matrix) -> Matrix:
    with np.errstate(over="ignore"):  # exp(-gate) may be infinite for a very negative gate; x / inf is then correct
        gated: Matrix = x / (1 + np.exp(-gate))
    return gated * gate if op.number("silu") else gated


def _select_rows(op: Op, x: Matrix) -> Matrix:
    return x  # the reference needs the logits of every token


OPERATIONS: Mapping[OpKind, Callable[..., Matrix]] = {  # apart from look-ups and products
    OpKind.RMS_NORM: _rms_norm,
    OpKind.LAYER_NORM: _layer_norm,
    OpKind.SLICE: _slice,
    OpKind.ROPE: _rope,
    OpKind.SCALE_BY_POSITION: row_ops.scale_by_position,
    OpKind.ATTENTION: attention,
    OpKind.GATED_ACTIVATION: gated_activation,
    OpKind.ACTIVATION: activation,
    OpKind.ADD: row_ops.add,
    OpKind.MULTIPLY: row_ops.multiply,
    OpKind.SCALE: row_ops.multiply,
    OpKind.MIX: row_ops.mix,
    OpKind.SPREAD: row_ops.spread,
    OpKind.OVER_THRESHOLD: row_ops.over_threshold,
    OpKind.ROUTE: route,
    OpKind.SIGMOID_GATE: _sigmoid_gate,
    OpKind.CONVOLUTION: convolution,
    OpKind.DELTA_RULE: delta_rule,
    OpKind.SELECTIVE_SCAN: selective_scan,
    OpKind.SELECT_ROWS: _select_rows,
    OpKind.POOL: pool,
}
