"""Gemma 4, text only: layers with a window and layers with full attention have heads of different sizes.

The last layers read keys and values of earlier ones. Small models have an embedding for each layer, an additional input
of that layer. A large one has a mixture of experts parallel to the MLP. Norms multiply by weight, not by 1 + weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmserve.models import blocks, weights
from llmserve.models.config import MAX_COUNT, ConfigReader, read_decoder
from llmserve.models.family import ACTIVATIONS
from llmserve.models.graph import CacheShape, Graph, Value
from llmserve.models.rope import read_rope
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig, Param, Rope, Shard
from llmserve.models.windows import FULL, SLIDING, windows_by_type

DEFAULTS = {  # transformers' defaults
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 512,
    "global_head_dim": 512, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
}  # fmt: skip
PATTERN = 6  # by default, every sixth layer has full attention
ROPES: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
ROOT_HALF = 2.0**-0.5  # factor for the sum of two inputs of a layer
BORROWED = (r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight",)  # of borrowing layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Spec(DecoderSpec):
    activation: str
    full_head_dim: int  # of layers without a window
    full_kv_heads: int
    full_rope: Rope
    num_borrowers: int  # number of last layers, which read keys and values of earlier ones
    keys_are_values: bool  # in layers without a window, values are the keys before their norm
    per_layer_size: int  # width of the embedding for each layer; 0: none
    wide_borrowers: bool  # the borrowers' MLPs are twice as wide
    num_experts: int  # 0: none
    experts_per_token: int
    expert_size: int
    logit_soft_cap: float

    @property
    def first_borrower(self) -> int:
        return self.num_layers - self.num_borrowers

    @property
    def uncached_layers(self) -> Collection[int]:
        return range(self.first_borrower, self.num_layers)

    @property
    def cache_shape(self) -> CacheShape:
        layers = (self.of_layer(i) for i in range(self.first_borrower))
        largest = max(layers, key=lambda spec: (spec.kv_width, spec.head_dim))
        return CacheShape(self.first_borrower, largest.num_kv_heads, largest.head_dim)

    def lender(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads: itself, or the last layer of its type that computes them."""
        if layer < self.first_borrower:
            return layer
        is_full = not self.window(layer)
        return max(i for i in range(self.first_borrower) if (not self.window(i)) == is_full)

    def of_layer(self, layer: int) -> Gemma4Spec:
        """The spec with the sizes of `layer`."""
        wide = self.wide_borrowers and layer >= self.first_borrower
        found = replace(self, intermediate_size=self.intermediate_size * (1 + wide))
        if self.window(layer):
            return found
        return replace(found, head_dim=self.full_head_dim, num_kv_heads=self.full_kv_heads, rope=self.full_rope)


def from_hf(config: HfConfig) -> Gemma4Spec:
    given = DEFAULTS | {key: value for key, value in config.items() if value is not None}
    reader = ConfigReader(given | {"per_layer_config": None})
    sizes = read_decoder(reader, "Gemma4ForCausalLM")
    reader.expect("hidden_activation", *(key for key, ours in ACTIVATIONS.items() if ours != "silu"))
    reader.expect("attention_bias", False)
    reader.expect("rope_scaling", {})  # transformers does not read it here either
    reader.expect("use_bidirectional_attention", None, "vision")  # for images only
    types = _layer_types(reader, sizes.num_layers)
    windows = windows_by_type(reader, types, sizes.num_layers, reader.integer("sliding_window"))
    equal, (full_dim, full_kv_heads) = reader.flag("attention_k_eq_v"), _read_full_heads(reader, given, types, sizes)
    per_layer = reader.integer("hidden_size_per_layer_input", minimum=0, maximum=MAX_COUNT)
    if per_layer and reader.get("vocab_size_per_layer_input") != sizes.vocab_size:
        reader.problems.append("vocab_size_per_layer_input must be vocab_size")
    own = {
        "full_head_dim": full_dim, "full_kv_heads": full_kv_heads, "full_rope": _read_rope(reader, FULL, full_dim),
        "num_borrowers": read_borrowers(reader, types, sizes.num_layers), "keys_are_values": equal,
        "per_layer_size": per_layer, "wide_borrowers": reader.flag("use_double_wide_mlp"),
        "activation": ACTIVATIONS.get(str(reader.get("hidden_activation")), ""),
        "logit_soft_cap": reader.optional_positive("final_logit_softcapping"), **_read_experts(reader),
    }  # fmt: skip
    rope = _read_rope(reader, SLIDING, sizes.head_dim)
    reader.finish()
    return Gemma4Spec.extending(replace(sizes, rope=rope, windows=windows), **own)


def _read_full_heads(reader: ConfigReader, config: HfConfig, types: object, sizes: DecoderSpec) -> tuple[int, int]:
    """Size and number of key/value heads without a window, from the published keys or those of transformers 5."""
    usual = {"head_dim": reader.get("global_head_dim")}
    if reader.flag("attention_k_eq_v"):
        usual["num_key_value_heads"] = reader.get("num_global_key_value_heads", sizes.num_kv_heads)
    full = [str(i) for i, kind in enumerate(types if isinstance(types, list) else ()) if kind == FULL]
    given = config.get("per_layer_config", dict.fromkeys(full, usual))
    of_layers = list(given.values()) if isinstance(given, Mapping) else []
    if not of_layers or {*map(str, given)} != {*full} or any(each != of_layers[0] for each in of_layers):
        reader.problems.append(f"per_layer_config must say the same of each layer of {FULL}, and of no other")
        of_layers = [usual]
    own = ConfigReader(of_layers[0] if isinstance(of_layers[0], Mapping) else {})
    head_dim = own.integer("head_dim", maximum=MAX_COUNT)
    num_kv_heads = own.integer("num_key_value_heads", sizes.num_kv_heads)
    if sizes.num_heads % num_kv_heads:
        own.problems.append(f"{num_kv_heads} key/value heads must divide num_attention_heads ({sizes.num_heads})")
    reader.problems += [f"{FULL}: {problem}" for problem in own.problems]
    return head_dim, num_kv_heads


def _layer_types(reader: ConfigReader, num_layers: int) -> object:
    """Layer types. The last layer always has full attention, whatever the config has."""
    types = reader.get("layer_types", [SLIDING if (i + 1) % PATTERN else FULL for i in range(num_layers)])
    return [*types[:-1], FULL] if isinstance(types, list) and types else types


def read_borrowers(reader: ConfigReader, types: object, num_layers: int) -> int:
    count = reader.integer("num_kv_shared_layers", 0, minimum=0)
    if count and isinstance(types, list) and {*map(str, types[: num_layers - count])} != {*map(str, types)}:
        reader.problems.append(
            f"num_kv_shared_layers ({count}) must leave a layer of each type that has keys and values"
        )
    return min(count, num_layers - 1)


def _read_experts(reader: ConfigReader) -> dict[str, int]:
    if not reader.flag("enable_moe_block"):
        return {"num_experts": 0, "experts_per_token": 0, "expert_size": 0}
    num_experts = reader.integer("num_experts", maximum=MAX_COUNT)
    chosen = reader.integer("top_k_experts", maximum=MAX_COUNT)
    if chosen > num_experts:
        reader.problems.append(f"top_k_experts ({chosen}) must be at most num_experts ({num_experts})")
    return {
        "num_experts": num_experts, "experts_per_token": chosen, "expert_size": reader.integer("moe_intermediate_size"),
    }  # fmt: skip


def _read_rope(reader: ConfigReader, kind: str, head_dim: int) -> Rope:
    """Type `proportional` rotates the first pairs (i, i + head_dim / 2), with the frequencies of whole heads."""
    given = reader.get("rope_parameters", ROPES)
    given = given.get(kind, ROPES[kind]) if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping):
        reader.problems.append(f"rope_parameters must be an object with {FULL} and {SLIDING}, got {given!r}")
        return Rope(())
    values, turned = dict(given), 1.0
    if values.get("rope_type") == "proportional":
        turned = values.pop("partial_rotary_factor", 1.0)
        values["rope_type"] = "linear" if "factor" in values else "default"
    inner = ConfigReader({"rope_scaling": values, "max_position_embeddings": reader.get("max_position_embeddings")})
    rope = read_rope(inner, head_dim)
    if not isinstance(turned, int | float) or not 0 <= turned <= 1:
        inner.problems.append(f"partial_rotary_factor must be a number from 0 to 1, got {turned!r}")
        turned = 1.0
    reader.problems += [f"{kind}: {problem}" for problem in inner.problems]
    count = int(turned * head_dim // 2)
    return replace(rope, inv_freq=rope.inv_freq[:count] + (0.0,) * (len(rope.inv_freq) - count))


def params(spec: Gemma4Spec) -> list[Param]:
    def layer(i: int) -> list[Param]:
        own, name, source = spec.of_layer(i), f"layers.{i}", weights.layer_source(i)

        def norm(place: str, module: str) -> list[Param]:
            return weights.norm(own, f"{name}.{place}", f"{source}.{module}")

        return [
            *norm("attn.norm", "input_layernorm"),
            *attention_params(own, i),
            *norm("attn.post_norm", "post_attention_layernorm"),
            *norm("mlp.norm", "pre_feedforward_layernorm"),
            *weights.gated_mlp(own, i),
            *(_expert_params(own, name, source) if spec.num_experts else ()),
            *norm("mlp.post_norm", "post_feedforward_layernorm"),
            *(per_layer_params(own, name, source) if spec.per_layer_size else ()),
            Param(f"{name}.scale", (1,), (f"{source}.layer_scalar",), ((1,),), is_exact=True),
        ]

    found = weights.decoder(spec, layer)
    return [found[0], *per_layer_tables(spec, spec.vocab_size), *found[1:]] if spec.per_layer_size else found


def per_layer_tables(spec: Gemma4Spec, num_rows: int) -> list[Param]:
    """Parameters of the inputs of all layers: a table with `num_rows` rows, and a projection of the embedding."""
    width = spec.num_layers * spec.per_layer_size
    module, rows = "model.per_layer_model_projection", (spec.per_layer_size,)
    embed = weights.copied("per_layer.embed", "model.embed_tokens_per_layer.weight", (num_rows, width))
    norm = weights.copied("per_layer.norm", "model.per_layer_projection_norm.weight", rows)
    projection = weights.linear("per_layer.projection", {module: width}, spec.hidden_size, Shard.NONE, bias=False)
    return [embed, *projection, replace(norm, factors=((rows[0], ROOT_HALF),))]


def attention_params(own: Gemma4Spec, layer: int) -> list[Param]:
    source, name = f"{weights.layer_source(layer)}.self_attn", f"layers.{layer}.attn"
    borrows = layer >= own.first_borrower
    rows = {"q_proj": own.q_width}
    if not borrows:
        rows |= {"k_proj": own.kv_width} | ({} if _has_one(own, layer) else {"v_proj": own.kv_width})
    named = {f"{source}.{module}": count for module, count in rows.items()}
    return [
        *weights.linear(f"{name}.qkv", named, own.hidden_size, Shard.NONE, bias=False),
        *weights.head_norms(layer, ("q_norm", "k_norm"), (own.head_dim,) * 2)[: 1 if borrows else 2],
        *weights.output(own, layer),
    ]


def _has_one(own: Gemma4Spec, layer: int) -> bool:
    """Whether keys and values have the same projection."""
    return own.keys_are_values and not own.window(layer)


def _expert_params(own: Gemma4Spec, name: str, source: str) -> list[Param]:
    count, hidden, inner = own.num_experts, own.hidden_size, own.expert_size
    sizes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    router_norm = weights.copied(f"{name}.mlp.router_norm", f"{source}.router.scale", (hidden,))
    scales = f"{source}.router.per_expert_scale"
    return [
        *weights.norm(own, f"{name}.mlp.dense_norm", f"{source}.post_feedforward_layernorm_1"),
        replace(router_norm, factors=((hidden, hidden**-0.5),)),
        weights.copied(f"{name}.mlp.router", f"{source}.router.proj.weight", (count, hidden)),
        Param(f"{name}.mlp.expert_scales", (count,), (scales,), ((count,),), is_exact=True),
        *weights.norm(own, f"{name}.mlp.experts_norm", f"{source}.pre_feedforward_layernorm_2"),
        *(
            Param(
                f"{name}.mlp.experts.{part}", (count * rows, columns), (f"{source}.experts.{part}_proj",),
                ((count, rows, columns),), quantizable=True,
            )
            for part, (rows, columns) in sizes.items()
        ),
        *weights.norm(own, f"{name}.mlp.experts_post_norm", f"{source}.post_feedforward_layernorm_2"),
    ]  # fmt: skip


def per_layer_params(own: Gemma4Spec, name: str, source: str) -> list[Param]:
    size, hidden = own.per_layer_size, own.hidden_size
    return [
        *weights.linear(
            f"{name}.per_layer.gate", {f"{source}.per_layer_input_gate": size}, hidden, Shard.NONE, bias=False
        ),
        *weights.linear(
            f"{name}.per_layer.output", {f"{source}.per_layer_projection": hidden}, size, Shard.NONE, bias=False
        ),
        *weights.norm(own, f"{name}.per_layer.norm", f"{source}.post_per_layer_input_norm"),
    ]


def forward(g: Graph, spec: Gemma4Spec) -> None:
    x = g.embed("embed", spec.hidden_size, scale=spec.hidden_size**0.5)
    inputs = per_layer_inputs(g, spec, x) if spec.per_layer_size else None
    kept: dict[int, tuple[Value, Value]] = {}  # keys and values by layer
    for layer in range(spec.num_layers):
        own, name = spec.of_layer(layer), f"layers.{layer}"
        y = attention(g, own, blocks.norm(g, own, x, f"{name}.attn.norm"), layer, kept)
        x = g.add(x, blocks.norm(g, own, y, f"{name}.attn.post_norm"))
        y = blocks.gated_mlp(g, own, blocks.norm(g, own, x, f"{name}.mlp.norm"), layer, activation=own.activation)
        if own.num_experts:
            y = g.add(blocks.norm(g, own, y, f"{name}.mlp.dense_norm"), _experts(g, own, x, f"{name}.mlp"))
        x = g.add(x, blocks.norm(g, own, y, f"{name}.mlp.post_norm"))
        if inputs is not None:
            x = g.add(x, of_layer_input(g, own, x, inputs, layer))
        x = g.scale(x, f"{name}.scale")
    g.logits(blocks.norm(g, spec, g.select_rows(x), "norm"), "head", soft_cap=spec.logit_soft_cap)


def per_layer_inputs(g: Graph, spec: Gemma4Spec, x: Value, *, num_rows: int = 0) -> Value:
    """Inputs of all layers: a row of the table plus a projection of the embedding. The norm's epsilon accounts for the
    projection's factor, one over the root of the hidden size. `num_rows`: size of a table without all tokens."""
    width = spec.num_layers * spec.per_layer_size
    found = g.embed("per_layer.embed", width, scale=spec.per_layer_size**0.5 * ROOT_HALF, rows=num_rows)
    projected = g.linear(x, "per_layer.projection", width)
    eps = spec.norm_eps * spec.hidden_size
    return g.add(g.rms_norm(projected, "per_layer.norm", eps=eps, groups=spec.num_layers), found)


def of_layer_input(g: Graph, own: Gemma4Spec, x: Value, inputs: Value, layer: int) -> Value:
    """The addend for a layer's own input."""
    name = f"layers.{layer}.per_layer"
    y = g.activation(g.linear(x, f"{name}.gate", own.per_layer_size), activation=own.activation)
    y = g.multiply(y, g.slice(inputs, layer * own.per_layer_size, own.per_layer_size))
    return blocks.norm(g, own, g.linear(y, f"{name}.output", own.hidden_size), f"{name}.norm")


def attention(g: Graph, own: Gemma4Spec, x: Value, layer: int, kept: dict[int, tuple[Value, Value]]) -> Value:
    name, lender, rope = f"layers.{layer}.attn", own.lender(layer), own.rope

    def normed(heads: Value, weight: str | None) -> Value:
        return g.rms_norm(heads, weight, eps=own.norm_eps, groups=heads.width // own.head_dim)

    if lender != layer:
        q = g.linear(x, f"{name}.qkv", own.q_width)
    else:
        parts = 1 if _has_one(own, layer) else 2
        joined = g.linear(x, f"{name}.qkv", own.q_width + parts * own.kv_width)
        q, k = g.slice(joined, 0, own.q_width), g.slice(joined, own.q_width, own.kv_width)
        v = normed(g.slice(joined, own.q_width + (parts - 1) * own.kv_width, own.kv_width), None)
        [k] = blocks.turned(g, own, rope, normed(k, f"{name}.k_norm"))
        kept[layer] = k, v
    [q] = blocks.turned(g, own, rope, normed(q, f"{name}.q_norm"))
    y = g.attention(
        q, *kept[lender], layer=own.cache_layer(lender), num_heads=own.num_heads, num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim, scale=1.0, window=own.window(layer),
    )  # fmt: skip
    return blocks.output(g, own, y, layer)


def _experts(g: Graph, own: Gemma4Spec, x: Value, name: str) -> Value:
    logits = g.linear(blocks.norm(g, own, x, f"{name}.router_norm"), f"{name}.router", own.num_experts)
    routes = g.route(
        logits, experts_per_token=own.experts_per_token, renormalize=True, scales=f"{name}.expert_scales"
    )  # fmt: skip
    y = g.experts(
        blocks.norm(g, own, x, f"{name}.experts_norm"), routes, f"{name}.experts.gate_up", f"{name}.experts.down",
        num_experts=own.num_experts, activation=own.activation,
    )  # fmt: skip
    return blocks.norm(g, own, y, f"{name}.experts_post_norm")


ARCHITECTURE: Architecture[Gemma4Spec] = Architecture(
    ("Gemma4ForCausalLM",), "gemma4_text", from_hf, params, forward, ignored=BORROWED
)
