"""Short convolutions, which replace attention: each column over the last few tokens, between two gates."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.models import blocks, weights
from llmserve.models.graph import Graph, Value
from llmserve.models.spec import DecoderSpec, Param, Shard


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    taps: int
    bias: bool

    def params(self, spec: DecoderSpec, layer: int) -> list[Param]:
        source, name, width = f"{weights.layer_source(layer)}.conv", f"layers.{layer}.attn", spec.hidden_size
        convolution = Param(f"{name}.conv", (width, self.taps), (f"{source}.conv.weight",), ((width, 1, self.taps),))
        bias = [weights.copied(f"{name}.conv.bias", f"{source}.conv.bias", (width,))] if self.bias else []
        return [
            *weights.linear(f"{name}.input", {f"{source}.in_proj": 3 * width}, width, Shard.NONE, bias=self.bias),
            convolution,
            *bias,
            *weights.linear(f"{name}.output", {f"{source}.out_proj": width}, width, Shard.NONE, bias=self.bias),
        ]

    def mix(self, g: Graph, spec: DecoderSpec, x: Value, layer: int) -> Value:
        name, width = f"layers.{layer}.attn", spec.hidden_size
        joined = g.linear(x, f"{name}.input", 3 * width, bias=f"{name}.input.bias" if self.bias else None)
        before, after, y = (g.slice(joined, part * width, width) for part in range(3))
        bias = f"{name}.conv.bias" if self.bias else None
        y = g.convolution(g.multiply(before, y), f"{name}.conv", taps=self.taps, bias=bias)
        return blocks.output(g, spec, g.multiply(after, y), layer, bias=self.bias)
