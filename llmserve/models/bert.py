"""BERT (MiniLM, BGE, E5, GTE): an encoder that computes embeddings of texts, or scores of pairs of texts.

`roberta.py` and `xlm_roberta.py` use the same spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmserve.models import blocks, weights
from llmserve.models.config import MAX_COUNT, ConfigReader, read_decoder
from llmserve.models.family import PLAIN_ACTIVATIONS
from llmserve.models.graph import Graph
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig, Param, Pooling, Shard

TASK = "ForSequenceClassification"
DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}  # transformers' defaults
ACTIVATION_KEYS = ("activation_fn", "sbert_ce_default_activation_function")  # sentence-transformers', new and old


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec(DecoderSpec):
    module: str  # prefix of tensor names
    activation: str
    num_segments: int
    first_position: int = 0  # the row of position 0 in the table of positions
    head: tuple[str, str] = ("", "")  # modules of the two scoring layers


def from_hf(config: HfConfig) -> EncoderSpec:
    return read_encoder(config, "bert", ("bert.pooler.dense", "classifier"))


def read_encoder(config: HfConfig, module: str, head: tuple[str, str], *, pads_positions: bool = False) -> EncoderSpec:
    """`pads_positions`: rows of positions begin after the row with the padding token's id."""
    reader = ConfigReader(DEFAULTS | dict(config))
    first = reader.integer("pad_token_id", 1, minimum=0) + 1 if pads_positions else 0
    num_positions = reader.integer("max_position_embeddings", minimum=first + 2) - first
    spec = read_decoder(reader, _architecture(config), max_positions=num_positions, eps_key="layer_norm_eps")
    known = {name: ours for name, ours in PLAIN_ACTIVATIONS.items() if name != "relu2"}
    reader.expect("hidden_act", *known)
    for key, usual in (("position_embedding_type", "absolute"), ("is_decoder", False), ("add_cross_attention", False)):
        reader.expect(key, usual)
    num_segments = reader.integer("type_vocab_size", maximum=MAX_COUNT)
    scores = read_scores(reader, "first") if spec.architecture.endswith(TASK) else None
    reader.finish()
    return EncoderSpec.extending(
        spec, module=module, activation=known[str(reader.get("hidden_act"))], num_segments=num_segments,
        first_position=first, head=head, pooling=scores or Pooling("mean"),
    )  # fmt: skip


def read_scores(reader: ConfigReader, mode: str) -> Pooling:
    """Pooling of a network that scores. It must have one class."""
    if (num_labels := _num_labels(reader)) != 1:
        reader.problems.append(f"it has {num_labels} labels; networks that score a pair of texts have one")
    return Pooling(mode, scores=True, sigmoid=_scores_with_sigmoid(reader))


def _architecture(config: HfConfig) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _num_labels(reader: ConfigReader) -> int:
    labels = reader.get("id2label")
    return len(labels) if isinstance(labels, dict) else reader.integer("num_labels", 2)


def _scores_with_sigmoid(reader: ConfigReader) -> bool:
    """Whether scores use a sigmoid: they do, unless sentence-transformers' keys disable it."""
    own = reader.get("sentence_transformers", {})
    places = (own if isinstance(own, dict) else {}, reader.config)
    named = [place[key] for place in places for key in ACTIVATION_KEYS if place.get(key)]
    return is_sigmoid(named[0] if named else "Sigmoid", reader.problems)


def is_sigmoid(activation: object, problems: list[str]) -> bool:
    """Whether scores use a sigmoid, by the name of torch's class."""
    kind = str(activation).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        problems.append(f"{kind} of scores is not supported; supported: Sigmoid, Identity")
    return kind == "Sigmoid"


def params(spec: EncoderSpec) -> list[Param]:
    hidden, embeddings = spec.hidden_size, f"{spec.module}.embeddings"
    rows = spec.first_position + spec.max_position_embeddings
    tables = {"word": spec.vocab_size, "position": rows, "token_type": spec.num_segments}
    names = ("embed", "positions", "segments")
    listed = [
        weights.copied(name, f"{embeddings}.{table}_embeddings.weight", (count, hidden))
        for name, (table, count) in zip(names, tables.items(), strict=True)
    ]
    listed += weights.norm(spec, "embed.norm", f"{embeddings}.LayerNorm", bias=True)
    for layer in range(spec.num_layers):
        listed += _layer(spec, layer)
    if spec.pooling is not None and spec.pooling.scores:
        for name, module, count in zip(("scorer", "score"), spec.head, (hidden, 1), strict=True):
            listed.append(weights.copied(name, f"{module}.weight", (count, hidden)))
            listed.append(weights.copied(f"{name}.bias", f"{module}.bias", (count,)))
    return listed


def _layer(spec: EncoderSpec, layer: int) -> list[Param]:
    name, source = f"layers.{layer}", f"{spec.module}.encoder.layer.{layer}"
    hidden, inner = spec.hidden_size, spec.intermediate_size
    qkv = {f"{source}.attention.self.{part}": hidden for part in ("query", "key", "value")}
    return [
        *weights.linear(f"{name}.attn.qkv", qkv, hidden, Shard.QKV, bias=True),
        *weights.linear(
            f"{name}.attn.output", {f"{source}.attention.output.dense": hidden}, hidden, Shard.COLUMNS, bias=True
        ),
        *weights.norm(spec, f"{name}.attn.norm", f"{source}.attention.output.LayerNorm", bias=True),
        *weights.linear(f"{name}.mlp.up", {f"{source}.intermediate.dense": inner}, hidden, Shard.ROWS, bias=True),
        *weights.linear(f"{name}.mlp.down", {f"{source}.output.dense": hidden}, inner, Shard.COLUMNS, bias=True),
        *weights.norm(spec, f"{name}.mlp.norm", f"{source}.output.LayerNorm", bias=True),
    ]


def forward(g: Graph, spec: EncoderSpec) -> None:
    pooling, hidden = spec.pooling, spec.hidden_size
    assert pooling is not None
    x = g.add(g.embed("embed", hidden), g.embed_segment("segments", hidden))
    x = g.add(x, g.embed_position("positions", hidden, begin=spec.first_position))
    x = blocks.layer_norm(g, spec, x, "embed.norm", bias=True)
    for layer in range(spec.num_layers):
        q, k, v = blocks.qkv(g, spec, x, layer, bias=True)
        y = blocks.attention(g, spec, (q, k, v), layer, bidirectional=True)
        y = g.add(blocks.output(g, spec, y, layer, bias=True), x)
        x = blocks.layer_norm(g, spec, y, f"layers.{layer}.attn.norm", bias=True)
        y = g.add(blocks.plain_mlp(g, spec, x, layer, activation=spec.activation, bias=True), x)
        x = blocks.layer_norm(g, spec, y, f"layers.{layer}.mlp.norm", bias=True)
    x = g.pool(x, pooling.mode, normalize=pooling.normalize)
    if pooling.scores:
        x = g.activation(g.linear(x, "scorer", hidden, bias="scorer.bias"), activation="tanh")
        g.logits(x, "score", bias="score.bias", width=1)


def encoder(
    name: str, model_type: str, from_hf: Callable[[HfConfig], EncoderSpec], *, module: str
) -> Architecture[EncoderSpec]:
    """`name`: the prefix of transformers' classes, without the task."""
    names = (f"{name}Model", f"{name}{TASK}", f"{name}ForMaskedLM")
    ignored = (rf"({module}\.)?(embeddings\.position_ids|pooler\..*)", r"(cls|lm_head)\..*")
    return Architecture(names, model_type, from_hf, params, forward, ignored=ignored, prefix=f"{module}.")


ARCHITECTURE = encoder("Bert", "bert", from_hf, module="bert")
