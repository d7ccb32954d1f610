"""Records the ops of a network's `forward` as a `Program`."""

from __future__ import annotations

from llmserve.models.program import (
    ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    POOLINGS,
    UNLESS_GIVEN,
    Attr,
    CacheShape,
    Op,
    OpKind,
    Program,
    Value,
)

__all__ = [
    "ACTIVATIONS",
    "PLAIN_ACTIVATIONS",
    "POOLINGS",
    "UNLESS_GIVEN",
    "Attr",
    "CacheShape",
    "Graph",
    "Op",
    "OpKind",
    "Program",
    "Value",
]


class Graph:
    """Records ops. Methods check widths and return the `Value` that they define."""

    def __init__(self, cache: CacheShape, vocab_size: int) -> None:
        self._cache = cache
        self._vocab_size = vocab_size
        self._ops: list[Op] = []

    def embed(self, weight: str, width: int, *, scale: float = 1.0, rows: int = 0) -> Value:
        """`rows`: size of a table that is smaller than the vocabulary; tokens beyond it use the first row."""
        return self._record(OpKind.EMBED, (), width, (weight,), scale=scale, rows=rows)

    def embed_position(self, weight: str, width: int, *, begin: int = 0) -> Value:
        return self._record(OpKind.EMBED_POSITION, (), width, (weight,), begin=begin)

    def embed_segment(self, weight: str, width: int) -> Value:
        return self._record(OpKind.EMBED_SEGMENT, (), width, (weight,))

    def with_hidden(self, x: Value, hidden: int) -> Value:
        """x, followed by the token's hidden row of another network, `hidden` wide, which is an input of the step."""
        return self._record(OpKind.WITH_HIDDEN, (x,), x.width + hidden, hidden=hidden)

    def rms_norm(
        self,
        x: Value,
        weight: str | None,
        *,
        eps: float,
        groups: int = 1,
        offset: float = 0.0,
        own_weights: bool = False,
    ) -> Value:
        """x / rms(x) * (offset + weight), for each of `groups` column groups of `x`.

        The groups share one weight of width / groups numbers, or have none. With `own_weights`, it has one per column.
        """
        assert x.width % groups == 0
        return self._record(
            OpKind.RMS_NORM, (x,), x.width, () if weight is None else (weight,), eps=eps, groups=groups, offset=offset,
            own_weights=own_weights and groups > 1,
        )  # fmt: skip

    def layer_norm(
        self, x: Value, weight: str | None, *, eps: float, bias: str | None = None, groups: int = 1, offset: float = 0.0
    ) -> Value:
        """(x - mean) / sqrt(variance + eps) * (offset + weight) + bias. Mean and variance are computed for each of
        `groups` equal column groups. Weight and bias are optional, and as long as a row."""
        assert x.width % groups == 0
        weights = tuple(name for name in (weight, bias) if name is not None)
        return self._record(OpKind.LAYER_NORM, (x,), x.width, weights, eps=eps, groups=groups, offset=offset)

    def linear(self, x: Value, weight: str, width: int, *, bias: str | None = None) -> Value:
        return self._record(OpKind.LINEAR, (x,), width, (weight,) if bias is None else (weight, bias))

    def slice(self, x: Value, start: int, width: int) -> Value:
        assert start >= 0
        assert start + width <= x.width
        return self._record(OpKind.SLICE, (x,), width, start=start)

    def rope(self, x: Value, *, head_dim: int, inv_freq: tuple[float, ...], scale: float = 1.0) -> Value:
        """Rotary embedding at each token's absolute position. `scale` multiplies cos and sin (YaRN).

        With fewer than head_dim / 2 frequencies, only the first columns of each head are rotated.
        """
        assert x.width % head_dim == 0
        assert 0 < len(inv_freq) * 2 <= head_dim
        return self._record(OpKind.ROPE, (x,), x.width, head_dim=head_dim, inv_freq=inv_freq, scale=scale)

    def scale_by_position(self, x: Value, *, strength: float, interval: int, shift: int = 0) -> Value:
        """x * (1 + strength * log(1 + floor((position + shift) / interval)))."""
        assert interval > 0
        return self._record(OpKind.SCALE_BY_POSITION, (x,), x.width, strength=strength, interval=interval, shift=shift)

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        alibi_slopes: tuple[float, ...] = (),
        sinks: str | None = None,
        chunked: bool = False,
        bidirectional: bool = False,
    ) -> Value:
        """Causal attention of each token over its sequence's cache; `bidirectional`: over the whole sequence.

        score(i, j) = scale * q_i . k_j + slope * (j - i). `soft_cap` > 0 first changes the product to soft_cap *
        tanh(product / soft_cap). `window` > 0 keeps only the last `window` positions (i - j < window, transformers'
        rule), or with `chunked`, those of the same chunk of `window` positions (i // window == j // window).
        Query head h reads KV head h // (num_heads / num_kv_heads). `sinks` [num_heads]: each head's score for an
        additional position without a value. Several ops may read the cache of one `layer`, with the same k and v.
        """
        assert q.width == num_heads * head_dim
        assert k.width == v.width == num_kv_heads * head_dim
        assert len(alibi_slopes) in (0, num_heads)
        assert layer < self._cache.num_layers
        return self._record(
            OpKind.ATTENTION, (q, k, v), q.width, () if sinks is None else (sinks,), layer=layer, num_heads=num_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale, window=window, soft_cap=soft_cap,
            alibi_slopes=alibi_slopes, sinks=sinks is not None, chunked=chunked, bidirectional=bidirectional,
        )  # fmt: skip

    def gated_activation(self, gate_up: Value, *, activation: str = "silu") -> Value:
        assert gate_up.width % 2 == 0
        assert activation in ACTIVATIONS
        return self._record(OpKind.GATED_ACTIVATION, (gate_up,), gate_up.width // 2, activation=activation)

    def activation(self, x: Value, *, activation: str) -> Value:
        assert activation in PLAIN_ACTIVATIONS
        return self._record(OpKind.ACTIVATION, (x,), x.width, activation=activation)

    def add(self, a: Value, b: Value) -> Value:
        assert a.width == b.width
        return self._record(OpKind.ADD, (a, b), a.width)

    def multiply(self, a: Value, b: Value) -> Value:
        assert a.width == b.width
        return self._record(OpKind.MULTIPLY, (a, b), a.width)

    def scale(self, x: Value, weight: str) -> Value:
        """x times one number, or each column times its own number."""
        return self._record(OpKind.SCALE, (x,), x.width, (weight,))

    def mix(
        self, x: Value, z: Value, coefficients: Value | None = None, *, groups: int, offset: float = 0.0, first: int = 0
    ) -> Value:
        """For equal column groups x_k of `x` and z_j of `z`: y_k = x_k + sum over j of (c[k, j] + offset) * z_j, in
        order. `coefficients` has c row by row; without them c is 0. Groups before `first` are unchanged."""
        assert x.width % groups == 0
        width = x.width // groups
        assert z.width % width == 0
        assert first < groups
        assert coefficients is None or coefficients.width == groups * (z.width // width)
        inputs = (x, z) if coefficients is None else (x, z, coefficients)
        return self._record(OpKind.MIX, inputs, x.width, groups=groups, offset=offset, first=first)

    def spread(self, x: Value, z: Value, *, least: float) -> Value:
        """x, followed by the column groups of `z`, each as wide as x and scaled to its size: times the root mean square
        of x over its own, whose square is at least `least`."""
        assert z.width % x.width == 0
        return self._record(OpKind.SPREAD, (x, z), x.width + z.width, least=least)

    def over_threshold(self, x: Value, *, deviations: float) -> Value:
        """max(0, x - mean - deviations * standard deviation) of a row."""
        return self._record(OpKind.OVER_THRESHOLD, (x,), x.width, deviations=deviations)

    def route(
        self,
        logits: Value,
        *,
        experts_per_token: int,
        renormalize: bool,
        sigmoid: bool = False,
        bias: str | None = None,
        factor: float = 1.0,
        groups: tuple[int, int] = (0, 0),
        by_best: bool = False,
        tolerance: float = 0.0,
        scales: str | None = None,
    ) -> Value:
        """Select the experts of each row: those with the largest score plus `bias`; of equal ones, the first.

        A score is the softmax of a logit over all experts, or its sigmoid. y has the experts' indices in ascending
        order, then their weights, which are their scores. `renormalize` divides the weights by their sum. Then each
        weight is multiplied by `factor`, and by its expert's entry in `scales`.

        `groups`: the number of equal groups of experts, and of groups that a row selects from: those with the largest
        sum of their two largest scores plus `bias`, or with `by_best`, those with the largest one.

        `tolerance` > 0 is SparseMixer's rule. The score of the i-th expert is its softmax over the experts that are not
        selected before it and have (its logit - logit) / max(|logit|, its logit) <= `tolerance`.
        """
        assert 0 < experts_per_token <= logits.width
        return self._record(
            OpKind.ROUTE, (logits,), 2 * experts_per_token, tuple(name for name in (bias, scales) if name is not None),
            experts_per_token=experts_per_token, renormalize=renormalize, sigmoid=sigmoid, biased=bias is not None,
            factor=factor, num_groups=groups[0], chosen_groups=groups[1], by_best=by_best, tolerance=tolerance,
            scaled=scales is not None,
        )  # fmt: skip

    def experts(
        self,
        x: Value,
        routes: Value,
        gate_up: str,
        down: str,
        *,
        num_experts: int,
        activation: str = "silu",
        biases: tuple[str, str] | None = None,
        scales_inputs: bool = False,
        plain: bool = False,
    ) -> Value:
        """The sum over a row's experts, in ascending order, of weight * down(activation(gate(x), up(x))). With
        `scales_inputs`, the weight multiplies x instead. `plain`: there are no gates, and `gate_up` is only up.

        The matrices of all experts are stacked as rows, gate above up; so are the `biases` of gate and up, and of down.
        """
        assert activation in (PLAIN_ACTIVATIONS if plain else ACTIVATIONS)
        return self._record(
            OpKind.EXPERTS, (x, routes), x.width, (gate_up, down, *(biases or ())),
            experts_per_token=routes.width // 2, num_experts=num_experts, activation=activation,
            biased=biases is not None, scales_inputs=scales_inputs, plain=plain,
        )  # fmt: skip

    def sigmoid_gate(self, x: Value, gate: Value, *, silu: bool = False) -> Value:
        assert gate.width in (1, x.width)
        return self._record(OpKind.SIGMOID_GATE, (x, gate), x.width, silu=silu)

    def convolution(self, x: Value, weight: str, *, taps: int, bias: str | None = None, silu: bool = False) -> Value:
        """Causal, of each column: y[t] = bias + sum of weight[:, j] * x[t - taps + 1 + j] over j < taps, with zeros
        before the sequence. `silu`: then silu(y)."""
        assert taps > 1
        weights = (weight,) if bias is None else (weight, bias)
        return self._record(OpKind.CONVOLUTION, (x,), x.width, weights, taps=taps, silu=silu, biased=bias is not None)

    def delta_rule(
        self, qkv: Value, gates: Value, decay: str, bias: str, *, num_heads: int, num_key_heads: int, key_dim: int
    ) -> Value:
        """The gated delta rule (Yang et al., 2024): each head has a matrix S [key_dim, width / num_heads], initially 0.

        A token updates it with g = exp(-exp(decay) * softplus(a + bias)) and beta = sigmoid(b): S = g S, then
        S = S + k (beta * (v - k S)); y = q S. `gates` has b of all heads, then a of all heads. q and k have
        `num_key_heads` heads of length 1; q is also divided by the root of `key_dim`. Each key head serves the same
        number of consecutive heads.
        """
        width = qkv.width - 2 * num_key_heads * key_dim
        assert num_heads % num_key_heads == 0
        assert width % num_heads == 0
        assert gates.width == 2 * num_heads
        return self._record(
            OpKind.DELTA_RULE, (qkv, gates), width, (decay, bias), num_heads=num_heads, num_key_heads=num_key_heads,
            key_dim=key_dim,
        )  # fmt: skip

    def selective_scan(
        self,
        xbc: Value,
        steps: Value,
        weights: tuple[str, str, str],
        *,
        num_heads: int,
        num_groups: int,
        state_size: int,
    ) -> Value:
        """Mamba2's scan (Dao and Gu, 2024): each head has a matrix S [state_size, width / num_heads], initially 0.

        A token updates it with d = softplus(step + bias): S = exp(-exp(decay) * d) S + b (d * x); y = c S + skip * x.
        `xbc` has x of all heads, then b and c of all groups. Each group serves the same number of consecutive heads.
        `weights`: decay, bias and skip of each head.
        """
        width = xbc.width - 2 * num_groups * state_size
        assert num_heads % num_groups == 0
        assert width % num_heads == 0
        assert steps.width == num_heads
        return self._record(
            OpKind.SELECTIVE_SCAN, (xbc, steps), width, weights, num_heads=num_heads, num_groups=num_groups,
            state_size=state_size,
        )  # fmt: skip

    def select_rows(self, x: Value) -> Value:
        return self._record(OpKind.SELECT_ROWS, (x,), x.width)

    def pool(self, x: Value, mode: str, *, normalize: bool = False) -> Value:
        """`normalize`: divide each row by its L2 norm."""
        assert mode in POOLINGS
        return self._record(OpKind.POOL, (x,), x.width, mode=mode, normalize=normalize)

    def logits(
        self,
        x: Value,
        weight: str,
        *,
        bias: str | None = None,
        scale: float = 1.0,
        soft_cap: float = 0.0,
        width: int | None = None,
    ) -> Value:
        """soft_cap(scale * (x @ weight.T + bias)) in float32, for every token of the vocabulary or `width` classes."""
        weights = (weight,) if bias is None else (weight, bias)
        return self._record(
            OpKind.LOGITS, (x,), width or self._vocab_size, weights, scale=scale, soft_cap=soft_cap,
            biased=bias is not None,
        )  # fmt: skip

    def program(self) -> Program:
        assert self._ops
        assert self._ops[-1].kind in (OpKind.LOGITS, OpKind.POOL)
        return Program(tuple(self._ops), self._cache, self._vocab_size)

    def _record(
        self, kind: OpKind, inputs: tuple[Value, ...], width: int, weights: tuple[str, ...] = (), **attrs: Attr
    ) -> Value:
        output = Value(f"v{len(self._ops)}", width)
        defaults = UNLESS_GIVEN.get(kind, {})
        attrs = {name: value for name, value in attrs.items() if name not in defaults or value != defaults[name]}
        self._ops.append(Op(kind, tuple(v.name for v in inputs), output.name, width, weights, attrs))
        return output
