"""Lowers a Program to operations of the CPU engine: what each op becomes, what is fused, where every value is.

Values are matrices of float32 in numbered buffers; a buffer's rows are as long as the longest value that is ever in it.
A slice is a view. An elementwise op overwrites its input if no other op needs it. A buffer is reused as soon as the
last reader of its value has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llmserve.builder.quantization import LINEAR_KINDS, WeightPart, num_matrices
from llmserve.builder.targets.buffers import LOGITS_BUFFER, NOWHERE, Place
from llmserve.builder.targets.cpu.lowered import GROUPED, NORMS, DeviceOp, Lowered, activations_of
from llmserve.builder.targets.cpu.row_lowering import RowLowering
from llmserve.builder.targets.op_lowering import Rule
from llmserve.engine.cpu.layout import NO_TENSOR, DType
from llmserve.engine.cpu.op_codes import (
    BIDIRECTIONAL,
    IN_STRETCHES,
    NORMALIZED,
    ROUTE_BY_BEST,
    ROUTE_SIGMOID,
    ROUTE_TO_ONE,
    Before,
    OpCode,
    RowsOf,
)
from llmserve.models.graph import POOLINGS, Op, OpKind, Program
from llmserve.models.number_formats import INT8_ACTIVATIONS
from llmserve.models.spec import Param


class Lowering(RowLowering):
    def run(self) -> Lowered:
        self._lower_ops()
        return Lowered(
            tuple(self._ops),
            tuple(self._tensors.values()),
            self._constants,
            self._offsets,
            self._rows,
            num_matrices(list(self._params.values()), self._quantized),
            tuple(self._buffers.bytes_per_row),
        )

    def _fuse(self, op: Op, following: Op, after: Op | None) -> int:
        if self._is_only_quantized(op, following):
            self._before[op.output] = op
            return 1
        if op.kind is OpKind.LINEAR and self._adds_to(op, following):
            self._fused_linear(op, following)
            return 2
        return 0

    def _is_only_quantized(self, op: Op, following: Op) -> bool:
        """Whether only the quantized linear layer `following` reads the output of `op` for each row."""
        is_norm = op.kind in NORMS and op.number("groups") == 1
        activations = {} if op.kind is OpKind.EXPERTS else activations_of(op)
        activates = bool(activations) and activations[str(op.attrs["activation"])][1] is not Before.NOTHING
        by_row = is_norm or activates
        reads = following.kind in LINEAR_KINDS and following.inputs[0] == op.output
        return by_row and reads and following.weights[0] in self._quantized and self._uses[op.output] == 1

    def _adds_to(self, op: Op, following: Op) -> bool:
        """Whether `following` only adds the output of the linear layer `op` to another value."""
        return following.kind is OpKind.ADD and following.inputs.count(op.output) == 1 and self._uses[op.output] == 1

    def _embed(self, op: Op) -> None:
        table, output = op.weights[0], self._buffers.new(op.output, op.width)
        if table in self._quantized:
            (part,) = self._quantized[table]
            tensors, fields = self._grouped(table, part), GROUPED[part.scheme.format].fields
        else:
            tensors, fields = (self._param(table),), {}
        fields = {**fields, "window": int(op.number("rows"))}
        self._emit(OpCode.EMBED, op, output, tensors=tensors, fields=fields)
        self._in_place(OpCode.SCALE, op, output, op.number("scale"), unless=1.0)

    def _norm(self, op: Op) -> None:
        source = self._buffers[op.inputs[0]]
        output, (code, _) = self._buffers.over(op.output, op.inputs[0]), NORMS[op.kind]
        fields = {"groups": int(op.number("groups")), "scalar": op.number("eps")}
        if op.kind is OpKind.RMS_NORM:
            fields["window"] = int(op.number("own_weights"))
        self._emit(code, op, output, inputs=(source,), tensors=self._norm_tensors(op), fields=fields)

    def _slice(self, op: Op) -> None:
        source = self._buffers[op.inputs[0]]
        start = int(op.number("start"))
        self._buffers.assign(op.output, Place(source.buffer, source.offset + start, op.width, source.stride))

    def _rope(self, op: Op) -> None:
        """Postponed to the attention, which rotates queries when it loads them and keys when it caches them, except for
        values that other ops read."""
        if op.output in self._turned_for_others:
            inputs = (self._buffers[op.inputs[0]], self._rope_table(op))
            self._emit(OpCode.ROPE, op, self._buffers.new(op.output, op.width), inputs=inputs)
            return
        self._turned[op.output] = self._rope_table(op)
        self._buffers.assign(op.output, self._buffers[op.inputs[0]])

    def _rope_table(self, op: Op) -> Place:
        """Cosines and sines of the step's positions, computed once for all layers with the same frequencies."""
        scale = op.number("scale")
        inv_freq = op.attrs["inv_freq"]
        assert isinstance(inv_freq, tuple)
        frequencies = self._constant("rope_inv_freq", inv_freq)
        key = f"rope_table.{frequencies}.{scale}"
        if key not in self._tables:
            rotary_dim = 2 * len(inv_freq)
            self._uses[key] += 1  # keeps its place until the end
            table = self._buffers.new(key, rotary_dim)
            fields = {"head_dim": rotary_dim, "scalar": scale}
            self._ops.append(DeviceOp(OpCode.ROPE_TABLE, table, tensors=(frequencies,), fields=fields))
            self._tables[key] = key
        return self._buffers[key]

    def _attention(self, op: Op) -> None:
        q, k, v = (self._buffers[name] for name in op.inputs)
        q_table, k_table = (self._turned.get(name, NOWHERE) for name in op.inputs[:2])
        layer, head_dim = int(op.number("layer")), int(op.number("head_dim"))
        if layer not in self._written:
            own = {} if head_dim == self._program.cache.head_dim else {"head_dim": head_dim}
            self._emit(OpCode.CACHE_WRITE, op, NOWHERE, inputs=(k, v, k_table), fields={"layer": layer, **own})
            self._written.add(layer)
        slopes = op.attrs["alibi_slopes"]
        tensors = (
            self._constant("alibi_slopes", slopes) if slopes else NO_TENSOR,
            *(self._vector(sinks) for sinks in op.weights),
        )
        fields = {
            "layer": layer,
            "num_heads": int(op.number("num_heads")),
            "window": int(op.number("window")),
            "scalar": op.number("scale"),
            "soft_cap": op.number("soft_cap"),
            "groups": BIDIRECTIONAL if op.number("bidirectional") else IN_STRETCHES if op.number("chunked") else 0,
        }
        output = self._buffers.new(op.output, op.width)
        self._emit(OpCode.ATTENTION, op, output, inputs=(q, q_table), tensors=tensors, fields=fields)

    def _embed_position(self, op: Op) -> None:
        self._look_up(OpCode.EMBED_POSITION, op, int(op.number("begin")))

    def _embed_segment(self, op: Op) -> None:
        self._look_up(OpCode.EMBED_SEGMENT, op, 0)

    def _pool(self, op: Op) -> None:
        kind = POOLINGS.index(str(op.attrs["mode"])) + NORMALIZED * bool(op.number("normalize"))
        source, is_last = self._buffers[op.inputs[0]], op is self._program.ops[-1]
        place = Place(LOGITS_BUFFER, 0, op.width, op.width) if is_last else self._buffers.new(op.output, op.width)
        self._emit(OpCode.POOL, op, place, inputs=(source,), fields={"groups": kind})

    def _activation(self, op: Op) -> None:
        source = self._buffers[op.inputs[0]]
        code, _ = activations_of(op)[str(op.attrs["activation"])]
        if code is OpCode.SOFT_CAP:
            output = self._buffers.over(op.output, op.inputs[0])
            assert output == source, "tanh requires a value without other readers"
            self._emit(code, op, output, fields={"scalar": 1.0})
            return
        self._emit(code, op, self._buffers.new(op.output, op.width), inputs=(source,))

    def _select_rows(self, op: Op) -> None:
        source = self._buffers[op.inputs[0]]
        self._emit(OpCode.SELECT_ROWS, op, self._buffers.new(op.output, op.width), inputs=(source,))

    def _linear(self, op: Op) -> None:
        self._product(op, lambda: self._buffers.new(op.output, op.width), NOWHERE)

    def _logits(self, op: Op) -> None:
        place = Place(LOGITS_BUFFER, 0, op.width, op.width)
        self._product(op, lambda: place, NOWHERE)
        self._in_place(OpCode.SCALE, op, place, op.number("scale"), unless=1.0)
        self._in_place(OpCode.SOFT_CAP, op, place, op.number("soft_cap"), unless=0.0)

    def _fused_linear(self, op: Op, add: Op) -> None:
        """y = residual + x @ W.T in one pass, in the residual's own place if no other op needs it."""
        residual = next(name for name in add.inputs if name != op.output)
        place = self._buffers[residual]
        self._product(op, lambda: self._buffers.over(add.output, residual), place)
        self._buffers.read((*op.inputs, *add.inputs))

    def _product(self, op: Op, place_output: Any, residual: Place) -> None:
        weight, *biases = op.weights
        if weight not in self._quantized:
            tensors = (self._param(weight), *(self._vector(bias) for bias in biases))
            source = self._buffers[op.inputs[0]]
            self._emit(OpCode.LINEAR, op, place_output(), inputs=(source, residual), tensors=tensors)
            return
        values, facts = self._quantize(op)
        output = place_output()
        for part in self._quantized[weight]:
            columns = part.begin, part.end
            numbers, groups, row_scales = self._grouped(weight, part)
            bias = self._bias(biases[0], part) if biases else NO_TENSOR
            inputs = (values, residual.columns(*columns), facts)
            tensors = (numbers, bias, groups, row_scales)
            grouped, place = GROUPED[part.scheme.format], output.columns(*columns)
            self._emit(grouped.code, op, place, inputs=inputs, tensors=tensors, fields=grouped.fields)
        self._buffers.read((f"{op.output}.int8", f"{op.output}.facts"))

    def _quantize(self, op: Op) -> tuple[Place, Place]:
        """Int8 values of the input of `op`, and the data of each row: two numbers for each of its groups."""
        first = self._before.get(op.inputs[0])
        source = self._buffers[first.inputs[0] if first else op.inputs[0]]
        width = first.width if first else source.width
        names = (f"{op.output}.int8", f"{op.output}.facts")
        self._uses.update(names)
        values = self._buffers.new(names[0], width, item_bytes=1)
        facts = self._buffers.new(names[1], self._num_facts(op.weights[0], width))
        fields: dict[str, int | float] = {}
        tensors: tuple[int, ...] = ()
        if first is not None and first.kind in NORMS:
            fields |= {"before": NORMS[first.kind][1], "scalar": first.number("eps")}
            tensors = self._norm_tensors(first)
        elif first is not None:
            _, fields["before"] = activations_of(first)[str(first.attrs["activation"])]
        self._emit(OpCode.QUANTIZE, op, values, inputs=(source, facts), tensors=tensors, fields=fields)
        self._buffers.read(first.inputs if first else ())
        return values, facts

    def _num_facts(self, weight: str, width: int) -> int:
        """Numbers per row: two for each group, and one more if weights have smaller groups."""
        group = min(part.scheme.format.group for part in self._quantized[weight])
        return (2 + (group < INT8_ACTIVATIONS.group)) * INT8_ACTIVATIONS.num_groups(width)

    def _route(self, op: Op) -> None:
        output, factor = self._buffers.new(op.output, op.width), op.number("factor")
        form = ROUTE_TO_ONE * bool(op.number("renormalize")) + ROUTE_SIGMOID * bool(op.number("sigmoid"))
        form += ROUTE_BY_BEST * bool(op.number("by_best"))
        fields = {
            "groups": form,
            "scalar": 0.0 if factor == 1.0 else factor,
            "soft_cap": op.number("tolerance"),
            "num_heads": int(op.number("num_groups")),
            "head_dim": int(op.number("chosen_groups")),
        }
        biases = tuple(map(self._vector, op.weights))
        if op.number("scaled") and not op.number("biased"):
            biases = (NO_TENSOR, *biases)
        self._emit(OpCode.ROUTE, op, output, inputs=(self._buffers[op.inputs[0]],), tensors=biases, fields=fields)

    def _convolution(self, op: Op) -> None:
        source, output = self._buffers[op.inputs[0]], self._buffers.new(op.output, op.width)
        fields = {"window": int(op.number("taps")), "groups": int(op.number("silu"))}
        tensors = tuple(map(self._vector, op.weights))
        self._emit(OpCode.CONVOLUTION, op, output, inputs=(source,), tensors=tensors, fields=fields)

    def _delta_rule(self, op: Op) -> None:
        self._heads_with_states(OpCode.DELTA_RULE, op, "num_key_heads", "key_dim")

    def _selective_scan(self, op: Op) -> None:
        self._heads_with_states(OpCode.SELECTIVE_SCAN, op, "num_groups", "state_size")

    def _heads_with_states(self, code: OpCode, op: Op, groups: str, size: str) -> None:
        inputs = tuple(self._buffers[name] for name in op.inputs)
        names = {"num_heads": "num_heads", "groups": groups, "head_dim": size}
        fields = {field: int(op.number(name)) for field, name in names.items()}
        output, tensors = self._buffers.new(op.output, op.width), tuple(map(self._vector, op.weights))
        self._emit(code, op, output, inputs=inputs, tensors=tensors, fields=fields)

    def _experts(self, op: Op) -> None:
        """Sort rows by expert, compute two products per expert, and sum the results in the original order."""
        x, routes = (self._buffers[name] for name in op.inputs)
        gate_up, down, *biases = op.weights
        first, second = map(self._vector, biases) if biases else (NO_TENSOR, NO_TENSOR)
        code, before = activations_of(op)[str(op.attrs["activation"])]
        fields = {"groups": int(op.number("num_experts"))}
        self._emit(OpCode.DISPATCH, op, NOWHERE, inputs=(routes,), fields=fields)
        rows = self._for_experts(op, "rows", x.width)
        weighted = bool(op.number("scales_inputs"))
        self._emit(OpCode.SELECT_ROWS, op, rows, inputs=(x, routes)[: 1 + weighted], rows=RowsOf.CHOSEN)
        inner = self._by_expert(op, gate_up, rows, "gate_up", first)
        self._buffers.read((f"{op.output}.rows",))
        if down not in self._quantized:
            activated = self._for_experts(op, "activated", inner.width // (1 if op.number("plain") else 2))
            self._emit(code, op, activated, inputs=(inner,), rows=RowsOf.CHOSEN)
            self._buffers.read((f"{op.output}.gate_up",))
            made = self._by_expert(op, down, activated, "down", second)
            self._buffers.read((f"{op.output}.activated",))
        else:
            made = self._by_expert(op, down, inner, "down", second, before)
            self._buffers.read((f"{op.output}.gate_up",))
        output = self._buffers.new(op.output, op.width)
        self._emit(OpCode.COMBINE, op, output, inputs=(made, routes), fields={"groups": int(weighted)})
        self._buffers.read((f"{op.output}.down",))

    def _by_expert(self, op: Op, weight: str, x: Place, name: str, bias: int, before: Before = Before.NOTHING) -> Place:
        """The product of each row with its expert's part of `weight`."""
        height, depth = self._params[weight].shape
        width = height // int(op.number("num_experts"))
        if weight not in self._quantized:
            output, matrix = self._for_experts(op, name, width), (self._param(weight), bias)
            self._emit(OpCode.LINEAR, op, output, inputs=(x, NOWHERE), tensors=matrix, rows=RowsOf.CHOSEN)
            return output
        (part,) = self._quantized[weight]
        values = self._for_experts(op, f"{name}.int8", depth, item_bytes=1)
        facts = self._for_experts(op, f"{name}.facts", self._num_facts(weight, depth))
        fields = {"before": before}
        self._emit(OpCode.QUANTIZE, op, values, inputs=(x, facts), fields=fields, rows=RowsOf.CHOSEN)
        output = self._for_experts(op, name, width)
        numbers, groups, row_scales = self._grouped(weight, part)
        tensors = (numbers, bias, groups, row_scales)
        grouped, inputs = GROUPED[part.scheme.format], (values, NOWHERE, facts)
        self._emit(grouped.code, op, output, inputs=inputs, tensors=tensors, rows=RowsOf.CHOSEN, fields=grouped.fields)
        self._buffers.read((f"{op.output}.{name}.int8", f"{op.output}.{name}.facts"))
        return output

    def _for_experts(self, op: Op, name: str, width: int, item_bytes: int = 4) -> Place:
        """A place with a row for each expert of a token, until it is read."""
        value, stride = f"{op.output}.{name}", -(-width * item_bytes // 4) * 4 // item_bytes
        self._uses[value] += 1
        place = self._buffers.new(value, stride * int(op.number("experts_per_token")), item_bytes)
        return self._buffers.assign(value, Place(place.buffer, 0, width, stride))

    RULES: ClassVar[Mapping[OpKind, Rule]] = {
        **RowLowering.RULES,
        OpKind.EMBED: Rule(_embed, ("scale", "rows")),
        OpKind.EMBED_POSITION: Rule(_embed_position, ("begin",)),
        OpKind.EMBED_SEGMENT: Rule(_embed_segment),
        OpKind.RMS_NORM: Rule(_norm, ("eps", "groups", "offset", "own_weights")),
        OpKind.LAYER_NORM: Rule(_norm, ("eps", "groups", "offset")),
        OpKind.LINEAR: Rule(_linear),
        OpKind.SLICE: Rule(_slice, ("start",)),
        OpKind.ROPE: Rule(_rope, ("head_dim", "inv_freq", "scale")),
        OpKind.ATTENTION: Rule(
            _attention,
            (
                "layer",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "scale",
                "window",
                "chunked",
                "soft_cap",
                "alibi_slopes",
                "sinks",
                "bidirectional",
            ),
        ),
        OpKind.GATED_ACTIVATION: Rule(_activation, ("activation",)),
        OpKind.ACTIVATION: Rule(_activation, ("activation",)),
        OpKind.ROUTE: Rule(
            _route,
            (
                "experts_per_token",
                "renormalize",
                "sigmoid",
                "biased",
                "factor",
                "num_groups",
                "chosen_groups",
                "by_best",
                "tolerance",
                "scaled",
            ),
        ),
        OpKind.EXPERTS: Rule(
            _experts, ("experts_per_token", "num_experts", "activation", "biased", "scales_inputs", "plain")
        ),
        OpKind.CONVOLUTION: Rule(_convolution, ("taps", "silu", "biased")),
        OpKind.DELTA_RULE: Rule(_delta_rule, ("num_heads", "num_key_heads", "key_dim")),
        OpKind.SELECTIVE_SCAN: Rule(_selective_scan, ("num_heads", "num_groups", "state_size")),
        OpKind.SELECT_ROWS: Rule(_select_rows),
        OpKind.POOL: Rule(_pool, ("mode", "normalize")),
        OpKind.LOGITS: Rule(_logits, ("scale", "soft_cap", "biased", "tokens")),
    }


def lower(
    program: Program, params: Sequence[Param], *, dtype: DType, quantized: Mapping[str, Sequence[WeightPart]]
) -> Lowered:
    return Lowering(program, params, dtype=dtype, quantized=quantized).run()
