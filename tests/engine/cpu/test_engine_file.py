"""The engine file: what is written is read back, and nothing that is damaged, foreign or cut off is opened."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.engine.cpu.layout import (
    CRC_BEGIN,
    FORMAT_VERSION,
    HEADER,
    TENSOR,
    EngineHeader,
    read_header,
)
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.native.library import load_library
from llmserve.errors import EngineFileError, InvalidArgument, NotFound, ResourceExhausted
from tests.engine.cpu.conftest import EngineFile, OpenRunner
from tests.engine.cpu.mappings import mapping_of
from tests.engine.cpu.networks import LIMITS, all_logits, odd_network


@pytest.fixture
def good(engine_file: EngineFile) -> bytes:
    return engine_file("rope", "float16", "int8").read_bytes()


def field_offset(name: str) -> int:
    assert HEADER.fields is not None
    return HEADER.fields[name][1]


def metadata_bytes(blob: bytes | bytearray) -> int:
    return int(np.frombuffer(blob, HEADER, 1)["metadata_bytes"][0])


def sealed(blob: bytearray) -> bytes:
    """The same bytes with a checksum that fits: what a clever or unlucky writer could produce."""
    crc = zlib.crc32(bytes(blob[CRC_BEGIN : metadata_bytes(blob)]))
    at = field_offset("metadata_crc")
    blob[at : at + 4] = crc.to_bytes(4, "little")
    return bytes(blob)


def patched(blob: bytes, **fields: int) -> bytes:
    """Header fields replaced, checksum made to fit."""
    header = np.frombuffer(blob, HEADER, 1).copy()
    for name, value in fields.items():
        header[name] = value
    return sealed(bytearray(header.tobytes() + blob[HEADER.itemsize :]))


def open_natively(path: Path) -> None:
    """Past Python's own checks, straight to the C++ reader."""
    library = load_library()
    library.close(library.open(path, isa="", num_blocks=4, threads=1))


def refusals(path: Path) -> list[str]:
    """What both readers say; each must refuse."""
    texts = []
    for read in (read_header, open_natively):
        with pytest.raises(EngineFileError) as error:
            read(path)
        assert str(path) in str(error.value)
        texts.append(str(error.value))
    return texts


def test_header_says_what_was_built(engine_file: EngineFile) -> None:
    header = read_header(engine_file("rope", "float16", "int8"))
    assert header == EngineHeader(
        dtype="float16",
        quantization="int8",
        cache_dtype="int8",  # where weights are quantized
        packing="panels32",
        vocab_size=83,
        max_num_tokens=LIMITS.max_num_tokens,
        max_batch_size=LIMITS.max_batch_size,
        max_seq_len=LIMITS.max_seq_len,
        block_size=LIMITS.tokens_per_block,
        num_layers=3,
        num_kv_heads=2,
        head_dim=10,
        activation_bytes=header.activation_bytes,
        program=header.program,
    )
    assert "rms_norm" in header.program
    assert header.kv_bytes_per_block == 2 * 3 * 2 * 10 * LIMITS.tokens_per_block * 2
    assert header.activation_bytes > 4 * LIMITS.max_batch_size * 83


def test_the_same_input_gives_the_same_file(tmp_path: Path, engine_file: EngineFile, good: bytes) -> None:
    options = dataclasses.replace(LIMITS, dtype="float16", quantization="int8")
    assert odd_network().compile(tmp_path / "again.engine", options).read_bytes() == good


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"engine file .* does not exist"):
        CpuRunner.open(tmp_path / "rank0.engine", num_blocks=1)
    with pytest.raises(EngineFileError, match="No such file"):
        open_natively(tmp_path / "rank0.engine")


def test_a_folder_is_no_engine(tmp_path: Path) -> None:
    assert len(refusals(tmp_path)) == 2


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 3000, 20000, -1])
def test_truncated_files_are_refused(count: int, tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "cut.engine"
    path.write_bytes(good[:count])
    assert all("too short" in text or "truncated" in text for text in refusals(path))


def test_a_file_with_more_at_its_end_is_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "long.engine"
    path.write_bytes(good + b"\0")
    assert all("truncated or damaged" in text for text in refusals(path))


def test_foreign_files_are_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "foreign.engine"
    path.write_bytes(b"\x7fELF" + good[4:])
    assert all("is not an engine file" in text for text in refusals(path))
    path.write_bytes(patched(good, version=FORMAT_VERSION + 1))
    assert all(
        f"format version {FORMAT_VERSION + 1}, this build reads {FORMAT_VERSION}" in text for text in refusals(path)
    )


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_keys_in_another_form_are_refused(kv_cache_dtype: str, tmp_path: Path) -> None:
    """Files that were written before heads were mixed have the same version and nothing there."""
    path = odd_network().compile(tmp_path / "e.engine", dataclasses.replace(LIMITS, kv_cache_dtype=kv_cache_dtype))
    path.write_bytes(patched(path.read_bytes(), mixes_heads=int(kv_cache_dtype == "auto")))
    with pytest.raises(EngineFileError, match="rebuild with: llmserve build CHECKPOINT"):
        open_natively(path)


@pytest.mark.parametrize("version", [0, 1, FORMAT_VERSION - 1])
def test_files_of_an_older_version_say_how_to_build_them_again(version: int, tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "rank0.engine"
    path.write_bytes(patched(good, version=version))
    wanted = "built by an older llmserve; rebuild with: llmserve build CHECKPOINT"
    assert all(wanted in text for text in refusals(path))
    options = {
        "dtype": "float16",
        "quantization": "",
        "group_size": 64,
        "max_seq_len": 96,
        "tensorrt_llm": {"tp_size": 2, "flag": True},
    }
    (tmp_path / "manifest.json").write_text(json.dumps({"format_version": 0, "options": options}))
    command = f"CHECKPOINT --dtype float16 --max-seq-len 96 --tp-size 2 --flag --output-dir {tmp_path}"
    assert refusals(path)[0].endswith(command)
    for nonsense in ("", "[]", '{"options": 3}'):
        (tmp_path / "manifest.json").write_text(nonsense)
        assert refusals(path)[0].endswith(f"CHECKPOINT --output-dir {tmp_path}")


def test_every_flipped_bit_of_the_metadata_is_noticed(tmp_path: Path, good: bytes) -> None:
    end = metadata_bytes(good)
    path = tmp_path / "flipped.engine"

    @settings(max_examples=80, derandomize=True)
    @given(st.integers(0, end * 8 - 1))
    def check(bit: int) -> None:
        blob = bytearray(good)
        blob[bit // 8] ^= 1 << bit % 8
        path.write_bytes(blob)
        refusals(path)

    check()


FIELDS = [name for name in HEADER.names or () if name not in ("magic", "version", "metadata_crc")]


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("name", FIELDS)
def test_absurd_header_fields_are_an_error_or_harmless(name: str, value: int, tmp_path: Path, good: bytes) -> None:
    """With a checksum that fits, the C++ reader has only its own checks. It opens the file or says why not."""
    path = tmp_path / "absurd.engine"
    value = min(value, int(np.iinfo(HEADER[name]).max))
    path.write_bytes(patched(good, **{name: value}))
    with contextlib.suppress(EngineFileError, InvalidArgument, ResourceExhausted):
        open_natively(path)
        unchanged = int(np.frombuffer(good, HEADER, count=1)[0][name]) == value
        assert unchanged or value == 0 or name not in ("file_bytes", "metadata_bytes", "num_ops", "packing")


@pytest.mark.parametrize("record", ["ops", "tensors", "buffers"])
def test_damaged_tables_are_named(record: str, tmp_path: Path, good: bytes) -> None:
    begin = int(np.frombuffer(good, HEADER, 1)[f"{record}_offset"][0])
    blob = bytearray(good)
    blob[begin : begin + 8] = b"\xff" * 8
    path = tmp_path / "table.engine"
    path.write_bytes(sealed(blob))
    with pytest.raises(EngineFileError, match=f"damaged .*{record[:-1].replace('op', 'operation')}"):
        open_natively(path)


@pytest.mark.parametrize("offset", [0, 64, 4096 * 10**6, 2**64 - 4096])
def test_a_tensor_outside_of_the_file_is_refused(offset: int, tmp_path: Path, good: bytes) -> None:
    header = np.frombuffer(good, HEADER, 1)[0]
    last = int(header["tensors_offset"]) + TENSOR.itemsize * (int(header["num_tensors"]) - 1)
    record = np.frombuffer(good, TENSOR, 1, last).copy()
    record["offset"] = offset
    path = tmp_path / "outside.engine"
    path.write_bytes(sealed(bytearray(good[:last] + record.tobytes() + good[last + TENSOR.itemsize :])))
    with pytest.raises(EngineFileError, match="damaged record of tensor"):
        open_natively(path)


def test_an_unknown_packing_says_what_to_do(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "packed.engine"
    path.write_bytes(sealed(bytearray(good.replace(b'"packing": "panels32"', b'"packing": "avx512x2"'))))
    with pytest.raises(
        EngineFileError, match=r"built for avx512x2, but this machine has panels32; run: llmserve build"
    ):
        read_header(path)
    path.write_bytes(patched(good, packing=7))
    with pytest.raises(EngineFileError, match="packing"):
        open_natively(path)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no large pages here")
def test_the_weights_are_wanted_in_large_pages(engine_file: EngineFile) -> None:
    path = engine_file("rope", "float16", "")
    runner = CpuRunner.open(path, num_blocks=4, threads=1)
    flags = mapping_of(path).split("VmFlags:")[1].split()
    runner.close()
    assert "hg" in flags


@pytest.mark.parametrize("kept", [0, 0.5], ids=["nothing is left", "half is left"])
def test_a_file_that_is_truncated_fails_its_own_steps_only(
    kept: float, engine_file: EngineFile, tmp_path: Path, open_runner: OpenRunner
) -> None:
    path, whole = tmp_path / "truncated.engine", engine_file("rope", "float16", "")
    path.write_bytes(whole.read_bytes())
    runner, other = open_runner(path, threads=2), open_runner(whole, threads=2)
    before = all_logits(runner, [1, 2, 3])
    os.truncate(path, int(kept * path.stat().st_size))
    for _ in range(2):
        with pytest.raises(EngineFileError, match="was truncated, or cannot be read any more"):
            all_logits(runner, [1, 2, 3])
    np.testing.assert_array_equal(all_logits(other, [1, 2, 3]), before)


def test_what_was_checked_of_a_file_stays_so_whatever_is_written_into_it(
    engine_file: EngineFile, tmp_path: Path, open_runner: OpenRunner
) -> None:
    path = tmp_path / "overwritten.engine"
    path.write_bytes(engine_file("rope", "float16", "").read_bytes())
    runner = open_runner(path)
    before = all_logits(runner, [1, 2, 3])
    with path.open("r+b") as file:
        file.write(b"\xff" * metadata_bytes(path.read_bytes()))
    np.testing.assert_array_equal(all_logits(runner, [1, 2, 3]), before)
