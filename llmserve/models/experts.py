"""Mixtures of experts: an MLP of which each token goes through a few of many parts, which a router chooses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from llmserve.models import weights
from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.graph import Graph, Value
from llmserve.models.spec import DecoderSpec, Param, Shard

COUNT_KEYS = ("num_local_experts", "num_experts")  # transformers 5 writes the first for some families of the second
# Of other families, whose routers choose in another way, and the value that changes nothing.
OTHER_ROUTERS = {"scoring_func": "softmax", "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    num_experts: int
    experts_per_token: int
    expert_size: int  # inner width of each
    renormalize: bool  # the weights of a token's experts, to a sum of one
    dense_layers: Collection[int] = ()  # that have a plain MLP


def read_mixture(
    reader: ConfigReader,
    *,
    expert_size: str = "intermediate_size",
    renormalize: bool | None = None,
    dense_layers: Collection[int] = (),
) -> Mixture:
    """By the family's keys; `renormalize` None: as the config says."""
    num_experts = next(key for key in COUNT_KEYS if reader.get(key) is not None or key == COUNT_KEYS[-1])
    count = reader.integer(num_experts, maximum=MAX_COUNT)
    per_token = reader.integer("num_experts_per_tok", maximum=MAX_COUNT)
    if per_token > count:
        reader.problems.append(f"num_experts_per_tok ({per_token}) must be at most {num_experts} ({count})")
    for key, neutral in OTHER_ROUTERS.items():
        reader.expect(key, neutral)
    return Mixture(
        num_experts=count,
        experts_per_token=per_token,
        expert_size=reader.integer(expert_size),
        renormalize=reader.flag("norm_topk_prob") if renormalize is None else renormalize,
        dense_layers=dense_layers,
    )


def read_dense_layers(reader: ConfigReader, num_layers: int) -> Collection[int]:
    """By Qwen's keys: all but each `decoder_sparse_step`th, and those of `mlp_only_layers`."""
    step = reader.integer("decoder_sparse_step", 1)
    listed = reader.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        reader.problems.append(f"mlp_only_layers must be a list of integers, got {listed!r}")
        listed = []
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


def mixture_params(
    spec: DecoderSpec,
    mixture: Mixture,
    layer: int,
    *,
    module: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Param]:
    """`names`: of an expert's modules. The router is not rounded: it chooses."""
    source, name = f"{weights.layer_source(layer)}.{module}", f"layers.{layer}.mlp"
    gate, up, down = names
    experts = [f"{source}.experts.{number}" for number in range(mixture.num_experts)]
    inner, hidden = mixture.expert_size, spec.hidden_size
    gate_up_rows = {f"{expert}.{part}": inner for expert in experts for part in (gate, up)}
    down_rows = {f"{expert}.{down}": hidden for expert in experts}
    return [
        weights.copied(f"{name}.router", f"{source}.gate.weight", (mixture.num_experts, hidden)),
        *weights.linear(f"{name}.experts.gate_up", gate_up_rows, hidden, Shard.NONE, bias=False),
        *weights.linear(f"{name}.experts.down", down_rows, inner, Shard.NONE, bias=False),
    ]


def mixture_of_experts(g: Graph, mixture: Mixture, x: Value, layer: int) -> Value:
    name = f"layers.{layer}.mlp"
    logits = g.linear(x, f"{name}.router", mixture.num_experts)
    routes = g.route(logits, experts_per_token=mixture.experts_per_token, renormalize=mixture.renormalize)
    matrices = f"{name}.experts.gate_up", f"{name}.experts.down"
    return g.experts(x, routes, *matrices, num_experts=mixture.num_experts)
