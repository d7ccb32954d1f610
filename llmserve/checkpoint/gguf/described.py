"""The sources of a network's config: the metadata of a GGUF file, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from llmserve.checkpoint.gguf.architecture import GgufArchitecture
from llmserve.checkpoint.gguf.metadata import MetadataReader
from llmserve.checkpoint.stored_tensor import Tensor

Config: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Described:
    """The sources of a config."""

    reader: MetadataReader
    architecture: GgufArchitecture
    shapes: Mapping[str, tuple[int, ...]]  # shapes of the tensors, by GGUF's names
    factors: Mapping[str, Tensor]  # the architecture's `factors` that the file has

    def has_bias(self, name: str) -> bool:
        """Whether a module of the first block has a bias."""
        return f"blk.0.{name}.bias" in self.shapes

    def experts(self, count: str, used: str = "num_experts_per_tok") -> Config:
        """The numbers of experts per layer and per token, under the config's names."""
        keys = {count: "{}.expert_count", used: "{}.expert_used_count"}
        return {name: self.reader.integer(key) for name, key in keys.items()}
