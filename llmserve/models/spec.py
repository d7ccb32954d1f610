"""Types for architecture files: sizes of a network (`DecoderSpec`) and sources of its parameters (`Param`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

from llmserve.models.graph import CacheShape, Graph, Op, OpKind, Program, Value

SCORE = "score"  # name of the parameter that scores a text

HfConfig: TypeAlias = Mapping[str, Any]


class Combine(Enum):
    """How a parameter is made from its source tensors."""

    COPY = "copy"  # exactly one source
    CONCAT_ROWS = "concat_rows"  # stack along dimension 0, in the order given
    NORMALIZE_ROWS = "normalize_rows"  # one source, each row divided by its L2 norm (Baichuan2's NormHead)


class Shard(Enum):
    """How a parameter is split over tensor-parallel ranks (for targets that have them)."""

    NONE = "none"
    QKV = "qkv"  # rows are q, k, v heads: split within each of the three
    ROWS = "rows"  # output features
    GATE_UP = "gate_up"  # rows are gate, up: split within each of the two
    COLUMNS = "columns"  # input features


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of heads; the first `rotary_dim` of a head are stored as pairs that ROPE rotates: (0, 1), (2, 3) and so on.

    A parameter has pair i at i and i + rotary_dim / 2, as ROPE expects.
    """

    head_dim: int
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Rows grouped by key/value head: the queries that read it, its keys, its values.

    A parameter has all queries, then all keys, then all values.
    """

    head_dim: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Rows in groups; each group has `sizes[i]` rows of part i.

    A parameter has all rows of the first part, then all of the second, and so on.
    """

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Rows of a latent, then the rotary rows of keys, the first `num_paired` of them stored as in `Pairs`.

    A parameter has the rotary rows, then the latent twice.
    """

    size: int
    rotary_dim: int
    num_paired: int  # all rotary rows, or none


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """A parameter has only these rows."""

    rows: tuple[int, ...]


RowOrder: TypeAlias = Pairs | HeadGroups | Shares | LatentRows | ChosenRows


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Heads whose keys and values are projected from a latent that all heads share.

    The sources are the query projection, or the output projection (`reads`); the projection of the latent to keys and
    values; and the weight of the latent's norm. A parameter is their product. For each head, it computes the rotary
    elements and then a query for the latent itself; with `reads`, it reads the latent and skips the rotary elements.
    """

    latent: LatentRows
    num_heads: int
    key_dim: int  # without the rotary elements
    value_dim: int
    reads: bool = False


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the Program, and its origin in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]  # Hugging Face tensor names
    source_shapes: tuple[tuple[int, ...], ...]  # with an additional dimension: matrices of all experts, to be stacked
    combine: Combine = Combine.COPY
    shard: Shard = Shard.NONE
    quantizable: bool = False
    is_exact: bool = False  # float32 in every engine dtype
    difference: tuple[int, ...] = ()  # two rows of the source: the parameter is the first minus the second
    is_transposed: bool = False  # the source has each expert's matrix transposed
    orders: tuple[RowOrder | None, ...] = ()  # row order of each source, None: unchanged; empty: all unchanged
    product: LatentHeads | None = None  # set: the parameter is a product of its sources
    factors: tuple[tuple[int, float], ...] = ()  # (number of rows, factor), in order; empty: none
    duplicates: tuple[str, ...] = ()  # names under which a checkpoint may repeat the source, with equal values
    otherwise: Param | None = None  # the same parameter, from the tensors of other checkpoints

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def replacing(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces these parts of a name. The first match wins, so list longer parts first."""
    pattern = re.compile("|".join(map(re.escape, names)))
    return lambda name: pattern.sub(lambda found: names[found[0]], name)


def renamed(param: Param, published: Callable[[str], str]) -> Param:
    """The parameter with its tensor names mapped by `published`."""
    return replace(
        param,
        sources=tuple(map(published, param.sources)),
        duplicates=tuple(map(published, param.duplicates)),
        otherwise=param.otherwise and renamed(param.otherwise, published),
    )


@dataclass(frozen=True, slots=True)
class Rope:
    """The frequencies of a rotary embedding."""

    inv_freq: tuple[float, ...]  # one for each rotated pair of elements of a head
    scale: float = 1.0  # multiplies cos and sin


@dataclass(frozen=True, slots=True)
class Pooling:
    """Output of a network for a whole text, instead of tokens: an embedding, or the score of a pair of texts."""

    mode: str  # of program.POOLINGS
    normalize: bool = False  # to length 1
    scores: bool = False
    sigmoid: bool = False  # applied to scores
    answers: tuple[int, ...] = ()  # two tokens: the score is the logit of the first minus that of the second


@dataclass(frozen=True, slots=True)
class PositionScale:
    """A factor of queries that grows with the position; see Graph.scale_by_position."""

    strength: float
    interval: int
    shift: int = 0
    layers: Collection[int] | None = None  # None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer with all defaults resolved: the fields of every family.

    Fields of one family are in a subclass in the architecture's file.
    """

    architecture: str  # "BaichuanForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # the longest sequence, including RoPE scaling
    norm_eps: float
    rope: Rope | None = None  # None: no rotary embedding
    windows: tuple[int, ...] = ()  # sliding window per layer, 0: full attention; empty: full in all layers
    stateful_layers: Collection[int] = ()  # layers that keep a state per sequence instead of keys and values
    tied_embeddings: bool = False
    ignored: tuple[str, ...] = ()  # as `Architecture.ignored`, for this network
    pooling: Pooling | None = None  # None: it generates tokens

    @classmethod
    def extending(cls, spec: DecoderSpec, **own: Any) -> Self:
        """`spec` as this class, with the fields `own`."""
        return cls(**{each.name: getattr(spec, each.name) for each in fields(spec)} | own)

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def uncached_layers(self) -> Collection[int]:
        """Layers without keys and values."""
        return self.stateful_layers

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.num_layers - len(self.uncached_layers), self.num_kv_heads, self.head_dim)

    def cache_layer(self, layer: int) -> int:
        """Index of `layer` among the layers with keys and values."""
        return layer - sum(other < layer for other in self.uncached_layers)

    @property
    def usual_seq_len(self) -> int:
        """The longest sequence of an engine that is built without `max_seq_len`."""
        return self.max_position_embeddings

    def for_sequences(self, max_seq_len: int) -> Self:
        """The spec for an engine with sequences up to this length. Few families change it."""
        return self

    def notes(self, max_seq_len: int) -> list[str]:
        """Notes for the user about an engine with sequences up to this length."""
        return []


class Mixer(Protocol):
    """Replaces attention in a layer, or runs in parallel with it."""

    def params(self, spec: DecoderSpec, layer: int) -> list[Param]: ...

    def mix(self, g: Graph, spec: DecoderSpec, x: Value, layer: int) -> Value: ...


Spec = TypeVar("Spec", bound=DecoderSpec)


@dataclass(frozen=True, slots=True)
class Architecture(Generic[Spec]):
    """The content of an architecture file, as a value in the registry."""

    names: tuple[str, ...]  # in `architectures` of config.json
    model_type: str
    from_hf: Callable[[HfConfig], Spec]  # raises CheckpointError with every problem of the config
    params: Callable[[Spec], list[Param]]
    forward: Callable[[Graph, Spec], None]
    ignored: tuple[str, ...] = ()  # regular expressions of known checkpoint tensors that are not used
    prefix: str = "model."  # of tensor names; checkpoints without the head omit it
    drafter: Architecture[Spec] | None = None  # the network in the same checkpoint that drafts tokens for it

    def program(self, spec: Spec) -> Program:
        """Trace `forward`."""
        graph = Graph(spec.cache_shape, spec.vocab_size)
        self.forward(graph, spec)
        program, pooling = graph.program(), spec.pooling
        if pooling is None or program.pools:
            return program
        pooled = without_head(program, pooling)
        return with_score(pooled) if pooling.scores else pooled


def without_head(program: Program, pooling: Pooling) -> Program:
    """The network with pooling instead of its head and the head's parameters: one row per sequence."""
    (selection,) = (op for op in program.ops if op.kind is OpKind.SELECT_ROWS)
    *ops, head = (
        replace(op, inputs=tuple(selection.inputs[0] if x == selection.output else x for x in op.inputs))
        for op in program.ops
        if op is not selection
    )
    own = {"mode": pooling.mode} | ({"normalize": True} if pooling.normalize else {})
    return replace(program, ops=(*ops, Op(OpKind.POOL, head.inputs, head.output, ops[-1].width, attrs=own)))


def with_score(program: Program) -> Program:
    """Append the score of the pooled row: its product with one row of weights."""
    last = program.ops[-1]
    score = Op(OpKind.LOGITS, (last.output,), SCORE, 1, (SCORE,), {})
    return replace(program, ops=(*program.ops, score))
