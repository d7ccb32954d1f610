"""Mamba2, which replaces attention: each head has a matrix that every token decays and adds to.

A short convolution precedes it, and a gate follows. Convolution and matrices keep a state of constant size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from llmserve.models import weights
from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.graph import Graph, Value
from llmserve.models.spec import DecoderSpec, Param, Shard

KEYS = {  # config keys by meaning
    "num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "num_groups": "mamba_n_groups",
    "state_size": "mamba_d_state", "taps": "mamba_d_conv", "conv_bias": "mamba_conv_bias", "bias": "mamba_proj_bias",
    "activation": "hidden_act",
}  # fmt: skip
DEFAULTS = {  # transformers' defaults
    "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_expand": 2,
}  # fmt: skip
NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # of steps; transformers 5 writes the second


class GateNorm(Enum):
    """The norm of the scan's output."""

    NONE = "none"
    GATED = "gated"  # after the gate
    PLAIN = "plain"  # before it


@dataclass(frozen=True, slots=True)
class Mamba:
    num_heads: int
    head_dim: int
    num_groups: int  # groups of heads that share b and c of the scan
    state_size: int
    taps: int  # length of the convolution
    conv_bias: bool
    input_bias: bool
    output_bias: bool
    norm_eps: float
    norm: GateNorm = GateNorm.GATED
    module: str = "mamba"  # in a layer

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        """Width of the convolution's input."""
        return self.inner + 2 * self.num_groups * self.state_size

    def params(self, spec: DecoderSpec, layer: int) -> list[Param]:
        source, name = f"{weights.layer_source(layer)}.{self.module}", f"layers.{layer}.mamba"
        heads, hidden = (self.num_heads,), spec.hidden_size
        rows = {f"{source}.in_proj": self.inner + self.width + self.num_heads}
        convolved = Param(
            f"{name}.conv", (self.width, self.taps), (f"{source}.conv1d.weight",), ((self.width, 1, self.taps),)
        )
        of_heads = {"decay": "A_log", "step_bias": "dt_bias", "skip": "D"}
        return [
            *weights.linear(f"{name}.input", rows, hidden, Shard.NONE, bias=self.input_bias),
            convolved,
            *self._vector(f"{name}.conv.bias", f"{source}.conv1d.bias", self.width, self.conv_bias),
            *(
                Param(f"{name}.{part}", heads, (f"{source}.{tensor}",), (heads,), is_exact=True)
                for part, tensor in of_heads.items()
            ),
            *self._vector(f"{name}.norm", f"{source}.norm.weight", self.inner, self.norm is not GateNorm.NONE),
            *weights.linear(
                f"{name}.output", {f"{source}.out_proj": hidden}, self.inner, Shard.COLUMNS, bias=self.output_bias
            ),
        ]

    @staticmethod
    def _vector(name: str, source: str, width: int, exists: bool) -> list[Param]:
        return [weights.copied(name, source, (width,))] if exists else []

    def mix(self, g: Graph, spec: DecoderSpec, x: Value, layer: int) -> Value:
        name = f"layers.{layer}.mamba"

        def linear(x: Value, part: str, width: int, bias: bool) -> Value:
            return g.linear(x, f"{name}.{part}", width, bias=f"{name}.{part}.bias" if bias else None)

        joined = linear(x, "input", self.inner + self.width + self.num_heads, self.input_bias)
        gate, xbc = g.slice(joined, 0, self.inner), g.slice(joined, self.inner, self.width)
        bias = f"{name}.conv.bias" if self.conv_bias else None
        y = g.selective_scan(
            g.convolution(xbc, f"{name}.conv", taps=self.taps, bias=bias, silu=True),
            g.slice(joined, self.inner + self.width, self.num_heads),
            (f"{name}.decay", f"{name}.step_bias", f"{name}.skip"),
            num_heads=self.num_heads, num_groups=self.num_groups, state_size=self.state_size,
        )  # fmt: skip
        y = self._normed(g, y, name) if self.norm is GateNorm.PLAIN else y
        y = g.sigmoid_gate(y, gate, silu=True)
        y = self._normed(g, y, name) if self.norm is GateNorm.GATED else y
        return linear(y, "output", spec.hidden_size, self.output_bias)

    def _normed(self, g: Graph, y: Value, name: str) -> Value:
        return g.rms_norm(y, f"{name}.norm", eps=self.norm_eps, groups=self.num_groups, own_weights=True)


def read_mamba(reader: ConfigReader, norm_eps: float, *, inner: int | None, keys: Mapping[str, str] = KEYS) -> Mamba:
    """`inner`: the total width that all heads must have; None: any."""
    num_heads = reader.integer(keys["num_heads"], maximum=MAX_COUNT)
    if reader.get(keys["head_dim"]) == "auto":
        head_dim = (inner or 0) // num_heads
    else:
        head_dim = reader.integer(keys["head_dim"], maximum=MAX_COUNT)
    if inner not in (None, num_heads * head_dim):
        reader.problems.append(
            f"{keys['num_heads']} ({num_heads}) times {keys['head_dim']} ({head_dim}) must be the inner width, {inner}"
        )
    num_groups = reader.integer(keys["num_groups"], maximum=MAX_COUNT)
    if num_heads % num_groups:
        reader.problems.append(
            f"{keys['num_heads']} ({num_heads}) must be a multiple of {keys['num_groups']} ({num_groups})"
        )
    reader.expect("time_step_limit", *NO_LIMITS)
    reader.expect(keys["activation"], "silu", "swish")
    bias = reader.flag(keys["bias"])
    return Mamba(
        num_heads=num_heads,
        head_dim=max(1, head_dim),
        num_groups=num_groups,
        state_size=reader.integer(keys["state_size"], maximum=MAX_COUNT),
        taps=reader.integer(keys["taps"], minimum=2, maximum=MAX_COUNT),
        conv_bias=reader.flag(keys["conv_bias"]),
        input_bias=bias,
        output_bias=bias,
        norm_eps=norm_eps,
    )
