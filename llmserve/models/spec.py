"""What an architecture file says about a checkpoint.

Sizes (`DecoderSpec`) and where each parameter comes from (`Param`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

from llmserve.models.graph import CacheShape, Graph, Op, OpKind, Program, Value

SCORE = "score"  # the parameter of a network that scores

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
    """Rows of heads whose first `rotary_dim` are stored as pairs of a rotary embedding: (0, 1), (2, 3) and so on.

    A parameter has pair i as its elements i and i + rotary_dim / 2: what ROPE turns.
    """

    head_dim: int
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Rows of heads, key/value head by key/value head: the queries that read it, the keys, the values.

    A parameter has all queries, all keys, all values.
    """

    head_dim: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Rows group by group, of each group so many of each part.

    A parameter has all rows of the first part, then all of the second, and so on.
    """

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Rows of a latent, then of the elements of keys that are turned, the first `num_paired` stored as in `Pairs`.

    A parameter has those that are turned, then the latent twice.
    """

    size: int
    rotary_dim: int
    num_paired: int  # all that are turned, or none


RowOrder: TypeAlias = Pairs | HeadGroups | Shares | LatentRows


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Heads whose keys and values a checkpoint makes of a latent that all of them share.

    The sources are a matrix that makes queries, or reads values (`reads`), then the one that makes keys and values of
    the latent, and the weight of the latent's norm. A parameter is their product: it makes queries of the latent
    itself, behind the elements that are turned, or reads the latents that attention gives, of rows as long.
    """

    latent: LatentRows
    num_heads: int
    key_dim: int  # without what is turned
    value_dim: int
    reads: bool = False


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the Program, and its origin in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]  # Hugging Face tensor names
    source_shapes: tuple[tuple[int, ...], ...]  # one with a dimension more has matrices of all experts, to be stacked
    combine: Combine = Combine.COPY
    shard: Shard = Shard.NONE
    quantizable: bool = False
    is_exact: bool = False  # in float32, whatever the engine's dtype
    difference: tuple[int, ...] = ()  # two rows of the source: the parameter is the first minus the second
    is_transposed: bool = False  # the source has the columns of each expert's matrix as rows
    orders: tuple[RowOrder | None, ...] = ()  # of each source's rows, where it is another one; empty: of none
    product: LatentHeads | None = None  # it is a product of its sources
    factors: tuple[tuple[int, float], ...] = ()  # of rows: so many are multiplied with this; empty: none are
    duplicates: tuple[str, ...] = ()  # names under which a checkpoint may repeat the source; must then be equal to it
    otherwise: Param | None = None  # the same parameter, of tensors that other checkpoints have instead

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def replacing(names: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces these parts of a name. The first one that fits counts, so longer ones come first."""
    pattern = re.compile("|".join(map(re.escape, names)))
    return lambda name: pattern.sub(lambda found: names[found[0]], name)


def renamed(param: Param, published: Callable[[str], str]) -> Param:
    """Of tensors with other names: `published` of those that it has."""
    return replace(
        param,
        sources=tuple(map(published, param.sources)),
        duplicates=tuple(map(published, param.duplicates)),
        otherwise=param.otherwise and renamed(param.otherwise, published),
    )


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding, resolved."""

    inv_freq: tuple[float, ...]  # one for each pair of elements of a head that are turned
    scale: float = 1.0  # multiplies cos and sin


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a network makes of a whole text, instead of tokens: an embedding, or a score of a pair of texts."""

    mode: str  # of program.POOLINGS
    normalize: bool = False  # to a length of one
    scores: bool = False
    sigmoid: bool = False  # of scores
    answers: tuple[int, ...] = ()  # two tokens: the score is the logit of the first minus that of the second


@dataclass(frozen=True, slots=True)
class PositionScale:
    """What queries are multiplied with, the more, the later; see Graph.scale_by_position."""

    strength: float
    interval: int
    shift: int = 0
    layers: Collection[int] | None = None  # None: all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer, resolved: no optional left to guess. What every family has.

    What only one of them has is in a class of its own, in the architecture's file.
    """

    architecture: str  # "BaichuanForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # with the stretch of a RoPE scaling: the longest sequence
    norm_eps: float
    rope: Rope | None = None  # None: no rotary embedding
    windows: tuple[int, ...] = ()  # per layer sliding window, 0 is full attention; empty: full everywhere
    stateful_layers: Collection[int] = ()  # that keep a state of a sequence, and no keys and values
    tied_embeddings: bool = False
    ignored: tuple[str, ...] = ()  # as `Architecture.ignored`, of this network
    pooling: Pooling | None = None  # None: its answers are tokens

    @classmethod
    def extending(cls, spec: DecoderSpec, **own: Any) -> Self:
        """`spec` with the fields of a family's class."""
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
        """Without keys and values."""
        return self.stateful_layers

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.num_layers - len(self.uncached_layers), self.num_kv_heads, self.head_dim)

    def cache_layer(self, layer: int) -> int:
        """Which of the layers with keys and values it is."""
        return layer - sum(other < layer for other in self.uncached_layers)

    @property
    def usual_seq_len(self) -> int:
        """The longest sequence of an engine that is built without saying it."""
        return self.max_position_embeddings

    def for_sequences(self, max_seq_len: int) -> Self:
        """The network of an engine for sequences up to this length: the same one, but for few families."""
        return self

    def notes(self, max_seq_len: int) -> list[str]:
        """What the user should know about an engine for sequences up to this length."""
        return []


class Mixer(Protocol):
    """What a layer has in place of attention."""

    def params(self, spec: DecoderSpec, layer: int) -> list[Param]: ...

    def mix(self, g: Graph, spec: DecoderSpec, x: Value, layer: int) -> Value: ...


Spec = TypeVar("Spec", bound=DecoderSpec)


@dataclass(frozen=True, slots=True)
class Architecture(Generic[Spec]):
    """What an architecture file offers, as a value in the registry."""

    names: tuple[str, ...]  # in `architectures` of config.json
    model_type: str
    from_hf: Callable[[HfConfig], Spec]  # raises CheckpointError listing every problem of the config
    params: Callable[[Spec], list[Param]]
    forward: Callable[[Graph, Spec], None]
    ignored: tuple[str, ...] = ()  # regular expressions of checkpoint tensors that are known and not wanted
    prefix: str = "model."  # of tensors, which checkpoints of the network without its head are without
    drafter: Architecture[Spec] | None = None  # the network of the same checkpoint that drafts tokens for it

    def program(self, spec: Spec) -> Program:
        """`forward`, traced."""
        graph = Graph(spec.cache_shape, spec.vocab_size)
        self.forward(graph, spec)
        program, pooling = graph.program(), spec.pooling
        if pooling is None or program.pools:
            return program
        pooled = without_head(program, pooling)
        return with_score(pooled) if pooling.scores else pooled


def without_head(program: Program, pooling: Pooling) -> Program:
    """What the network makes of each sequence before its head, whose parameters it is without."""
    (selection,) = (op for op in program.ops if op.kind is OpKind.SELECT_ROWS)
    *ops, head = (
        replace(op, inputs=tuple(selection.inputs[0] if x == selection.output else x for x in op.inputs))
        for op in program.ops
        if op is not selection
    )
    own = {"mode": pooling.mode} | ({"normalize": True} if pooling.normalize else {})
    return replace(program, ops=(*ops, Op(OpKind.POOL, head.inputs, head.output, ops[-1].width, attrs=own)))


def with_score(program: Program) -> Program:
    """Of what it pools, by one row."""
    last = program.ops[-1]
    score = Op(OpKind.LOGITS, (last.output,), SCORE, 1, (SCORE,), {})
    return replace(program, ops=(*program.ops, score))
