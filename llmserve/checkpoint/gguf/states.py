"""Tensors of layers with a state, with the changes of llama.cpp's converter reversed as they are read.

Mamba and delta nets have the logarithm of a decay; a file has minus the decay. In llama.cpp's files, Qwen3.5's delta
nets have the first value head of every key head, then the second of each; here, value heads of a key head are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.blocks import BlockRows
from llmserve.checkpoint.gguf.architecture import GgufArchitecture
from llmserve.checkpoint.gguf.rows import ExpandedRows
from llmserve.checkpoint.gguf.tensor_names import BOTH_GATES
from llmserve.checkpoint.rearranged import ReorderedRows
from llmserve.checkpoint.stored_tensor import Rows, Tensor

DECAY = ".A_log"
CONVOLUTIONS = (".conv.conv.weight", ".conv1d.weight")  # one for each column, without channels
FLAT = (".ssm_a", ".ssm_d", ".ssm_norm.weight")  # llama.cpp stores columns of these, or groups


@dataclass(frozen=True, slots=True)
class LogDecay:
    source: Rows

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Not a finite number if the file's is invalid; the plan then reports the tensor's name."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Tensor = np.log(-self.source[rows].astype(np.float64)).astype(np.float32)
        return found


@dataclass(frozen=True, slots=True)
class ReorderedColumns:
    """Column i is column `order[i]` of `source`; runs of `run` columns stay together."""

    source: ExpandedRows
    order: NDArray[np.intp]
    run: int

    def __getitem__(self, rows: slice, /) -> Tensor:
        found: Tensor = self.source[rows][:, self.order]
        return found

    def blocks(self, rows: slice, /) -> BlockRows | None:
        """None if a block of the file has columns of several runs."""
        size = self.source.kind.num_elements
        found = None if self.run % size else self.source.blocks(rows)
        return found and replace(found, blocks=found.blocks[:, self.order[::size] // size])


def restored(architecture: GgufArchitecture, name: str, rows: ExpandedRows, config: Mapping[str, Any]) -> Rows:
    """`rows` are rows of the tensor that Hugging Face calls `name`."""
    if ".linear_attn." in name:
        return _of_delta_net(architecture, name, rows, config)
    return LogDecay(rows) if name.endswith(DECAY) else rows


def _of_delta_net(architecture: GgufArchitecture, name: str, rows: ExpandedRows, config: Mapping[str, Any]) -> Rows:
    num_heads, num_key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    part = name.rpartition(".linear_attn.")[2]
    if BOTH_GATES in architecture.block and part in ("in_proj_b.weight", "in_proj_a.weight"):
        both = np.arange(2 * num_heads).reshape(num_key_heads, 2, -1)
        return ReorderedRows(rows, both[:, int(part.startswith("in_proj_a"))].reshape(-1))
    found: Rows = rows
    if architecture.tiled_heads and num_heads != num_key_heads:
        value_dim = config["linear_value_head_dim"]
        before = 2 * num_key_heads * config["linear_key_head_dim"]  # queries and keys
        values = _tiled(num_heads, num_key_heads, value_dim)
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            found = ReorderedRows(rows, np.concatenate([np.arange(before), before + values]))
        elif part == "in_proj_z.weight":
            found = ReorderedRows(rows, values)
        elif part == "out_proj.weight":
            return ReorderedColumns(rows, values, value_dim)
        elif part != "norm.weight":
            found = ReorderedRows(rows, _tiled(num_heads, num_key_heads, 1))
    return LogDecay(found) if name.endswith(DECAY) else found


def _tiled(num_heads: int, num_key_heads: int, size: int) -> NDArray[np.intp]:
    """The places of value heads' elements in the file."""
    heads = np.arange(num_heads * size).reshape(num_heads // num_key_heads, num_key_heads, size)
    return heads.swapaxes(0, 1).reshape(-1)
