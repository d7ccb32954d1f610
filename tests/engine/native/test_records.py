"""Records that Python writes and the C++ library reads: the compiler compares every field with its struct."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.engine.cpu.layout import BUFFER, HEADER, OP, OPERAND, TENSOR
from llmserve.engine.native.records import CHUNK, SAMPLE, SCORE, AdapterPartRecord, StepRecord
from llmserve.engine.native.step import NO_MASK

KERNELS = Path(__file__).parents[3] / "llmserve/engine/cpu/kernels"
STRUCTS: dict[str, np.dtype[Any]] = {
    "ChunkRecord": CHUNK,
    "SampleRecord": SAMPLE,
    "ScoreRecord": SCORE,
    "AdapterPartRecord": np.dtype(AdapterPartRecord),
    "StepRecord": np.dtype(StepRecord),
    "Operand": OPERAND,
    "OpRecord": OP,
    "TensorRecord": TENSOR,
    "BufferRecord": np.dtype([("bytes_per_row", BUFFER)]),
    "FileHeader": HEADER,
}
NUMBERS = {"u4": "uint32_t", "i4": "int32_t", "u8": "uint64_t", "f4": "float"}
C_NAMES = {"inputs": "in", "output": "out"}  # of fields that are called something else there


def assertions(struct: str, record: np.dtype[Any]) -> Iterator[str]:
    """That the C++ struct has these fields in these places, and nothing else: they leave no room."""
    assert record.fields is not None
    assert sum(type_.itemsize for type_, *_ in record.fields.values()) == record.itemsize
    yield f"sizeof({struct}) == {record.itemsize}"
    for name, (type_, offset, *_) in record.fields.items():
        field = C_NAMES.get(name, name)
        yield f"offsetof({struct}, {field}) == {offset} && sizeof({struct}::{field}) == {type_.itemsize}"
        if (
            struct not in ("StepRecord", "AdapterPartRecord") and type_.str[1:] in NUMBERS
        ):  # pointers are numbers for ctypes
            yield f"std::is_same_v<decltype({struct}::{field}), {NUMBERS[type_.str[1:]]}>"


def compiled(lines: list[str], folder: Path) -> str:
    """What the compiler says against it."""
    program = folder / "records.cpp"
    checks = "".join(f"static_assert({line});\n" for line in lines)
    program.write_text(
        f'#include <cstddef>\n#include <type_traits>\n#include "adapters.h"\nnamespace llmserve {{\n{checks}}}\n'
    )
    command = ["c++", "-std=gnu++20", "-fsyntax-only", "-idirafter", str(KERNELS), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler here")
def test_every_field_lies_where_c_has_it(tmp_path: Path) -> None:
    lines = [line for struct, record in STRUCTS.items() for line in assertions(struct, record)]
    assert compiled([*lines, f"kNoMask == {NO_MASK}u"], tmp_path) == ""
    swapped = [line.replace("SampleRecord, top_p)", "SampleRecord, min_p)") for line in lines]
    assert "static assertion failed" in compiled(swapped, tmp_path)
