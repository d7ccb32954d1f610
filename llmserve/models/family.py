"""Llama, and what its descendants changed about it: fields of a spec, so that most families only read a config.

`params` and `forward` follow from the fields. A family whose layers have another shape has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from llmserve.models import blocks, experts, weights
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.experts import Mixture
from llmserve.models.graph import Graph, Value
from llmserve.models.latent import LatentAttention
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import (
    Architecture,
    DecoderSpec,
    HeadGroups,
    HfConfig,
    Mixer,
    Param,
    PositionScale,
    Rope,
    renamed,
    replacing,
)

# transformers' names of what we have
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# of an MLP without a gate
PLAIN_ACTIVATIONS = {key: ours for key, ours in ACTIVATIONS.items() if ours != "silu"} | {"relu2": "relu2"}


@dataclass(frozen=True, slots=True)
class Norms:
    """Of a layer, by their modules in the checkpoint. Empty: there is none."""

    attention: str = "input_layernorm"
    after_attention: str = ""
    mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


class HeadNorm(Enum):
    """How queries and keys are normed."""

    NONE = "none"
    HEADS = "heads"  # each head by itself
    WHOLE = "whole"  # all heads of a token together
    TURNED_HEADS = "turned heads"  # each head, after the rotary embedding
    OWN = "own"  # each head by a layer norm of its own
    OWN_ROWS = "own rows"  # the same, of which a tensor has those of all heads
    LENGTH = "length"  # each head that was turned, without a weight


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec(DecoderSpec):
    """The defaults are Llama's."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: str = ""  # the module that has q, k and v, where there is one
    fused_mlp: str = ""  # the same of gate and up
    mlp_module: str = "mlp"  # in a layer
    mlp_down: str = "down_proj"  # in that
    plain_mlp: str = ""  # in that, the module before the activation of an MLP without a gate
    is_parallel: bool = False  # attention and MLP read one norm's output, or their own's, and are added together
    activation: str = "silu"
    norms: Norms = Norms()
    layer_norm: bool = False  # norms take the mean off
    norm_bias: bool = False
    norm_weights: bool = True
    norm_offset: float = 0.0  # added to the weights of every norm
    head_norm: HeadNorm = HeadNorm.NONE
    head_norm_modules: tuple[str, str] = ("q_norm", "k_norm")
    chunked: bool = False  # windows are stretches of positions that do not see each other
    local_rope: Rope | None = None  # of layers with a window, where they have another
    ropes: Sequence[Rope | None] = ()  # of each layer, instead of these
    unturned: Collection[int] = ()  # layers without a rotary embedding
    interleaved: bool = False  # elements 2i and 2i + 1 of a head turn together, not i and i + R/2
    embed_scale: float = 1.0
    attention_scale: float | None = None  # None: one over the root of the head size
    attention_soft_cap: float = 0.0  # 0: none
    position_scale: PositionScale | None = None  # of queries
    alibi_slopes: tuple[float, ...] = ()  # one for each head
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0  # 0: none
    head_bias: bool = False
    normalized_head: bool = False  # the rows of the head are divided by their L2 norm
    bidirectional: bool = False  # tokens read those behind them, too; only where a text is pooled
    sinks: bool = False  # each head has a score for a position without a value
    gated_heads: bool = False  # what a head gives is multiplied with a sigmoid, of numbers beside its query
    gate_module: str = ""  # that has these numbers; empty: they are in q_proj
    mixer: Mixer | None = None  # of the layers with a state
    has_both: bool = False  # every layer has the mixer beside its attention
    lone_mlps: Collection[int] | None = None  # layers that are an MLP; the others have none. None: all have one
    mixture: Mixture | None = None
    latent: LatentAttention | None = None  # of every layer

    @property
    def uncached_layers(self) -> Collection[int]:
        return (*self.stateful_layers, *(self.lone_mlps or ()))

    def has_mlp(self, layer: int) -> bool:
        return self.lone_mlps is None or layer in self.lone_mlps

    def has_attention(self, layer: int) -> bool:
        """Or a mixer."""
        return self.lone_mlps is None or layer not in self.lone_mlps

    def rope_of(self, layer: int) -> Rope | None:
        if self.ropes:
            return self.ropes[layer]
        if layer in self.unturned:
            return None
        return self.local_rope if self.local_rope and self.window(layer) else self.rope


def read_family(
    reader: ConfigReader,
    architecture: str,
    *,
    partial: bool = False,
    eps_key: str = "rms_norm_eps",
    plain_mlp: str = "",
) -> FamilySpec:
    """What a config says of any of them. `partial`: a part of each head may be turned. `plain_mlp`: as in the spec."""
    positions = scaled_positions(reader)
    spec = read_decoder(reader, architecture, max_positions=positions, eps_key=eps_key, bidirectional=True)
    known = PLAIN_ACTIVATIONS if plain_mlp else ACTIVATIONS
    reader.expect("hidden_act", *known)
    activation = known.get(str(reader.get("hidden_act", "silu")), next(iter(known)))
    rope = read_rope(reader, spec.head_dim, partial=partial)
    bidirectional = not reader.flag("is_causal", True)
    return FamilySpec.extending(
        replace(spec, rope=rope), activation=activation, plain_mlp=plain_mlp, bidirectional=bidirectional
    )


Spec = TypeVar("Spec", bound=FamilySpec)


def family(
    name: str,
    model_type: str,
    from_hf: Callable[[HfConfig], Spec],
    *,
    other_names: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> Architecture[Spec]:
    names, unwanted = (name, *other_names), (STORED_FREQUENCIES, *ignored)
    return Architecture(names, model_type, from_hf, params, forward, ignored=unwanted)


def renamed_params(spec: FamilySpec, names: Mapping[str, str]) -> list[Param]:
    """`params` of a checkpoint with other names, `names`: what each of ours is there."""
    published = replacing(names)
    return [renamed(param, published) for param in params(spec)]


def grouped_params(spec: FamilySpec, names: Mapping[str, str]) -> list[Param]:
    """Likewise, with q, k and v in one tensor: a group of heads after another."""
    groups = HeadGroups(spec.head_dim, spec.num_kv_heads)
    return [
        replace(param, orders=(groups,) if ".attn.qkv" in param.name else ()) for param in renamed_params(spec, names)
    ]


def params(spec: FamilySpec) -> list[Param]:
    def layer(i: int) -> list[Param]:
        name, source, norms = f"layers.{i}", weights.layer_source(i), spec.norms

        def norm(place: str, module: str) -> list[Param]:
            if not module or not spec.norm_weights:
                return []
            return weights.norm(spec, f"{name}.{place}", f"{source}.{module}", bias=spec.norm_bias)

        found: list[Param] = []
        if spec.has_attention(i):
            found += [*norm("attn.norm", norms.attention), *_attention_params(spec, i)]
            found += norm("attn.post_norm", norms.after_attention)
        if spec.has_mlp(i):
            found += [*norm("mlp.norm", norms.mlp), *_mlp_params(spec, i), *norm("mlp.post_norm", norms.after_mlp)]
        return found

    found = weights.decoder(
        spec, layer, normalized_head=spec.normalized_head, head_bias=spec.head_bias, norm_bias=spec.norm_bias,
        norm_weights=spec.norm_weights,
    )  # fmt: skip
    return [*found, weights.score(spec)] if spec.pooling and spec.pooling.scores else found


def forward(g: Graph, spec: FamilySpec) -> None:
    layers_and_head(g, spec, g.embed("embed", spec.hidden_size, scale=spec.embed_scale))


def layers_and_head(g: Graph, spec: FamilySpec, x: Value) -> None:
    """All that becomes of `x`, which the first layer reads."""

    def norm(x: Value, name: str, module: str) -> Value:
        if not module:
            return x
        if not spec.norm_weights:
            return (g.layer_norm if spec.layer_norm else g.rms_norm)(x, None, eps=spec.norm_eps)
        if spec.layer_norm:
            return blocks.layer_norm(g, spec, x, name, offset=spec.norm_offset, bias=spec.norm_bias)
        return blocks.norm(g, spec, x, name, offset=spec.norm_offset)

    norms = spec.norms
    for layer in range(spec.num_layers):
        name, before, normed = f"layers.{layer}", x, x
        if spec.has_attention(layer):
            normed = norm(x, f"{name}.attn.norm", norms.attention)
            y = _attention(g, spec, normed, layer)
            x = g.add(x, norm(y, f"{name}.attn.post_norm", norms.after_attention))
        if not spec.has_mlp(layer):
            continue
        beside = before if norms.mlp else normed
        y = _mlp(g, spec, norm(beside if spec.is_parallel else x, f"{name}.mlp.norm", norms.mlp), layer)
        x = g.add(x, norm(y, f"{name}.mlp.post_norm", norms.after_mlp))
    last = norm(g.select_rows(x), "norm", "norm")
    bias = "head.bias" if spec.head_bias else None
    g.logits(last, "head", bias=bias, scale=spec.logit_scale, soft_cap=spec.logit_soft_cap)


def _rotary_dim(spec: FamilySpec, layer: int) -> int:
    rope = spec.rope_of(layer)
    return 2 * len(rope.inv_freq) if rope and spec.interleaved else 0


def _attention_params(spec: FamilySpec, layer: int) -> list[Param]:
    if spec.mixer is not None and layer in spec.stateful_layers:
        return spec.mixer.params(spec, layer)
    if spec.latent is not None:
        return spec.latent.params(spec, layer)
    sinks = f"{weights.layer_source(layer)}.self_attn.sinks"
    return [
        *weights.qkv(
            spec, layer, fused=spec.fused_qkv, bias=spec.qkv_bias, rotary_dim=_rotary_dim(spec, layer),
            gated=spec.gated_heads, gate=spec.gate_module,
        ),
        *_head_norm_params(spec, layer),
        *([weights.copied(f"layers.{layer}.attn.sinks", sinks, (spec.num_heads,))] if spec.sinks else ()),
        *weights.output(spec, layer, bias=spec.output_bias),
        *(spec.mixer.params(spec, layer) if spec.mixer and spec.has_both else ()),
    ]  # fmt: skip


def _head_norm_params(spec: FamilySpec, layer: int) -> list[Param]:
    if spec.head_norm in (HeadNorm.NONE, HeadNorm.LENGTH):
        return []
    if spec.head_norm is HeadNorm.OWN:
        return weights.norms_of_heads(spec, layer, spec.head_norm_modules)
    if spec.head_norm is HeadNorm.OWN_ROWS:
        return weights.norm_rows_of_heads(spec, layer, spec.head_norm_modules, rotary_dim=_rotary_dim(spec, layer))
    is_whole = spec.head_norm is HeadNorm.WHOLE
    widths = (spec.q_width, spec.kv_width) if is_whole else (spec.head_dim, spec.head_dim)
    return weights.head_norms(layer, spec.head_norm_modules, widths)


def _mlp_params(spec: FamilySpec, layer: int) -> list[Param]:
    if spec.mixture is not None and layer not in spec.mixture.dense_layers:
        return experts.params(spec, spec.mixture, layer)
    if spec.plain_mlp:
        return weights.plain_mlp(
            spec, layer, module=spec.mlp_module, up=spec.plain_mlp, down=spec.mlp_down, bias=spec.mlp_bias
        )
    return weights.gated_mlp(
        spec, layer, module=spec.mlp_module, fused=spec.fused_mlp, down=spec.mlp_down, bias=spec.mlp_bias
    )


def _attention(g: Graph, spec: FamilySpec, x: Value, layer: int) -> Value:
    if spec.mixer is not None and layer in spec.stateful_layers:
        return spec.mixer.mix(g, spec, x, layer)
    if spec.latent is not None:
        return spec.latent.attend(g, spec, x, layer)
    q, k, v, *gates = blocks.qkv(g, spec, x, layer, bias=spec.qkv_bias, gated=spec.gated_heads)
    rope, grown = spec.rope_of(layer), spec.position_scale
    if grown is not None and (grown.layers is None or layer in grown.layers):
        q = g.scale_by_position(q, strength=grown.strength, interval=grown.interval, shift=grown.shift)
    if spec.head_norm is HeadNorm.TURNED_HEADS:
        q, k = blocks.head_norms(g, spec, blocks.turned(g, spec, rope, q, k), layer)
    else:
        if spec.head_norm in (HeadNorm.OWN, HeadNorm.OWN_ROWS):
            q, k = blocks.norms_of_heads(g, spec, (q, k), layer)
        elif spec.head_norm not in (HeadNorm.NONE, HeadNorm.LENGTH):
            is_whole = spec.head_norm is HeadNorm.WHOLE
            q, k = blocks.head_norms(g, spec, (q, k), layer, offset=spec.norm_offset, is_whole=is_whole)
        q, k = blocks.turned(g, spec, rope, q, k)
        if spec.head_norm is HeadNorm.LENGTH and rope is not None:
            q, k = blocks.lengths_of_heads(g, spec, (q, k))
    y = blocks.attention(
        g, spec, (q, k, v), layer, scale=spec.attention_scale, soft_cap=spec.attention_soft_cap,
        alibi_slopes=spec.alibi_slopes, sinks=f"layers.{layer}.attn.sinks" if spec.sinks else None,
        chunked=spec.chunked, bidirectional=spec.bidirectional,
    )  # fmt: skip
    for gate in gates:
        y = g.sigmoid_gate(y, gate)
    y = blocks.output(g, spec, y, layer, bias=spec.output_bias)
    return g.add(spec.mixer.mix(g, spec, x, layer), y) if spec.mixer and spec.has_both else y


def _mlp(g: Graph, spec: FamilySpec, x: Value, layer: int) -> Value:
    if spec.mixture is not None and layer not in spec.mixture.dense_layers:
        return experts.mixture_of_experts(g, spec, spec.mixture, x, layer, activation=spec.activation)
    mlp = blocks.plain_mlp if spec.plain_mlp else blocks.gated_mlp
    return mlp(g, spec, x, layer, activation=spec.activation, bias=spec.mlp_bias)
