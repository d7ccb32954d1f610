"""What the config of a network is made from: the metadata of a GGUF file, and the shapes of its tensors."""

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
    """What a config is made from."""

    reader: MetadataReader
    architecture: GgufArchitecture
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors, by GGUF's names
    factors: Mapping[str, Tensor]  # the architecture's `factors`, as far as the file has them

    def has_bias(self, name: str) -> bool:
        """Of a module of the first block."""
        return f"blk.0.{name}.bias" in self.shapes

    def experts(self, count: str, used: str = "num_experts_per_tok") -> Config:
        """How many experts a layer has and a token uses, by the config's names of both."""
        keys = {count: "{}.expert_count", used: "{}.expert_used_count"}
        return {name: self.reader.integer(key) for name, key in keys.items()}
