"""An architecture of llama.cpp: its Hugging Face counterpart, and how the converter changed names and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmserve.checkpoint.gguf.tensor_names import (
    BLOCK_NAME,
    BLOCK_TENSOR,
    BOTH_GATES,
    EXPERT,
    GATE,
    LAYER,
    LAYER_NAME,
    LAYERS,
    OUTSIDE,
)


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors of a block that are a single one in Hugging Face's checkpoints: the matrices or biases of all experts, or
    two stacked matrices."""

    parts: tuple[str, ...]  # gate and up, or down
    tensor: str  # in a layer
    is_transposed: bool = False  # its rows are inputs
    in_turns: bool = False  # its order is: the first gate, its up, the next gate and so on
    is_matrix: bool = False  # it has one expert, without a dimension for experts
    of_heads: bool = False  # it has one matrix, head by head, and the first part is transposed


def joined(gate_up: str, down: str, *, bias: str = "", **form: bool) -> tuple[Joined, ...]:
    kinds = {"weight": "", "bias": bias} if bias else {"weight": ""}
    return tuple(
        joined
        for kind, ending in kinds.items()
        for joined in (
            Joined((f"ffn_gate_exps.{kind}", f"ffn_up_exps.{kind}"), gate_up + ending, **form),
            Joined((f"ffn_down_exps.{kind}",), down + ending, is_transposed=form.get("is_transposed", False)),
        )
    )


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    name: str  # general.architecture
    hf_name: str  # in `architectures` of config.json
    model_type: str
    block: Mapping[str, str]  # modules of a block: GGUF's name -> Hugging Face's
    tensors: Mapping[str, str] = field(default_factory=dict)  # tensors of a block whose last part changes, too
    joined: tuple[Joined, ...] = ()
    interleaved: bool = False  # rows of q and k are ordered by pairs of the rotary embedding
    norm_shift: float = 0.0  # added to the weights of every norm
    layer_norm: str = ""  # the config.json key of the epsilon, if norms subtract the mean
    factors: tuple[str, ...] = ()  # tensors that belong to the config
    own_keys: tuple[str, ...] = ()  # those of them that change the network
    by_layer: bool = False  # each layer may have its own number of KV heads or MLP width; the family reads them
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)  # modules outside of blocks
    layers: str = LAYERS  # prefix of a layer's name in Hugging Face's checkpoints
    tiled_heads: bool = False  # value heads of delta nets: the first of every key head, then the second of each
    drops_drafting: bool = False  # the last blocks draft tokens and are left out
    latent: bool = False  # attention over a latent: the family reads the sizes of heads
    has_mtp: bool = False  # except for this one, which has its own names in checkpoints

    def to_hf(self, name: str) -> str:
        """Hugging Face's name of a tensor; an unknown tensor keeps its name and has no place in the plan."""
        module, _, suffix = name.rpartition(".")
        if module in self.outside:
            return f"{self.outside[module]}.{suffix}"
        if (found := BLOCK_TENSOR.fullmatch(name)) and (tensor := self._tensor(found[2])):
            return f"model.layers.{found[1]}.{tensor}"
        found = BLOCK_NAME.fullmatch(name)
        if found is None or found[2] not in self.block:
            return name
        return f"{self.layers}.{found[1]}.{self.block[found[2]]}.{found[3]}"

    def joined_of(self, name: str) -> tuple[Joined, list[str]] | None:
        """How a Hugging Face tensor is joined from several, and their names."""
        found = LAYER.fullmatch(name)
        for joined in self.joined:
            if found is not None and found[2] == joined.tensor:
                return joined, [f"blk.{found[1]}.{part}" for part in joined.parts]
        return None

    def knows(self, name: str) -> bool:
        hf = self.to_hf(name)
        joined = self.joined_of(hf)
        return name in joined[1] if joined else self.to_gguf(hf) == name

    def _tensor(self, name: str) -> str | None:
        return next((joined.tensor for joined in self.joined if name in joined.parts), self.tensors.get(name))

    def to_gguf(self, name: str) -> str:
        """The inverse of `to_hf`; for joined tensors, the first one."""
        if joined := self.joined_of(name):
            return joined[1][0]
        module, _, suffix = EXPERT.sub("*", name).rpartition(".")
        outside = {hf: gguf for gguf, hf in self.outside.items()}
        if module in outside:
            return f"{outside[module]}.{suffix}"
        tensors = {hf: gguf for gguf, hf in self.tensors.items()}
        if (found := LAYER.fullmatch(name)) and found[2] in tensors:
            return f"blk.{found[1]}.{tensors[found[2]]}"
        if self.layers != LAYERS:
            name = name.replace(self.layers, LAYERS, 1)
        both = GATE.sub("ba", name) if BOTH_GATES in self.block else name
        found = LAYER_NAME.fullmatch(EXPERT.sub("*", both))
        modules = {hf: gguf for gguf, hf in self.block.items()}
        if found is None or found[2] not in modules:
            return name
        return f"blk.{found[1]}.{modules[found[2]]}.{found[3]}"

    def is_interleaved(self, hf_name: str) -> bool:
        return self.interleaved and (".q_proj." in hf_name or ".k_proj." in hf_name)
