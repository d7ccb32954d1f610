"""Our parameters as the tensors of a TensorRT-LLM checkpoint: their names, and which rows or columns each rank has.

Names and rules are those of the converters of release 1.2: tensorrt_llm/models/llama/convert.py
(load_weights_from_hf_model, QkvWeightHelper), models/convert_utils.py (dup_kv_weight, split), models/qwen/model.py
(q_layernorm, k_layernorm) and _utils.py (pad_vocab_size). Note: `mlp.fc` is the projection that is activated
(gate_proj), and `mlp.gate` is its factor (up_proj).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.models.spec import DecoderSpec, Param

LAYER = re.compile(r"layers\.(\d+)\.(.+)")
LAYER_TENSORS = {  # our names -> TensorRT-LLM's, where one tensor becomes one
    "attn.norm": "input_layernorm.weight",
    "attn.qkv": "attention.qkv.weight",
    "attn.qkv.bias": "attention.qkv.bias",
    "attn.q_norm": "attention.q_layernorm.weight",
    "attn.k_norm": "attention.k_layernorm.weight",
    "attn.output": "attention.dense.weight",
    "attn.output.bias": "attention.dense.bias",
    "mlp.norm": "post_layernorm.weight",
    "mlp.down": "mlp.proj.weight",
    "mlp.down.bias": "mlp.proj.bias",
}
QUANTIZED = ("attention.qkv.weight", "attention.dense.weight", "mlp.fc.weight", "mlp.gate.weight", "mlp.proj.weight")


@dataclass(frozen=True, slots=True)
class Mapping:
    """One rank's place among `tp_size * pp_size`; ranks of one pipeline stage follow each other."""

    tp_size: int
    pp_size: int
    rank: int

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp_size

    def first_layer(self, num_layers: int) -> int:
        return self.pp_rank * self.layers_per_stage(num_layers)

    def layers_per_stage(self, num_layers: int) -> int:
        return num_layers // self.pp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


def mappings(tp_size: int, pp_size: int) -> list[Mapping]:
    return [Mapping(tp_size, pp_size, rank) for rank in range(tp_size * pp_size)]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's tensor: row ranges of a parameter, concatenated, or a range of its columns."""

    name: str
    rows: tuple[tuple[int, int], ...] = ()  # empty: every row
    columns: tuple[int, int] | None = None
    num_padding_rows: int = 0  # zeros after the rows

    @property
    def is_quantized(self) -> bool:
        """Whether weight-only quantization applies. The embedding and the head keep their dtype."""
        return self.name.endswith(QUANTIZED)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        num_rows = sum(end - start for start, end in self.rows) if self.rows else whole[0]
        rest = whole[1:] if self.columns is None else (self.columns[1] - self.columns[0],)
        return (num_rows + self.num_padding_rows, *rest)

    def take(self, array: NDArray[Any]) -> NDArray[Any]:
        """A view if the shard is one range without padding."""
        if self.columns is not None:
            return array[:, slice(*self.columns)]
        parts = [array[start:end] for start, end in self.rows] if self.rows else [array]
        if self.num_padding_rows:
            parts.append(np.zeros((self.num_padding_rows, *array.shape[1:]), array.dtype))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def shards_of(param: Param, spec: DecoderSpec, mapping: Mapping) -> Iterator[Shard]:
    """The tensors of one parameter on `mapping`'s rank; empty if the parameter belongs to another pipeline stage."""
    layer = LAYER.fullmatch(param.name)
    if layer is None:
        yield from _outer_shards(param, mapping)
        return
    first, count = mapping.first_layer(spec.num_layers), mapping.layers_per_stage(spec.num_layers)
    if not first <= int(layer[1]) < first + count:
        return
    prefix = f"transformer.layers.{int(layer[1]) - first}."
    kind = layer[2]
    if kind.startswith("attn.qkv"):
        yield Shard(prefix + LAYER_TENSORS[kind], rows=_qkv_rows(spec, mapping))
    elif kind.startswith("mlp.gate_up"):
        suffix = "bias" if kind.endswith(".bias") else "weight"
        for start, name in ((0, "fc"), (spec.intermediate_size, "gate")):
            begin, end = _part(spec.intermediate_size, mapping)
            yield Shard(f"{prefix}mlp.{name}.{suffix}", rows=((start + begin, start + end),))
    elif kind in ("attn.output", "mlp.down"):
        yield Shard(prefix + LAYER_TENSORS[kind], columns=_part(param.shape[1], mapping))
    else:  # norms, and biases that are added to the sum of all ranks
        yield Shard(prefix + LAYER_TENSORS[kind])


def _outer_shards(param: Param, mapping: Mapping) -> Iterator[Shard]:
    if param.name == "embed" and mapping.is_first_stage:
        yield Shard("transformer.vocab_embedding.weight")
    if param.name == "norm" and mapping.is_last_stage:
        yield Shard("transformer.ln_f.weight")
    if param.name == "head" and mapping.is_last_stage:
        vocab_size = param.shape[0]
        per_rank = -(-vocab_size // mapping.tp_size)
        start = min(mapping.tp_rank * per_rank, vocab_size)
        end = min(start + per_rank, vocab_size)
        yield Shard("lm_head.weight", rows=((start, end),), num_padding_rows=per_rank - (end - start))


def _part(size: int, mapping: Mapping) -> tuple[int, int]:
    per_rank = size // mapping.tp_size
    return mapping.tp_rank * per_rank, (mapping.tp_rank + 1) * per_rank


def _qkv_rows(spec: DecoderSpec, mapping: Mapping) -> tuple[tuple[int, int], ...]:
    """The rank's query heads, and its key and value heads; if there are fewer of those than ranks, ranks share them."""
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    begin, end = _part(q_width, mapping)
    if spec.num_kv_heads >= mapping.tp_size:
        kv_begin, kv_end = _part(kv_width, mapping)
    else:
        head = mapping.tp_rank * spec.num_kv_heads // mapping.tp_size
        kv_begin, kv_end = head * spec.head_dim, (head + 1) * spec.head_dim
    return (
        (begin, end),
        (q_width + kv_begin, q_width + kv_end),
        (q_width + kv_width + kv_begin, q_width + kv_width + kv_end),
    )
