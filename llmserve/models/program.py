"""Semantic ops, and the `Program` that consists of them. `graph.py` records it.

A Program is plain data: device-neutral, printable, comparable. A target lowers it; nothing here computes.

Shapes: T tokens of the step, S selected rows (those whose logits are needed), H hidden, V vocabulary. Every value is a
matrix [T, width] (or [S, width] after `select_rows`) of real numbers; the target chooses the precision.
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
    EMBED_SEGMENT = "embed_segment"  # (); [S,H]; y[t] = weight[0]; for a second text's tokens weight[1], if S > 1
    WITH_HIDDEN = "with_hidden"  # x; ; hidden: y[t] = x[t], followed by `hidden` numbers of the step's input for t
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
    DELTA_RULE = "delta_rule"  # q, k and v joined, gates; [heads], [heads]; see Graph.delta_rule
    SELECTIVE_SCAN = "selective_scan"  # x, b and c joined, steps; three of [heads]; see Graph.selective_scan
    SELECT_ROWS = "select_rows"  # x; keeps the S rows whose logits are needed
    POOL = "pool"  # x; ; mode: see POOLINGS, normalize?: one row for each sequence, from all its rows
    LOGITS = (
        "logits"  # x [S,H]; [V,H], bias? [V]; scale?, soft_cap?, tokens?; see Graph.logits and Program.draft_vocabulary
    )


# Gated activations, act(gate) * up: gelu_tanh uses the tanh formula, gelu uses erf. "clamped" is gpt-oss's:
# g * sigmoid(1.702 g) * (u + 1), with g = min(gate, 7) and u = up clamped to +-7.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "clamped")
# Activations without a gate. relu2 is the square of max(x, 0).
PLAIN_ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", "tanh")
# The first row, the last one, the mean of all rows, or the maximum of each column.
POOLINGS = ("first", "last", "mean", "max")
# Defaults of attributes that an op has only if their value differs: no embedding scale, no soft cap and so on.
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
        """The attribute `name`, or its default if the op does not have it."""
        value = self.attrs[name] if name in self.attrs else UNLESS_GIVEN[self.kind][name]
        assert isinstance(value, int | float)
        return value

    @property
    def state_floats(self) -> int:
        """Number of float32 values that the op keeps for each sequence between steps."""
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

    These are the heads of the layer with the most numbers. Other layers may have more or larger heads: see ATTENTION.
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
        """Size of a sequence's state, whatever its length; 0 if it only keeps keys and values."""
        return 4 * sum(op.state_floats for op in self.ops)

    @property
    def output_width(self) -> int:
        """Width of an output row."""
        return self.ops[-1].width

    @property
    def hidden_width(self) -> int:
        """Width of the row that it reads for each token: the input of another network's head. 0: it reads none."""
        return sum(int(op.number("hidden")) for op in self.ops if op.kind is OpKind.WITH_HIDDEN)

    @property
    def draft_vocabulary(self) -> tuple[int, ...]:
        """The token of each logit, ascending, if the head has only some. Empty: it has all."""
        found = self.ops[-1].attrs.get("tokens", ())
        assert isinstance(found, tuple)
        return tuple(map(int, found))

    @property
    def pools(self) -> bool:
        """Whether the output is for whole sequences, not for next tokens."""
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
