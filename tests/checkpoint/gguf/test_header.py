"""Headers that lie: every one is refused by name, in bounded time and memory, before a weight is read."""

from __future__ import annotations

import mmap
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmserve.checkpoint.gguf.header import read_header
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError, LlmserveError
from tests.gguf_files import finish, make_gguf

MAX_SECONDS, MAX_BYTES = 10.0, 64 << 20  # of an attempt; the machine may be busy
U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack


def text(value: str) -> bytes:
    return U64(len(value.encode())) + value.encode()


def header(
    *entries: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, counts: tuple[int, int] = (-1, -1)
) -> bytes:
    num_tensors = len(tensors) if counts[0] < 0 else counts[0]
    num_entries = len(entries) if counts[1] < 0 else counts[1]
    return b"GGUF" + U32(version) + U64(num_tensors) + U64(num_entries) + b"".join((*entries, *tensors))


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + U32(kind) + value


def tensor(name: str, *dims: int, type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + U32(len(dims)) + b"".join(map(U64, dims)) + U32(type_id) + U64(offset)


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return U32(kind) + U64(count) + values


def problem_of(path: Path) -> str:
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(LlmserveError) as caught:
            Checkpoint.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < MAX_SECONDS
    assert peak < MAX_BYTES
    assert path.name in str(caught.value)
    return str(caught.value)


LLAMA = entry("general.architecture", 8, text("llama"))
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "another format": (b"PK\x03\x04" + bytes(60), "begins with b'PK\\x03\\x04' instead of b'GGUF'"),
    "three bytes": (b"GGU", "it is not a GGUF file"),
    "only the magic": (b"GGUF", "cut short or damaged"),
    "version 1": (header(version=1), "format version 1"),
    "version 0": (header(version=0), "format version 0"),
    "version 4": (header(version=4), "format version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian machines; convert it with `gguf-convert-endian"),
    "countless tensors": (header(counts=(2**63, 0)), f"claims {2**63} tensors"),
    "countless entries": (header(counts=(0, 2**64 - 1)), "metadata entries, more than"),
    "one entry more than there are": (header(LLAMA, counts=(0, 2)), "where a string begins"),
    "four entries more": (header(LLAMA, counts=(0, 5)), "claims 5 metadata entries"),
    "a long key": (header(U64(2**62) + bytes(40)), f"claims {2**62} more bytes"),
    "an empty key": (header(entry("", 4, U32(1))), "has 0 characters"),
    "a key that is no text": (header(U64(2) + b"\xff\xfe" + U32(4) + U32(1)), "is not UTF-8"),
    "a value that is no text": (header(entry("a", 8, U64(1) + b"\xff")), "metadata 'a': the string"),
    "a value of no type": (header(entry("a", 13, U64(1))), "metadata 'a': its value has the unknown type 13"),
    "a bool of 2": (header(entry("a.long.name", 7, b"\x02")), "2 is not a boolean"),
    "a long string": (header(entry("a", 8, U64(2**40))), f"claims {2**40} more bytes"),
    "an endless array": (header(entry("a", 9, array(5, 2**61))), f"claims {2**61} numbers"),
    "an endless array of strings": (header(entry("a", 9, array(8, 2**61))), f"claims {2**61} strings"),
    "an array of arrays": (header(entry("a", 9, array(9, 1, array(5, 0)))), "array of type 9"),
    "a key twice": (header(LLAMA, LLAMA), "metadata key general.architecture appears twice"),
    "an alignment of 3": (header(LLAMA, entry("general.alignment", 4, U32(3))), "general.alignment must be a power of"),
    "an alignment of 0": (header(LLAMA, entry("general.alignment", 4, U32(0))), "at least 8, got 0"),
    "an alignment of text": (header(LLAMA, entry("general.alignment", 8, text("32"))), "at least 8, got '32'"),
    "a tensor of no rank": (header(LLAMA, tensors=(tensor("t"),)), "tensor 't' has 0 dimensions; 1 to 4"),
    "a tensor of rank 2**31": (header(LLAMA, tensors=(text("t") + U32(2**31) + bytes(90),)), f"has {2**31} dimensions"),
    "an empty tensor": (header(LLAMA, tensors=(tensor("t", 0),)), "tensor t has no elements"),
    "a tensor twice": (header(LLAMA, tensors=(tensor("t", 8), tensor("t", 8))), "tensor 't' appears twice"),
    "sizes beyond 64 bits": (header(LLAMA, tensors=(tensor("t", *[2**63] * 4),)), "it is cut short"),
    "data beyond the end": (header(LLAMA, tensors=(tensor("t", 8),)) + bytes(40), "it is cut short; download it again"),
    "an offset of 2**64 - 32": (header(LLAMA, tensors=(tensor("t", 8, offset=2**64 - 32),)), "it is cut short"),
    "an odd offset": (header(LLAMA, tensors=(tensor("t", 8, offset=4),)) + bytes(99), "not aligned to 32 bytes"),
    "one place for two": (header(LLAMA, tensors=(tensor("t", 8), tensor("u", 8))) + bytes(99), "tensor u overlaps t"),
    "half a block": (header(LLAMA, tensors=(tensor("t", 48, type_id=2),)), "has rows of 48 elements, but a block of"),
    "an unknown type": (header(LLAMA, tensors=(tensor("t", 8, type_id=99),)), "number 99, which this version does not"),
    "types that are not supported": (
        header(LLAMA, tensors=(tensor("t", 256, type_id=16), tensor("u", 256, type_id=16), tensor("v", 8, type_id=24))),
        "tensor t and 1 more have the type IQ2_XXS, which is not supported",
    ),
    "no architecture": (header(), "architecture None (general.architecture) is not supported"),
    "no metadata at all": (header(LLAMA), "llama.embedding_length must be an integer"),
    "a name of Hugging Face's": (header(LLAMA, tensors=(tensor("model.norm.weight", 8),)) + bytes(99), "has a name"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_headers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    content, problem = BAD[name]
    (tmp_path / "bad.gguf").write_bytes(content)
    assert problem in problem_of(tmp_path / "bad.gguf")


def test_all_types_that_are_not_supported_are_named(tmp_path: Path) -> None:
    content, _ = BAD["types that are not supported"]
    (tmp_path / "bad.gguf").write_bytes(content)
    message = problem_of(tmp_path / "bad.gguf")
    assert "tensor v has the type I8" in message
    assert "Use a file of the model in one of these" in message


A_MILLION_STRINGS = array(8, 1_000_000, bytes(8_000_000))
CLAIMS: dict[str, bytes] = {
    "entries": header(counts=(0, 60_000)),
    "tensors": header(counts=(60_000, 0)),
    "strings": header(entry("a", 9, array(8, 2_000_000))),
    "strings of several arrays": header(*(entry(name, 9, A_MILLION_STRINGS) for name in "abc")),
    "numbers": header(entry("a", 9, array(0, 200_000_000))),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_counts_that_a_sparse_file_has_room_for(name: str, tmp_path: Path) -> None:
    """A terabyte of zeros costs a writer nothing, and a reader no more than the header may have."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(CLAIMS[name])
    os.truncate(path, 1 << 40)
    started = time.monotonic()
    with pytest.raises(LlmserveError):
        Checkpoint.open(path)
    assert time.monotonic() - started < MAX_SECONDS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = make_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", tokenizer="bpe", vocab_size=300, num_hidden_layers=1)
    return path.read_bytes()


def test_a_file_cut_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    rng = np.random.default_rng(0)
    for length in (*range(60), *rng.integers(60, len(whole) - 1, 300).tolist(), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            Checkpoint.open(path)


def test_changed_bytes_give_no_other_error_than_ours(whole: bytes, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    path = tmp_path / "changed.gguf"
    end = whole.index(b"blk.0.") + 4000  # in the middle of the descriptions of tensors
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for place in rng.integers(4, end, rng.integers(1, 4)):
            content[place] = rng.integers(0, 256)
        path.write_bytes(content)
        try:
            Checkpoint.open(path).close()
        except LlmserveError:
            refused += 1
    assert refused > 40


def test_version_2_reads_as_version_3(whole: bytes, tmp_path: Path) -> None:
    content = bytearray(whole)
    content[4:8] = U32(2)
    (tmp_path / "two.gguf").write_bytes(content)
    (tmp_path / "three.gguf").write_bytes(whole)
    with Checkpoint.open(tmp_path / "two.gguf") as two, Checkpoint.open(tmp_path / "three.gguf") as three:
        assert two.config == three.config
        assert two.tensors == three.tensors


def test_every_type_of_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    wanted: dict[str, Any] = {
        "uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 1e-5, "float64": 0.1, "bool": True, "string": "Grüße 🦙",
    }  # fmt: skip
    for kind, value in wanted.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("strings", ["a", "", "ü"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("bools", [True, False])
    finish(writer)
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        metadata = read_header(data).metadata
    assert {key: metadata[key] for key in wanted} == wanted
    assert metadata["strings"] == ["a", "", "ü"]
    assert np.array_equal(metadata["ints"], [1, -2, 3])
    assert np.array_equal(metadata["bools"], [True, False])


@pytest.mark.parametrize("kind", ["directory", "unreadable", "missing"])
def test_what_is_no_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if kind == "directory":
        path.mkdir()
    elif kind == "unreadable":
        path.touch(mode=0)
    with pytest.raises(CheckpointError):
        Checkpoint.open(path)
