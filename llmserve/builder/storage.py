"""How an engine keeps its parameters: which become int8, and which share their numbers. The same for every target."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from llmserve.models.graph import OpKind, Program
from llmserve.models.spec import Param

LINEAR_KINDS = (OpKind.LINEAR, OpKind.LOGITS)


def quantized_params(program: Program, params: Sequence[Param], quantization: str) -> frozenset[str]:
    """Parameters that become int8: quantizable ones that only linear layers read, as their matrix."""
    if quantization != "int8":
        return frozenset()
    wanted = {param.name for param in params if param.quantizable}
    matrices = {op.weights[0] for op in program.ops if op.kind in LINEAR_KINDS}
    elsewhere = {name for op in program.ops for name in (op.weights[1:] if op.kind in LINEAR_KINDS else op.weights)}
    return frozenset((wanted & matrices) - elsewhere)


def stored_names(params: Sequence[Param], quantized: Collection[str]) -> Mapping[str, str]:
    """Parameter -> the name under which its numbers are stored.

    Parameters made from the same sources in the same way (a head tied to the embedding) are stored once, under the
    first one's name; a quantized one has numbers of its own.
    """
    first: dict[object, str] = {}
    origins = {
        param.name: param.name if param.name in quantized else (param.sources, param.combine) for param in params
    }
    return {name: first.setdefault(origin, name) for name, origin in origins.items()}
