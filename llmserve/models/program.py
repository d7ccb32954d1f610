"""Semantic ops, and the `Program` that they make. `graph.py` records it.

A Program is plain data: device-neutral, printable, comparable. A target lowers it; nothing here computes.

Shapes: T tokens of the step, S selected rows (those whose logits are wanted), H hidden, V vocabulary. Every value is a
matrix [T, width] (or [S, width] after `select_rows`) of real numbers; precision is the target's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

Attr: TypeAlias = int | float | str | bool | tuple[int, ...] | tuple[float, ...]


class OpKind(Enum):
    """op: inputs; weights; attrs. `y` is the output."""

    EMBED = "embed"  # (); [V,H]; scale?, rows?: y[t] = scale * weight[token_ids[t]]; see Graph.embed
    EMBED_POSITION = "embed_position"  # (); [P,H]; begin: y[t] = weight[begin + position of t]
    EMBED_SEGMENT = "embed_segment"  # (); [S,H]; y[t] = weight[0], or of a second text's tokens weight[1] where it is
    WITH_HIDDEN = "with_hidden"  # x; ; hidden: y[t] = x[t], and beside it as many numbers that the step has for t
    RMS_NORM = "rms_norm"  # x; [N]?; eps, groups, offset?, own_weights?; see Graph.rms_norm
    LAYER_NORM = "layer_norm"  # x; [N]?, optional bias [N]; see Graph.layer_norm
    LINEAR = "linear"  # x; [N,K], optional bias [N]; y = x @ weight.T + bias
    SLICE = "slice"  # x; ; start, width: a view of columns
    ROPE = "rope"  # x; ; head_dim, inv_freq (R/2 values), scale: rotate-half pairs (i, i + R/2), i < R/2, of each head
    SCALE_BY_POSITION = "scale_by_position"  # x; ; strength, interval, shift?; see Graph.scale_by_position
    ATTENTION = "attention"  # q, k, v; sinks?; see Graph.attention. Writes k and v to the paged cache of `layer` first
    GATED_ACTIVATION = "gated_activation"  # gate_up [T,2I]; ; activation: see ACTIVATIONS, gate is columns 0..I-1
    ACTIVATION = "activation"  # x; ; activation: see PLAIN_ACTIVATIONS
    ADD = "add"  # a, b
    MULTIPLY = "multiply"  # a, b
    SCALE = "scale"  # x; [1] or [N]: y = weight * x
    MIX = "mix"  # x, z, coefficients [T,G*M]?; groups, offset?, first?; see Graph.mix
    SPREAD = "spread"  # x, z; least; see Graph.spread
    OVER_THRESHOLD = "over_threshold"  # x; ; deviations; see Graph.over_threshold
    ROUTE = "route"  # logits [T,E]; correction bias? [E], scales? [E]; see Graph.route
    EXPERTS = "experts"  # x, routes; [E*2I,H] or plain [E*I,H], [E*H,I], two biases?; see Graph.experts
    SIGMOID_GATE = "sigmoid_gate"  # x, gate [T,1] or as wide; silu?: y = sigmoid(gate) * x, or silu(gate) * x
    CONVOLUTION = "convolution"  # x; [N,K], bias? [N]; taps, silu?, biased?; see Graph.convolution
    DELTA_RULE = "delta_rule"  # q, k and v side by side, gates; [heads], [heads]; see Graph.delta_rule
    SELECTIVE_SCAN = "selective_scan"  # x, b and c side by side, steps; three of [heads]; see Graph.selective_scan
    SELECT_ROWS = "select_rows"  # x; keeps the S rows whose logits are wanted
    POOL = "pool"  # x; ; mode: see POOLINGS, normalize?: a row for each sequence, of all its rows
    LOGITS = (
        "logits"  # x [S,H]; [V,H], bias? [V]; scale?, soft_cap?: soft_cap(scale * (x @ weight.T + bias)) in float32
    )


# Of a gated activation, act(gate) * up: gelu_tanh by tanh's formula, gelu by erf. "clamped" is gpt-oss's:
# g * sigmoid(1.702 g) * (u + 1), of g = min(gate, 7) and u = up within +-7.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "clamped")
# Without a gate. relu2 is the square of max(x, 0).
PLAIN_ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", "tanh")
# The first row, the last one, the mean of all, or the largest of each column.
POOLINGS = ("first", "last", "mean", "max")
# Attributes that an op has only where they are not these: no embedding scale, no soft cap and so on.
UNLESS_GIVEN: Mapping[OpKind, Mapping[str, float]] = {
    OpKind.EMBED: {"scale": 1.0, "rows": 0},
    OpKind.RMS_NORM: {"offset": 0.0, "own_weights": False},
    OpKind.LAYER_NORM: {"groups": 1, "offset": 0.0},
    OpKind.SCALE_BY_POSITION: {"shift": 0},
    OpKind.MIX: {"offset": 0.0, "first": 0},
    OpKind.ATTENTION: {"soft_cap": 0.0, "sinks": False, "chunked": False, "bidirectional": False},
    OpKind.ROUTE: {
        "sigmoid": False,
        "biased": False,
        "factor": 1.0,
        "num_groups": 0,
        "chosen_groups": 0,
        "by_best": False,
        "tolerance": 0.0,
        "scaled": False,
    },
    OpKind.EXPERTS: {"biased": False, "scales_inputs": False, "plain": False},
    OpKind.SIGMOID_GATE: {"silu": False},
    OpKind.CONVOLUTION: {"silu": False, "biased": False},
    OpKind.POOL: {"normalize": False},
    OpKind.LOGITS: {"scale": 1.0, "soft_cap": 0.0, "biased": False},
}


@dataclass(frozen=True, slots=True)
class Op:
    kind: OpKind
    inputs: tuple[str, ...]
    output: str
    width: int  # columns of the output
    weights: tuple[str, ...] = ()  # parameter names
    attrs: Mapping[str, Attr] = field(default_factory=dict)

    def number(self, name: str) -> float:
        """The attribute `name`; where the op has none, what that means."""
        value = self.attrs[name] if name in self.attrs else UNLESS_GIVEN[self.kind][name]
        assert isinstance(value, int | float)
        return value

    @property
    def state_floats(self) -> int:
        """Float32 numbers that it keeps of a sequence, from one step to the next."""
        if self.kind is OpKind.CONVOLUTION:
            return self.width * (int(self.number("taps")) - 1)
        if self.kind is OpKind.DELTA_RULE:
            return self.width * int(self.number("key_dim"))
        if self.kind is OpKind.SELECTIVE_SCAN:
            return self.width * int(self.number("state_size"))
        return 0

    def __str__(self) -> str:
        arguments = ", ".join((*self.inputs, *(f"@{w}" for w in self.weights)))
        attrs = " ".join(f"{k}={_short(v)}" for k, v in self.attrs.items())
        return f"%{self.output}[{self.width}] = {self.kind.value}({arguments}) {attrs}".rstrip()


def _short(value: Attr) -> str:
    if isinstance(value, tuple) and len(value) > 4:
        return f"({value[0]}, {value[1]}, ... {len(value)} values)"
    return str(value)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The paged KV cache of a Program: per layer, per token, `num_kv_heads * head_dim` numbers each for k and v.

    These are the heads of the largest layer; others may have more or larger ones, as their ATTENTION says.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Program:
    """The traced network. The last op is LOGITS, or POOL."""

    ops: tuple[Op, ...]
    cache: CacheShape
    vocab_size: int

    @property
    def state_bytes(self) -> int:
        """Of each sequence, however long it is; 0 where keys and values are all that is kept."""
        return 4 * sum(op.state_floats for op in self.ops)

    @property
    def output_width(self) -> int:
        """Numbers of each row that comes out."""
        return self.ops[-1].width

    @property
    def hidden_width(self) -> int:
        """Of what it reads of each token beside its number: a row that another network's head reads. 0: nothing."""
        return sum(int(op.number("hidden")) for op in self.ops if op.kind is OpKind.WITH_HIDDEN)

    @property
    def pools(self) -> bool:
        """Whether what comes out is of whole sequences, and says nothing of a next token."""
        return any(op.kind is OpKind.POOL for op in self.ops)

    @property
    def needs_whole(self) -> bool:
        """Whether all tokens of a sequence must be in one step."""
        looks_back = {"bidirectional": False, "mode": "last"}
        return any(op.attrs.get(name, usual) != usual for op in self.ops for name, usual in looks_back.items())

    def __str__(self) -> str:
        return "\n".join(str(op) for op in self.ops)


@dataclass(frozen=True, slots=True)
class Value:
    """A handle on a matrix while tracing."""

    name: str
    width: int
