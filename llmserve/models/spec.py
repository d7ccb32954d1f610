"""What an architecture file says about a checkpoint.

Sizes (`DecoderSpec`) and where each parameter comes from (`Param`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from llmserve.models.graph import Program

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
class Param:
    """One parameter of the Program, and its origin in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]  # Hugging Face tensor names
    source_shapes: tuple[tuple[int, ...], ...]
    combine: Combine = Combine.COPY
    shard: Shard = Shard.NONE
    quantizable: bool = False
    duplicates: tuple[str, ...] = ()  # names under which a checkpoint may repeat the source; must then be equal to it

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer, resolved: no optional left to guess. Shared by every architecture file."""

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
    inv_freq: tuple[float, ...] = ()  # empty: no rotary embedding
    rope_scale: float = 1.0  # multiplies cos and sin
    alibi_slopes: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()  # per layer sliding window, 0 is full attention; empty: full everywhere
    qkv_bias: bool = False
    output_bias: bool = False  # attention output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    norm_head: bool = False
    fused_qkv_source: bool = False  # the checkpoint stores one W_pack instead of q, k, v


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture file offers, as a value in the registry."""

    from_hf: Callable[[HfConfig], DecoderSpec]  # raises CheckpointError listing every problem of the config
    params: Callable[[DecoderSpec], list[Param]]
    forward: Callable[[DecoderSpec], Program]
    ignored: tuple[str, ...] = ()  # regular expressions of checkpoint tensors that are known and not wanted
