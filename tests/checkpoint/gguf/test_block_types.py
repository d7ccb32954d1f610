"""Stored numbers to float32 values: the same bits as ggml's own package gives, for any bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from llmserve.checkpoint.gguf.block_types import TYPES, UNSUPPORTED, type_name
from llmserve.checkpoint.gguf.rows import ExpandedRows
from llmserve.checkpoint.reader import Checkpoint
from llmserve.checkpoint.stored_tensor import STRIP_ELEMENTS
from tests.checkpoints import KINDS, random_tensors
from tests.gguf_files import make_gguf

BLOCKS = {type_id: kind for type_id, kind in TYPES.items() if kind.expand is not None}
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("type_id", BLOCKS, ids=lambda type_id: TYPES[type_id].name)
def test_any_bytes_give_the_bits_of_the_gguf_package(type_id: int) -> None:
    kind = BLOCKS[type_id]
    rows, columns = 2 * STRIP_ELEMENTS // 1024 + 3, 1024  # more than two strips
    packed = np.random.default_rng(type_id).integers(
        0, 256, (rows, columns // kind.num_elements * kind.num_bytes), dtype=np.uint8
    )
    found = ExpandedRows(packed.reshape(-1), kind, (rows, columns))[:]
    with np.errstate(invalid="ignore", over="ignore"):  # some scales are NaN or infinite
        wanted = dequantize(packed, gguf.GGMLQuantizationType(type_id))
    assert found.dtype == np.float32
    numbers = ~np.isnan(wanted)
    assert numbers.mean() > 0.8
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found.view(np.uint32)[numbers], wanted.view(np.uint32)[numbers])


def test_the_types_are_those_of_the_gguf_package() -> None:
    sizes = gguf.constants.GGML_QUANT_SIZES
    for type_id, kind in TYPES.items():
        named = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, kind.num_elements, kind.num_bytes) == (named.name, *sizes[named])
    assert {each.value: each.name for each in gguf.GGMLQuantizationType if each.value not in TYPES} == UNSUPPORTED
    assert "number 77" in type_name(77)


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_file_gives_the_values_that_were_quantized(type: str, tmp_path: Path) -> None:
    """With the rows of queries and keys in their places; floats in their own type."""
    named = gguf.GGMLQuantizationType[type]
    config = KINDS["llama"] | WIDE
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", stored=type, **WIDE)) as found:
        for name, tensor in random_tensors(config, dtype="float32", seed=0).items():
            wanted = dequantize(gguf.quants.quantize(tensor, named), named) if tensor.ndim == 2 else tensor
            read = found.read(name)
            assert np.array_equal(read.astype(np.float32), wanted)
            own = {"F16": "float16", "BF16": "bfloat16"}.get(type, "float32") if tensor.ndim == 2 else "float32"
            assert (read.dtype.name, found.tensors[name].dtype) == (own, own)


def test_rows_in_pieces_are_the_rows_of_the_whole(tmp_path: Path) -> None:
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", stored="Q4_1", **WIDE)) as found:
        for name in found.tensors:
            whole, rows = found.read(name), found.rows(name)
            assert np.array_equal(np.concatenate([rows[i : i + 7] for i in range(0, len(whole), 7)]), whole)
