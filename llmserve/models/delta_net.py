"""Gated delta nets, which replace attention: each head has a matrix that every token updates.

A short convolution precedes it. Both keep a state of constant size for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmserve.models import blocks, weights
from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.graph import Graph, Value
from llmserve.models.spec import DecoderSpec, Param, Shard, Shares
from llmserve.models.windows import FULL

LINEAR = "linear_attention"
DEFAULTS = {  # transformers' defaults
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeltaNet:
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    taps: int  # length of the convolution
    joined: bool  # the checkpoint has joint tensors of q, k, v and gates, grouped by key head

    @property
    def value_width(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def width(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    def params(self, spec: DecoderSpec, layer: int) -> list[Param]:
        """The projections to gates are not quantized: they are small, and an error affects all later tokens."""
        source, name = f"{weights.layer_source(layer)}.linear_attn", f"layers.{layer}.attn"
        heads, taps, rows = (self.num_heads,), self.taps, {f"{source}.out_proj": spec.hidden_size}
        return [
            *self._projections(spec, source, name),
            Param(f"{name}.conv", (self.width, taps), (f"{source}.conv1d.weight",), ((self.width, 1, taps),)),
            Param(f"{name}.decay", heads, (f"{source}.A_log",), (heads,), is_exact=True),
            Param(f"{name}.decay_bias", heads, (f"{source}.dt_bias",), (heads,), is_exact=True),
            weights.copied(f"{name}.head_norm", f"{source}.norm.weight", (self.value_dim,)),
            *weights.linear(f"{name}.output", rows, self.value_width, Shard.COLUMNS, bias=False),
        ]

    def _projections(self, spec: DecoderSpec, source: str, name: str) -> list[Param]:
        served = self.num_heads // self.num_key_heads
        if self.joined:
            rows, gate_rows = {"in_proj_qkvz": self.width + self.value_width}, {"in_proj_ba": 2 * self.num_heads}
        else:
            rows = {"in_proj_qkv": self.width, "in_proj_z": self.value_width}
            gate_rows = {"in_proj_b": self.num_heads, "in_proj_a": self.num_heads}
        found = []
        values = served * self.value_dim
        sizes = {"qkvz": (self.key_dim, self.key_dim, values, values), "gates": (served, served)}
        for part, modules in {"qkvz": rows, "gates": gate_rows}.items():
            named = {f"{source}.{module}": count for module, count in modules.items()}
            [matrix] = weights.linear(f"{name}.{part}", named, spec.hidden_size, Shard.NONE, bias=False)
            orders = (Shares(sizes[part]),) if self.joined else ()
            found.append(replace(matrix, orders=orders, quantizable=part == "qkvz"))
        return found

    def mix(self, g: Graph, spec: DecoderSpec, x: Value, layer: int) -> Value:
        name = f"layers.{layer}.attn"
        joined = g.linear(x, f"{name}.qkvz", self.width + self.value_width)
        gates = g.linear(x, f"{name}.gates", 2 * self.num_heads)
        qkv = g.convolution(g.slice(joined, 0, self.width), f"{name}.conv", taps=self.taps, silu=True)
        y = g.delta_rule(
            qkv, gates, f"{name}.decay", f"{name}.decay_bias", num_heads=self.num_heads,
            num_key_heads=self.num_key_heads, key_dim=self.key_dim,
        )  # fmt: skip
        y = g.rms_norm(y, f"{name}.head_norm", eps=spec.norm_eps, groups=self.num_heads)
        y = g.sigmoid_gate(y, g.slice(joined, self.width, self.value_width), silu=True)
        return blocks.output(g, spec, y, layer)


def read_delta_net(reader: ConfigReader, *, joined: bool) -> DeltaNet:
    """The reader's config must include `DEFAULTS`."""
    num_heads = reader.integer("linear_num_value_heads", maximum=MAX_COUNT)
    num_key_heads = reader.integer("linear_num_key_heads", maximum=MAX_COUNT)
    if num_heads % num_key_heads:
        reader.problems.append(
            f"linear_num_value_heads ({num_heads}) must be a multiple of linear_num_key_heads ({num_key_heads})"
        )
    return DeltaNet(
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=reader.integer("linear_key_head_dim", maximum=MAX_COUNT),
        value_dim=reader.integer("linear_value_head_dim", maximum=MAX_COUNT),
        taps=reader.integer("linear_conv_kernel_dim", minimum=2, maximum=MAX_COUNT),
        joined=joined,
    )


def read_stateful_layers(reader: ConfigReader, num_layers: int) -> Sequence[int]:
    """Stateful layers: from `layer_types`, else all except every `full_attention_interval`th."""
    interval = reader.integer("full_attention_interval", 4)
    types = reader.get("layer_types", [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)])
    return stateful_layers(reader, types, num_layers)


def stateful_layers(reader: ConfigReader, types: object, num_layers: int, *, stateful: str = LINEAR) -> Sequence[int]:
    """The layers with the type `stateful`; the others have attention."""
    if not isinstance(types, list) or len(types) != num_layers:
        reader.problems.append(f"layer_types must be a list of num_hidden_layers ({num_layers}) names, got {types!r}")
        return ()
    if unknown := sorted({repr(kind) for kind in types if kind not in (FULL, stateful)}):
        reader.problems.append(f"layer types {', '.join(unknown)} are not supported; supported: {FULL!r}, {stateful!r}")
    elif FULL not in types:
        reader.problems.append(f"layer_types must have a layer of {FULL}")
    return tuple(layer for layer, kind in enumerate(types) if kind == stateful)
