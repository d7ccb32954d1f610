"""Blocks of a decoder as functions over the Graph. An architecture file combines them.

Blocks use the parameter names of `weights.py`: "layers.0.attn.qkv" and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.models.graph import Graph, Value
from llmserve.models.spec import DecoderSpec, Rope


def norm(g: Graph, spec: DecoderSpec, x: Value, name: str, *, offset: float = 0.0) -> Value:
    return g.rms_norm(x, name, eps=spec.norm_eps, offset=offset)


def layer_norm(g: Graph, spec: DecoderSpec, x: Value, name: str, *, offset: float = 0.0, bias: bool = False) -> Value:
    return g.layer_norm(x, name, eps=spec.norm_eps, bias=f"{name}.bias" if bias else None, offset=offset)


def qkv(
    g: Graph, spec: DecoderSpec, x: Value, layer: int, *, bias: bool = False, gated: bool = False
) -> tuple[Value, ...]:
    """Queries, keys, values. `gated`: also the gates, which the heads' outputs are multiplied by."""
    name, gate_width = f"layers.{layer}.attn.qkv", spec.q_width if gated else 0
    first_key = spec.q_width + gate_width
    joined = g.linear(x, name, first_key + 2 * spec.kv_width, bias=f"{name}.bias" if bias else None)
    q, k = g.slice(joined, 0, spec.q_width), g.slice(joined, first_key, spec.kv_width)
    v = g.slice(joined, first_key + spec.kv_width, spec.kv_width)
    return (q, k, v, g.slice(joined, spec.q_width, gate_width)) if gated else (q, k, v)


def head_norms(
    g: Graph, spec: DecoderSpec, qk: Sequence[Value], layer: int, *, offset: float = 0.0, is_whole: bool = False
) -> list[Value]:
    """Normalize q and k: each head separately, or all heads of a token together (`is_whole`)."""
    return [
        g.rms_norm(
            x,
            f"layers.{layer}.attn.{n}_norm",
            eps=spec.norm_eps,
            groups=1 if is_whole else x.width // spec.head_dim,
            offset=offset,
        )
        for n, x in zip("qk", qk, strict=True)
    ]


def norms_of_heads(g: Graph, spec: DecoderSpec, qk: Sequence[Value], layer: int) -> list[Value]:
    """Normalize q and k by a layer norm with different weights for each head."""
    names = [f"layers.{layer}.attn.{n}_norm" for n in "qk"]
    heads = [x.width // spec.head_dim for x in qk]
    return [g.layer_norm(x, name, eps=spec.norm_eps, groups=n) for x, name, n in zip(qk, names, heads, strict=True)]


def lengths_of_heads(g: Graph, spec: DecoderSpec, qk: Sequence[Value]) -> list[Value]:
    """Normalize all heads of q and k to the same length, without weights."""
    return [g.rms_norm(x, None, eps=spec.norm_eps, groups=x.width // spec.head_dim) for x in qk]


def turned(g: Graph, spec: DecoderSpec, rope: Rope | None, *heads: Value) -> list[Value]:
    """Rotate queries and keys by their position."""
    if rope is None:
        return list(heads)
    return [g.rope(x, head_dim=spec.head_dim, inv_freq=rope.inv_freq, scale=rope.scale) for x in heads]


def attention(
    g: Graph,
    spec: DecoderSpec,
    qkv: tuple[Value, Value, Value],
    layer: int,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    alibi_slopes: tuple[float, ...] = (),
    sinks: str | None = None,
    chunked: bool = False,
    bidirectional: bool = False,
) -> Value:
    """Attention over the layer's window. `scale` None: 1 / sqrt(head_dim)."""
    q, k, v = qkv
    return g.attention(
        q,
        k,
        v,
        layer=spec.cache_layer(layer),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5 if scale is None else scale,
        window=spec.window(layer),
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        chunked=chunked and spec.window(layer) > 0,
        bidirectional=bidirectional,
    )


def output(g: Graph, spec: DecoderSpec, x: Value, layer: int, *, bias: bool = False) -> Value:
    name = f"layers.{layer}.attn.output"
    return g.linear(x, name, spec.hidden_size, bias=f"{name}.bias" if bias else None)


def plain_mlp(g: Graph, spec: DecoderSpec, x: Value, layer: int, *, activation: str, bias: bool = False) -> Value:
    name = f"layers.{layer}.mlp"
    y = g.linear(x, f"{name}.up", spec.intermediate_size, bias=f"{name}.up.bias" if bias else None)
    y = g.activation(y, activation=activation)
    return g.linear(y, f"{name}.down", spec.hidden_size, bias=f"{name}.down.bias" if bias else None)


def gated_mlp(
    g: Graph, spec: DecoderSpec, x: Value, layer: int, *, activation: str = "silu", bias: bool = False
) -> Value:
    name = f"layers.{layer}.mlp"
    joined = g.linear(x, f"{name}.gate_up", 2 * spec.intermediate_size, bias=f"{name}.gate_up.bias" if bias else None)
    y = g.gated_activation(joined, activation=activation)
    return g.linear(y, f"{name}.down", spec.hidden_size, bias=f"{name}.down.bias" if bias else None)
