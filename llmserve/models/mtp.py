"""The drafting layer of Qwen3-Next and its descendants (multi-token prediction, `mtp.*`), as a network.

Its input is a token's embedding and the row from which the network's head predicted that token, normalized and joined.
It predicts the next token. Facts from vLLM's and SGLang's sources: the embedding comes first; rows are outputs of the
network's last norm, or for a second token, of the layer's own. Embedding and head are the network's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from llmserve.errors import CheckpointError, raise_problems
from llmserve.models import family, weights
from llmserve.models.family import FamilySpec
from llmserve.models.graph import Graph
from llmserve.models.spec import Architecture, Combine, HfConfig, Param, Shard, renamed

PLACES = {"model.layers.": "mtp.layers.", "model.norm.": "mtp.norm."}  # names of the layer's own tensors
NORMS = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")


def with_drafter(
    of: Architecture[FamilySpec], published: Callable[[str], str] = lambda name: name
) -> Architecture[FamilySpec]:
    """`of` with its drafting layer. `published` maps the names of the tensors that they share."""

    def from_hf(config: HfConfig) -> FamilySpec:
        spec = of.from_hf(config)
        raise_problems(CheckpointError, "config.json", list(_problems(config)))
        mixture = spec.mixture and replace(spec.mixture, dense_layers=())
        return replace(spec, num_layers=1, stateful_layers=(), mixer=None, mixture=mixture)

    def named(spec: FamilySpec) -> list[Param]:
        return [renamed(param, published) for param in params(spec)]

    return replace(of, drafter=replace(of, from_hf=from_hf, params=named, forward=forward, ignored=(".*",)))


def _problems(config: HfConfig) -> Iterator[str]:
    text = config.get("text_config", config)
    if text.get("mtp_num_hidden_layers") not in (None, 1):
        yield f"mtp_num_hidden_layers is {text['mtp_num_hidden_layers']!r}; one layer that drafts is supported"
    if text.get("mtp_use_dedicated_embeddings"):
        yield "mtp_use_dedicated_embeddings: a layer that drafts with embeddings of its own is not supported"


def params(spec: FamilySpec) -> list[Param]:
    width = spec.hidden_size
    norms = tuple(f"{module}.weight" for module in NORMS)
    return [
        Param("joint.norm", (2 * width,), norms, ((width,), (width,)), combine=Combine.CONCAT_ROWS),
        *weights.linear("joint.linear", {"mtp.fc": width}, 2 * width, Shard.NONE, bias=False),
        *(renamed(param, _own_name) for param in family.params(spec)),
    ]


def forward(g: Graph, spec: FamilySpec) -> None:
    x = g.with_hidden(g.embed("embed", spec.hidden_size, scale=spec.embed_scale), spec.hidden_size)
    x = g.rms_norm(x, "joint.norm", eps=spec.norm_eps, groups=2, offset=spec.norm_offset, own_weights=True)
    family.layers_and_head(g, spec, g.linear(x, "joint.linear", spec.hidden_size))


def _own_name(name: str) -> str:
    for place, own in PLACES.items():
        name = name.replace(place, own, 1)
    return name
