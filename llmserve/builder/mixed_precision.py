"""Which parameters are quantized, and in which format each part of them is. The same for every target."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import Int4, Int8, Part, Scheme
from llmserve.models.graph import OpKind, Program
from llmserve.models.spec import Param

LINEAR_KINDS = (OpKind.LINEAR, OpKind.LOGITS)
MOST_BITS = 4.9  # of a weight of the layers, on average, with int4


def quantized_params(program: Program, params: Sequence[Param], options: BuildOptions) -> Mapping[str, Sequence[Part]]:
    """Parameters that are quantized, and how: quantizable ones that only linear layers read, as their matrix.

    With int4 the head stays int8: logits are compared with each other, and it is a small part of a model. So do the
    values of the attention, and then what reads its output, as far as MOST_BITS allows: their error costs most for
    their size, as K-quants found too.
    """
    if not options.quantization:
        return {}
    shapes = {param.name: param.shape for param in params if param.quantizable}
    matrices = {op.weights[0]: op.kind for op in program.ops if op.kind in LINEAR_KINDS}
    elsewhere = {name for op in program.ops for name in (op.weights[1:] if op.kind in LINEAR_KINDS else op.weights)}
    names = {name: kind for name, kind in matrices.items() if name in shapes and name not in elsewhere}
    if options.quantization == "int8":
        return {name: _whole(Int8(), shapes[name]) for name in names}
    layers = {name: shapes[name] for name, kind in names.items() if kind is not OpKind.LOGITS}
    found = {name: _whole(Int8() if kind is OpKind.LOGITS else Int4(), shapes[name]) for name, kind in names.items()}
    return {**found, **_with_more_bits(program, layers)}


def _whole(scheme: Scheme, shape: Sequence[int]) -> tuple[Part, ...]:
    return (Part(scheme, 0, shape[0]),)


def _with_more_bits(program: Program, layers: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[Part]]:
    """Of matrices that have four bits, those of which rows get eight."""
    total = sum(rows * cols for rows, cols in layers.values())
    used = sum(rows * cols * (Int4().bits + 32 / cols) for rows, cols in layers.values())
    found: dict[str, Sequence[Part]] = {}
    for name, begin, end in (*_value_rows(program), *_readers_of_attention(program)):
        if name not in layers or name in found:
            continue
        rows, cols = layers[name]
        more = (end - begin) * cols * (Int8().bits - Int4().bits)
        if used + more <= MOST_BITS * total:
            used += more
            parts = (Part(Int4(), 0, begin), Part(Int8(), begin, end), Part(Int4(), end, rows))
            found[name] = tuple(part for part in parts if part.begin < part.end)
    return found


def _value_rows(program: Program) -> Iterator[tuple[str, int, int]]:
    """Matrices and the rows of them that make values of the attention, layer by layer."""
    made_by = {op.output: op for op in program.ops}
    for op in program.ops:
        if op.kind is OpKind.ATTENTION:
            maker, start, width = made_by[op.inputs[2]], 0, made_by[op.inputs[2]].width
            if maker.kind is OpKind.SLICE:
                maker, start = made_by[maker.inputs[0]], int(maker.number("start"))
            if maker.kind is OpKind.LINEAR:
                yield maker.weights[0], start, start + width


def _readers_of_attention(program: Program) -> Iterator[tuple[str, int, int]]:
    attended = {op.output for op in program.ops if op.kind is OpKind.ATTENTION}
    for op in program.ops:
        if op.kind is OpKind.LINEAR and op.inputs[0] in attended:
            yield op.weights[0], 0, op.width


def stored_names(params: Sequence[Param], quantized: Collection[str]) -> Mapping[str, str]:
    """Parameter -> the name under which its numbers are stored.

    Parameters made from the same sources in the same way (a head tied to the embedding) are stored once, under the
    first one's name; a quantized one has numbers of its own.
    """
    first: dict[object, str] = {}
    origins: dict[str, Any] = {
        param.name: param.name if param.name in quantized else (param.sources, param.combine) for param in params
    }
    return {name: first.setdefault(origin, name) for name, origin in origins.items()}
