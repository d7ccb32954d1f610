"""Mixtures of experts: an MLP with many parts, of which a router selects a few for each token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from llmserve.models import blocks, weights
from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.graph import Graph, Value
from llmserve.models.spec import DecoderSpec, Pairs, Param, Shard

# transformers 5 writes the first one for some families with another key
COUNT_KEYS = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
# Keys of families with other rules for routers, and their neutral values.
OTHER_ROUTERS = {"scoring_func": "softmax", "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
MAX_GROUPS = 64
MLP_TYPES = ("dense", "sparse")
LATENT = ("latent_in", "latent_out")  # names of parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    num_experts: int
    experts_per_token: int
    expert_size: int  # inner width of each expert
    renormalize: bool  # scale the weights of a token's experts to a sum of 1
    dense_layers: Collection[int] = ()  # layers with an MLP without experts
    module: str = "mlp"  # in a layer of the checkpoint; the names below are inside it
    router: str = "gate"
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # modules of each expert
    stacked: tuple[str, str] | None = None  # tensors of all experts: gate and up, and down; None: one module each
    may_be_stacked: bool = False  # a checkpoint has either these tensors or modules of each expert
    is_transposed: bool = False  # the stacked tensors have inputs as rows
    in_turns: bool = False  # rows of gate and up alternate in the first stacked tensor
    has_biases: bool = False  # the stacked tensors and the router have biases
    sigmoid: bool = False  # scores are sigmoids of the router's logits, not their softmax
    correction: str = ""  # tensor that is added to scores for the selection only
    correction_is_row: bool = False  # it is stored as a matrix with one row
    factor: float = 1.0  # multiplies the weights
    groups: tuple[int, int] = (0, 0)  # number of groups of experts, and of those selected for a token; 0: none
    by_best: bool = False  # ranks a group by its best expert, not by its two best
    tolerance: float = 0.0  # threshold of SparseMixer, see Graph.route; 0: not used
    scales_inputs: bool = False  # weights multiply the experts' inputs, not their outputs
    plain: bool = False  # no gates: `names`, `stacked` and the shared expert begin with up
    latent_size: int = 0  # width of the experts' inputs and outputs, between two matrices; 0: hidden size
    latent: tuple[str, str] = ("", "")  # modules of these matrices
    shared: str = ""  # module of an expert for every token, in a layer; empty: none
    shared_fused: str = ""  # as `FamilySpec.fused_mlp`
    shared_down: str = "down_proj"
    shared_size: int = 0  # inner width of the shared expert
    shared_factor: float = 1.0  # multiplies its output
    shared_gate: str = ""  # module of a gate whose sigmoid multiplies its output


def read_mixture(
    reader: ConfigReader,
    *,
    expert_size: str = "intermediate_size",
    renormalize: bool | None = None,
    per_token_key: str = "num_experts_per_tok",
    **own: Any,
) -> Mixture:
    """Read the family's keys. `renormalize` None: as in the config. `own`: other fields of `Mixture`."""
    num_experts = next(key for key in COUNT_KEYS if reader.get(key) is not None or key == COUNT_KEYS[-1])
    count = reader.integer(num_experts, maximum=MAX_COUNT)
    per_token = reader.integer(per_token_key, maximum=MAX_COUNT)
    if per_token > count:
        reader.problems.append(f"{per_token_key} ({per_token}) must be at most {num_experts} ({count})")
    owned = {"sigmoid": ["scoring_func"], "factor": ["routed_scaling_factor"], "groups": ["n_group", "topk_group"]}
    known = {key for field in own for key in owned.get(field, ())}
    for key, neutral in OTHER_ROUTERS.items():
        if key not in known:
            reader.expect(key, neutral)
    return Mixture(
        num_experts=count,
        experts_per_token=per_token,
        expert_size=reader.integer(expert_size),
        renormalize=reader.flag("norm_topk_prob") if renormalize is None else renormalize,
        **own,
    )


def read_groups(reader: ConfigReader, num_experts: int, per_token: int) -> tuple[int, int]:
    """Read DeepSeek's keys. (0, 0): tokens select from all experts."""
    count = reader.integer("n_group", 1, maximum=MAX_GROUPS)
    chosen = reader.integer("topk_group", 1, maximum=MAX_GROUPS)
    if chosen == count:
        return 0, 0
    size = num_experts // count
    if chosen > count or num_experts % count or size < 2 or size * chosen < per_token:
        reader.problems.append(
            f"n_group ({count}) and topk_group ({chosen}) must make groups of two experts or more of "
            f"{num_experts}, and {per_token} experts or more to choose from"
        )
    return count, chosen


def read_dense_layers(reader: ConfigReader, num_layers: int) -> Collection[int]:
    """Read Qwen's keys: all layers except every `decoder_sparse_step`th, and those in `mlp_only_layers`."""
    step = reader.integer("decoder_sparse_step", 1)
    listed = reader.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        reader.problems.append(f"mlp_only_layers must be a list of integers, got {listed!r}")
        listed = []
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


def read_dense_types(reader: ConfigReader, num_layers: int, num_dense: int = 0) -> Collection[int]:
    """Layers without experts: from `mlp_layer_types`, else the first `num_dense`."""
    listed = reader.get("mlp_layer_types", ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense))
    if not isinstance(listed, list) or len(listed) < num_layers or not all(kind in MLP_TYPES for kind in listed):
        names = " or ".join(map(repr, MLP_TYPES))
        reader.problems.append(f"mlp_layer_types must be a list of {num_layers} times {names}, got {listed!r}")
        return ()
    return tuple(layer for layer in range(num_layers) if listed[layer] == MLP_TYPES[0])


def params(spec: DecoderSpec, mixture: Mixture, layer: int) -> list[Param]:
    """Parameters of a layer's mixture. The router is not quantized, because it selects the experts."""
    source, name = f"{weights.layer_source(layer)}.{mixture.module}", f"layers.{layer}.mlp"
    router = f"{source}.{mixture.router}"
    found = [weights.copied(f"{name}.router", f"{router}.weight", (mixture.num_experts, spec.hidden_size))]
    if mixture.has_biases:
        found.append(weights.copied(f"{name}.router.bias", f"{router}.bias", (mixture.num_experts,)))
    found += [*_expert_params(spec, mixture, source, name)]
    if mixture.correction:
        shape = (mixture.num_experts,)
        stored = (1, *shape) if mixture.correction_is_row else shape
        correction = f"{source}.{mixture.correction}"
        found.append(Param(f"{name}.correction", shape, (correction,), (stored,), is_exact=True))
    if mixture.latent_size:
        sizes = ((mixture.latent_size, spec.hidden_size), (spec.hidden_size, mixture.latent_size))
        for part, module, (rows, columns) in zip(LATENT, mixture.latent, sizes, strict=True):
            found += weights.linear(f"{name}.{part}", {f"{source}.{module}": rows}, columns, Shard.NONE, bias=False)
    if mixture.shared:
        inner = replace(spec, intermediate_size=mixture.shared_size)
        module, down = mixture.shared, mixture.shared_down
        if mixture.plain:
            found += weights.plain_mlp(inner, layer, module=module, up=mixture.names[0], down=down)
        else:
            found += weights.gated_mlp(inner, layer, module=module, fused=mixture.shared_fused, down=down)
        if mixture.shared_factor != 1.0:
            found.append(replace(found.pop(), factors=((spec.hidden_size, mixture.shared_factor),)))
    if mixture.shared_gate:
        gate = f"{source}.{mixture.shared_gate}.weight"
        found.append(weights.copied(f"{name}.gate", gate, (1, spec.hidden_size)))
    return found


def _expert_params(spec: DecoderSpec, mixture: Mixture, source: str, name: str) -> list[Param]:
    inner, hidden, count = mixture.expert_size, mixture.latent_size or spec.hidden_size, mixture.num_experts
    if mixture.stacked:
        found = _stacked_params(spec, mixture, source, name)
        if not mixture.may_be_stacked:
            return found
        apart = _expert_params(spec, replace(mixture, stacked=None), source, name)
        return [replace(param, otherwise=other) for param, other in zip(found, apart, strict=True)]
    *firsts, down = mixture.names  # gate and up, or only up
    experts = [f"{source}.experts.{number}" for number in range(count)]
    gate_up_rows = {f"{expert}.{part}": inner for expert in experts for part in firsts}
    down_rows = {f"{expert}.{down}": hidden for expert in experts}
    return [
        *weights.linear(f"{name}.experts.gate_up", gate_up_rows, hidden, Shard.NONE, bias=False),
        *weights.linear(f"{name}.experts.down", down_rows, inner, Shard.NONE, bias=False),
    ]


def _stacked_params(spec: DecoderSpec, mixture: Mixture, source: str, name: str) -> list[Param]:
    count, found = mixture.num_experts, []
    hidden, inner = mixture.latent_size or spec.hidden_size, mixture.expert_size
    sizes = {"gate_up": (inner * (1 if mixture.plain else 2), hidden), "down": (hidden, inner)}
    for tensor, (part, (rows, columns)) in zip(mixture.stacked or (), sizes.items(), strict=True):
        orders = (Pairs(rows, rows),) if mixture.in_turns and part == "gate_up" else ()
        stored = (count, columns, rows) if mixture.is_transposed else (count, rows, columns)
        found.append(
            Param(
                f"{name}.experts.{part}", (count * rows, columns), (f"{source}.{tensor}",), (stored,), orders=orders,
                quantizable=True, is_transposed=mixture.is_transposed,
            )
        )  # fmt: skip
        if mixture.has_biases:
            bias, height = f"{name}.experts.{part}.bias", (count * rows,)
            found.append(Param(bias, height, (f"{source}.{tensor}_bias",), ((count, rows),), orders=orders))
    return found


def mixture_of_experts(
    g: Graph, spec: DecoderSpec, mixture: Mixture, x: Value, layer: int, *, activation: str
) -> Value:
    name = f"layers.{layer}.mlp"
    router_bias = f"{name}.router.bias" if mixture.has_biases else None
    logits = g.linear(x, f"{name}.router", mixture.num_experts, bias=router_bias)
    routes = g.route(
        logits, experts_per_token=mixture.experts_per_token, renormalize=mixture.renormalize, sigmoid=mixture.sigmoid,
        bias=f"{name}.correction" if mixture.correction else None, factor=mixture.factor, groups=mixture.groups,
        by_best=mixture.by_best, tolerance=mixture.tolerance,
    )  # fmt: skip
    matrices = f"{name}.experts.gate_up", f"{name}.experts.down"
    biases = (f"{matrices[0]}.bias", f"{matrices[1]}.bias") if mixture.has_biases else None
    narrow = g.linear(x, f"{name}.{LATENT[0]}", mixture.latent_size) if mixture.latent_size else x
    y = g.experts(
        narrow, routes, *matrices, num_experts=mixture.num_experts, activation=activation, biases=biases,
        scales_inputs=mixture.scales_inputs, plain=mixture.plain,
    )  # fmt: skip
    y = g.linear(y, f"{name}.{LATENT[1]}", spec.hidden_size) if mixture.latent_size else y
    if not mixture.shared:
        return y
    gate = g.linear(x, f"{name}.gate", 1) if mixture.shared_gate else None
    inner = replace(spec, intermediate_size=mixture.shared_size)
    mlp = blocks.plain_mlp if mixture.plain else blocks.gated_mlp
    shared = mlp(g, inner, x, layer, activation=activation)
    return g.add(y, g.sigmoid_gate(shared, gate) if gate else shared)
