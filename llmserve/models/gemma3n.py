"""Gemma 3n, text only: Gemma 4's layers, but with four streams per token, of which each layer computes one.

AltUp (Baykal et al., 2023): a layer predicts all streams from each other, computes one of them, and corrects all by the
error of that prediction. LAuReL (Menghani et al., 2024) adds a low-rank product to a residual. In the first layers,
only the largest values pass a gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from llmserve.models import blocks, gemma4, weights
from llmserve.models.config import MAX_COUNT, ConfigReader, is_number, read_decoder
from llmserve.models.family import ACTIVATIONS
from llmserve.models.gemma4 import Gemma4Spec
from llmserve.models.graph import Graph, Value
from llmserve.models.rope import read_ropes
from llmserve.models.spec import Architecture, Combine, HfConfig, Param, Shard
from llmserve.models.windows import FULL, SLIDING, windows_by_type

DEFAULTS = {  # transformers' defaults
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 512,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "final_logit_softcapping": 30.0,
    "altup_active_idx": 0, "altup_correct_scale": True, "altup_num_inputs": 4, "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}  # fmt: skip
PATTERN = 5  # by default, every fifth layer has full attention
SPARSE_LAYERS, SPARSITY = 10, 0.95  # defaults, for networks with more layers than this
THETA = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}  # old key, default
# checkpoints have the scale even if their config disables altup_correct_scale
UNREAD = (*gemma4.BORROWED, r"model\.layers\.\d+\.altup\.correct_output_scale")
LEAST_SQUARE = 1e-5  # of a stream that is scaled to another's size


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nSpec(Gemma4Spec):
    num_streams: int
    active: int  # the stream that layers compute
    scales_corrected: bool
    laurel_rank: int
    per_layer_rows: int  # number of tokens with per-layer embeddings; later tokens use the first one's
    mlp_sizes: tuple[int, ...]  # of each layer
    deviations: tuple[float, ...]  # per layer: standard deviations above the mean for a gate value to pass; 0: all pass

    def of_layer(self, layer: int) -> Gemma3nSpec:
        """The spec with the sizes of `layer`."""
        found = replace(self, intermediate_size=self.mlp_sizes[layer])
        return found if self.window(layer) else replace(found, rope=self.full_rope)


def from_hf(config: HfConfig) -> Gemma3nSpec:
    given: dict[str, Any] = DEFAULTS | {key: value for key, value in config.items() if value is not None}
    reader = ConfigReader(given)
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_COUNT)
    mlp_sizes = _of_layers(reader, "intermediate_size", given["intermediate_size"], num_layers)
    sizes = read_decoder(ConfigReader(given | {"intermediate_size": mlp_sizes[0]}), "Gemma3nForCausalLM")
    reader.expect("hidden_activation", *(key for key, ours in ACTIVATIONS.items() if ours != "silu"))
    reader.expect("attention_bias", False)
    types = reader.get("layer_types", [FULL if (i + 1) % PATTERN == 0 else SLIDING for i in range(num_layers)])
    windows = windows_by_type(reader, types, num_layers, reader.integer("sliding_window"))
    full_rope, local_rope = read_ropes(reader, sizes.head_dim, THETA)
    num_streams = reader.integer("altup_num_inputs", minimum=2, maximum=64)
    own = {
        "full_head_dim": sizes.head_dim, "full_kv_heads": sizes.num_kv_heads, "full_rope": full_rope,
        "num_borrowers": gemma4.read_borrowers(reader, types, num_layers), "keys_are_values": False,
        "per_layer_size": reader.integer("hidden_size_per_layer_input", maximum=MAX_COUNT), "wide_borrowers": False,
        "num_experts": 0, "experts_per_token": 0, "expert_size": 0,
        "activation": ACTIVATIONS.get(str(reader.get("hidden_activation")), ""),
        "logit_soft_cap": reader.optional_positive("final_logit_softcapping"),
        "num_streams": num_streams, "active": reader.integer("altup_active_idx", minimum=0, maximum=num_streams - 1),
        "scales_corrected": reader.flag("altup_correct_scale"), "laurel_rank": reader.integer("laurel_rank"),
        "per_layer_rows": min(sizes.vocab_size, reader.integer("vocab_size_per_layer_input")),
        "mlp_sizes": mlp_sizes, "deviations": _read_deviations(reader, num_layers),
    }  # fmt: skip
    reader.finish()
    return Gemma3nSpec.extending(replace(sizes, rope=local_rope, windows=windows), **own)


def _of_layers(reader: ConfigReader, key: str, given: Any, num_layers: int) -> tuple[int, ...]:
    """One number for all layers, or a list with one per layer."""
    values = given if isinstance(given, list) else [given] * num_layers
    if len(values) != num_layers or not all(type(each) is int and 0 < each < 2**31 for each in values):
        reader.problems.append(f"{key} must be a positive integer, or a list of one for each of {num_layers} layers")
        return (1,) * num_layers
    return tuple(values)


def _read_deviations(reader: ConfigReader, num_layers: int) -> tuple[float, ...]:
    """`deviations`: quantiles of a normal distribution, for the share of each layer's gates that do not pass."""
    usual = [SPARSITY if num_layers > SPARSE_LAYERS and i < SPARSE_LAYERS else 0.0 for i in range(num_layers)]
    shares = reader.get("activation_sparsity_pattern", usual)
    shares = shares if isinstance(shares, list) else [shares] * num_layers
    if len(shares) != num_layers or not all(is_number(share) and 0 <= share < 1 for share in shares):
        reader.problems.append(
            "activation_sparsity_pattern must be a number from 0 to below 1, or a list of one for each of "
            f"{num_layers} layers"
        )
        return (0.0,) * num_layers
    return tuple(NormalDist().inv_cdf(share) if share > 0 else 0.0 for share in shares)


def params(spec: Gemma3nSpec) -> list[Param]:
    def layer(i: int) -> list[Param]:
        own, name, source = spec.of_layer(i), f"layers.{i}", weights.layer_source(i)

        def norm(place: str, module: str) -> list[Param]:
            return weights.norm(own, f"{name}.{place}", f"{source}.{module}")

        return [
            *_altup_params(own, name, f"{source}.altup"),
            *norm("attn.norm", "input_layernorm"),
            *_laurel_params(own, name, f"{source}.laurel"),
            *gemma4.attention_params(own, i),
            *norm("attn.post_norm", "post_attention_layernorm"),
            *norm("mlp.norm", "pre_feedforward_layernorm"),
            *weights.gated_mlp(own, i),
            *norm("mlp.post_norm", "post_feedforward_layernorm"),
            *gemma4.per_layer_params(own, name, source),
        ]

    found = weights.decoder(spec, layer)
    tables = gemma4.per_layer_tables(spec, spec.per_layer_rows)
    return [found[0], *tables, _projections(spec), *found[1:-2], *_last_projections(spec), *found[-2:]]


def _altup_params(own: Gemma3nSpec, name: str, source: str) -> list[Param]:
    """Parameters of AltUp. Its norm's weight also divides the router's input by the hidden size."""
    streams, hidden = own.num_streams, own.hidden_size
    router_norm = weights.copied(f"{name}.altup.norm", f"{source}.router_norm.weight", (hidden,))
    scale = Param(
        f"{name}.altup.scale", (hidden,), (f"{source}.correct_output_scale",), ((hidden,),), is_exact=True
    )  # fmt: skip
    return [
        replace(router_norm, factors=((hidden, 1 / hidden),)),
        weights.copied(f"{name}.altup.router", f"{source}.modality_router.weight", (streams, hidden)),
        weights.copied(f"{name}.altup.prediction", f"{source}.prediction_coefs.weight", (streams**2, streams)),
        weights.copied(f"{name}.altup.correction", f"{source}.correction_coefs.weight", (streams, streams)),
        *([scale] if own.scales_corrected else ()),
    ]


def _laurel_params(own: Gemma3nSpec, name: str, source: str) -> list[Param]:
    rank, hidden = own.laurel_rank, own.hidden_size
    left, right = {f"{source}.linear_left": rank}, {f"{source}.linear_right": hidden}
    return [
        *weights.linear(f"{name}.laurel.left", left, hidden, Shard.NONE, bias=False),
        *weights.linear(f"{name}.laurel.right", right, rank, Shard.NONE, bias=False),
        *weights.norm(own, f"{name}.laurel.norm", f"{source}.post_laurel_norm"),
    ]


def _projections(spec: Gemma3nSpec) -> Param:
    """The projections of the embedding to each of the other streams."""
    hidden, others = spec.hidden_size, spec.num_streams - 1
    return Param(
        "streams", (others * hidden, hidden), tuple(f"model.altup_projections.{i}.weight" for i in range(others)),
        ((hidden, hidden),) * others, combine=Combine.CONCAT_ROWS, quantizable=True,
    )  # fmt: skip


def _last_projections(spec: Gemma3nSpec) -> list[Param]:
    rows = spec.hidden_size
    return [
        param
        for i in range(spec.num_streams - 1)
        for param in weights.linear(
            f"streams.{i}.last", {f"model.altup_unembed_projections.{i}": rows}, rows, Shard.NONE, bias=False
        )
    ]


def forward(g: Graph, spec: Gemma3nSpec) -> None:
    hidden, streams = spec.hidden_size, spec.num_streams
    x = g.embed("embed", hidden, scale=hidden**0.5)
    rows = spec.per_layer_rows if spec.per_layer_rows < spec.vocab_size else 0
    inputs = gemma4.per_layer_inputs(g, spec, x, num_rows=rows)
    x = g.spread(x, g.linear(x, "streams", (streams - 1) * hidden), least=LEAST_SQUARE)
    kept: dict[int, tuple[Value, Value]] = {}
    for layer in range(spec.num_layers):
        x = _layer(g, spec.of_layer(layer), x, inputs, layer, kept)
    x = g.select_rows(x)
    first = total = g.slice(x, 0, hidden)
    for i in range(1, streams):
        y = g.linear(g.slice(x, i * hidden, hidden), f"streams.{i - 1}.last", hidden)
        total = g.add(g.slice(g.spread(first, y, least=LEAST_SQUARE), hidden, hidden), total)
    # the norm of the sum equals that of the mean if epsilon is multiplied by the squared number of streams
    y = g.rms_norm(total, "norm", eps=spec.norm_eps * streams**2)
    g.logits(y, "head", soft_cap=spec.logit_soft_cap)


def _layer(
    g: Graph, own: Gemma3nSpec, x: Value, inputs: Value, layer: int, kept: dict[int, tuple[Value, Value]]
) -> Value:
    """A layer with AltUp: takes and returns all streams."""
    name, streams, begin = f"layers.{layer}", own.num_streams, own.active * own.hidden_size

    def active(value: Value) -> Value:
        return g.slice(value, begin, own.hidden_size)

    def coefficients(value: Value, kind: str, count: int) -> Value:
        y = g.linear(blocks.norm(g, own, value, f"{name}.altup.norm"), f"{name}.altup.router", streams)
        return g.linear(g.activation(y, activation="tanh"), f"{name}.altup.{kind}", count)

    predicted = g.mix(x, x, coefficients(active(x), "prediction", streams**2), groups=streams)
    computed = _computed(g, own, active(predicted), layer, kept)
    change = g.mix(computed, active(predicted), groups=1, offset=-1.0)
    x = g.mix(predicted, change, coefficients(computed, "correction", streams), groups=streams, offset=1.0)
    first = g.scale(active(x), f"{name}.altup.scale") if own.scales_corrected else active(x)
    return g.mix(x, gemma4.of_layer_input(g, own, first, inputs, layer), groups=streams, offset=1.0, first=1)


def _computed(g: Graph, own: Gemma3nSpec, x: Value, layer: int, kept: dict[int, tuple[Value, Value]]) -> Value:
    """A layer's output for its active stream."""
    name = f"layers.{layer}"
    normed = blocks.norm(g, own, x, f"{name}.attn.norm")
    y = g.linear(g.linear(normed, f"{name}.laurel.left", own.laurel_rank), f"{name}.laurel.right", own.hidden_size)
    laurel = g.add(normed, blocks.norm(g, own, y, f"{name}.laurel.norm"))
    y = blocks.norm(g, own, gemma4.attention(g, own, normed, layer, kept), f"{name}.attn.post_norm")
    total = g.add(g.add(x, y), laurel)
    x = g.mix(total, total, groups=1, offset=gemma4.ROOT_HALF - 1)
    y = blocks.norm(g, own, x, f"{name}.mlp.norm")
    if deviations := own.deviations[layer]:
        y = _sparse_mlp(g, own, y, f"{name}.mlp", deviations)
    else:
        y = blocks.gated_mlp(g, own, y, layer, activation=own.activation)
    return g.add(x, blocks.norm(g, own, y, f"{name}.mlp.post_norm"))


def _sparse_mlp(g: Graph, own: Gemma3nSpec, x: Value, name: str, deviations: float) -> Value:
    joined, inner = g.linear(x, f"{name}.gate_up", 2 * own.intermediate_size), own.intermediate_size
    gate = g.over_threshold(g.slice(joined, 0, inner), deviations=deviations)
    y = g.multiply(g.activation(gate, activation=own.activation), g.slice(joined, inner, inner))
    return g.linear(y, f"{name}.down", own.hidden_size)


ARCHITECTURE: Architecture[Gemma3nSpec] = Architecture(
    ("Gemma3nForCausalLM",), "gemma3n_text", from_hf, params, forward, ignored=UNREAD
)
