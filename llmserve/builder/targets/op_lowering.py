"""Lowers a Program to a target's own operations, op by op, by a table of rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.buffers import Buffers
from llmserve.engine.cache_layout import cache_layout
from llmserve.models.graph import Op, OpKind, Program


class Rule(NamedTuple):
    """How ops of a kind are lowered."""

    lower: Callable[[Any, Op], None]  # a method of the lowering class
    attributes: tuple[str, ...] = ()  # attributes that it supports


class OpLowering(ABC):
    """One pass over a Program, in order. `RULES` lists everything that it lowers; its target refuses all else."""

    RULES: ClassVar[Mapping[OpKind, Rule]]

    def __init__(self, program: Program, *, stride_bytes: int) -> None:
        self._program = program
        self._uses = Counter(name for op in program.ops for name in op.inputs)
        self._buffers = Buffers(self._uses, stride_bytes)

    @classmethod
    def known_ops(cls) -> Mapping[OpKind, Collection[str]]:
        """The op kinds that it lowers, with the attributes of each."""
        return {kind: rule.attributes for kind, rule in cls.RULES.items()}

    @abstractmethod
    def _fuse(self, op: Op, following: Op, after: Op | None) -> int:
        """Lower `op` together with the next one or two ops, or postpone it. Returns the number of ops done; 0: none."""

    def _lower_ops(self) -> None:
        ops = self._program.ops
        index = 0
        while index < len(ops):
            index += self._lower(*ops[index : index + 3])

    def _lower(self, op: Op, following: Op | None = None, after: Op | None = None) -> int:
        if following is not None and (done := self._fuse(op, following, after)):
            return done
        self.RULES[op.kind].lower(self, op)
        self._buffers.read(op.inputs)
        return 1


def turned_for_others(program: Program) -> set[str]:
    """Rotated values with readers other than attention's queries and keys; attention cannot rotate them."""
    turned = {op.output for op in program.ops if op.kind is OpKind.ROPE}
    read = {name for op in program.ops for name in (op.inputs[2:] if op.kind is OpKind.ATTENTION else op.inputs)}
    return turned & read


def sequence_bytes(program: Program, options: BuildOptions, num_tokens: int, token_bytes: int) -> int:
    """Bytes of so many cached tokens. Layers with a window keep what they can still read (`engine/cache_layout.py`)."""
    reads = [op for op in program.ops if op.kind is OpKind.ATTENTION and not program.needs_whole]
    pairs = ((int(op.number("layer")), int(op.number("window"))) for op in reads)
    block, most = options.tokens_per_block, options.max_seq_len
    layout = cache_layout(pairs, program.cache.num_layers, block * token_bytes, most, block)
    num_blocks = -(-num_tokens // block) + layout.windowed_layers.num_blocks_for(num_tokens, block)
    return num_blocks * layout.block_bytes
