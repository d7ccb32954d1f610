"""Llama and its descendants: their differences are fields of a spec, so most families only read a config.

`params` and `forward` follow from the fields. A family with other layers has its own functions.
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

# by transformers' names
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# for MLPs without a gate
PLAIN_ACTIVATIONS = {key: ours for key, ours in ACTIVATIONS.items() if ours != "silu"} | {"relu2": "relu2"}


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a layer, by module name in the checkpoint. Empty: no such norm."""

    attention: str = "input_layernorm"
    after_attention: str = ""
    mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


class HeadNorm(Enum):
    """How queries and keys are normalized."""

    NONE = "none"
    HEADS = "heads"  # each head separately
    WHOLE = "whole"  # all heads of a token together
    TURNED_HEADS = "turned heads"  # each head, after the rotary embedding
    OWN = "own"  # each head with its own layer norm
    OWN_ROWS = "own rows"  # the same, with the weights of all heads in one tensor
    LENGTH = "length"  # each head after the rotary embedding, without weights


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec(DecoderSpec):
    """A Llama-like decoder. The defaults are Llama's."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: str = ""  # the module with q, k and v together; empty: one module each
    fused_mlp: str = ""  # the module with gate and up together; empty: one module each
    mlp_module: str = "mlp"  # the MLP's module in a layer
    mlp_down: str = "down_proj"  # the down projection in the MLP's module
    plain_mlp: str = ""  # the first layer of an MLP without a gate, in its module; empty: gated
    is_parallel: bool = False  # attention and MLP both read the layer's input, through one norm or one each
    activation: str = "silu"
    norms: Norms = Norms()
    layer_norm: bool = False  # norms subtract the mean
    norm_bias: bool = False
    norm_weights: bool = True
    norm_offset: float = 0.0  # added to the weights of every norm
    head_norm: HeadNorm = HeadNorm.NONE
    head_norm_modules: tuple[str, str] = ("q_norm", "k_norm")
    chunked: bool = False  # windows are chunks of positions, without attention between chunks
    local_rope: Rope | None = None  # of layers with a window, if it differs
    ropes: Sequence[Rope | None] = ()  # one for each layer; replaces `rope` and `local_rope`
    unturned: Collection[int] = ()  # layers without a rotary embedding
    interleaved: bool = False  # rotates elements 2i and 2i + 1 of a head together, not i and i + R/2
    embed_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_soft_cap: float = 0.0  # 0: none
    position_scale: PositionScale | None = None  # of queries
    alibi_slopes: tuple[float, ...] = ()  # one for each head
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0  # 0: none
    head_bias: bool = False
    normalized_head: bool = False  # the rows of the head are divided by their L2 norm
    bidirectional: bool = False  # tokens also attend to later ones; only in networks that pool
    sinks: bool = False  # each head has a learned score for a position without a value
    gated_heads: bool = False  # a head's output is multiplied by the sigmoid of its gate
    gate_module: str = ""  # computes the gates; empty: q_proj does
    mixer: Mixer | None = None  # of layers with a state
    has_both: bool = False  # every layer has both the mixer and attention
    lone_mlps: Collection[int] | None = None  # layers with only an MLP; the others have none. None: all have one
    mixture: Mixture | None = None
    latent: LatentAttention | None = None  # of every layer

    @property
    def uncached_layers(self) -> Collection[int]:
        return (*self.stateful_layers, *(self.lone_mlps or ()))

    def has_mlp(self, layer: int) -> bool:
        return self.lone_mlps is None or layer in self.lone_mlps

    def has_attention(self, layer: int) -> bool:
        """Whether the layer has attention or a mixer."""
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
    """Read the keys that families share. `partial`: a part of each head may be rotated. `plain_mlp`: as in the spec."""
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
    """`params` for a checkpoint with other tensor names. `names`: parts of Llama's names to the checkpoint's."""
    published = replacing(names)
    return [renamed(param, published) for param in params(spec)]


def grouped_params(spec: FamilySpec, names: Mapping[str, str]) -> list[Param]:
    """`renamed_params` with q, k and v in one tensor, grouped by key/value head."""
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
    """Record all layers and the head. `x`: the input of the first layer."""

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
