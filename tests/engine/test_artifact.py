from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.engine.base import EngineInfo
from llmserve.engine.directory import artifact
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.manifest import FileRecord, Manifest
from llmserve.errors import EngineFileError, NotFound
from tests.engine.directories import MANIFEST, make_engine_directory


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return make_engine_directory(tmp_path / "tiny-fp16", {"generation_config.json": b'{"eos_token_id": 2}'})


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def refusal(path: Path) -> str:
    with pytest.raises(EngineFileError) as caught:
        EngineDirectory.open(path)
    return str(caught.value)


def test_a_complete_directory_opens_and_says_what_it_is(engine: Path) -> None:
    directory = EngineDirectory.open(engine)
    assert directory.info() == EngineInfo(
        name="tiny-fp16", target="cpu", architecture="LlamaForCausalLM", dtype="float16", digest="e" * 64,
        vocab_size=320, max_seq_len=64, max_batch_size=4, max_num_tokens=32,
    )  # fmt: skip
    assert directory.generation_config == {"eos_token_id": 2}
    assert directory.hf_config == {}
    directory.verify()


def test_a_relative_path_has_the_name_of_its_folder(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(engine)
    assert EngineDirectory.open(Path()).info().name == "tiny-fp16"


def test_the_manifest_survives_its_json() -> None:
    manifest = replace(MANIFEST, files={"rank0.engine": FileRecord(1, "f" * 64)})
    assert Manifest.from_json(manifest.to_json()) == manifest
    quantized = replace(manifest, options={**manifest.options, "quantization": "int8"})
    assert (manifest.dtype, quantized.dtype) == ("float16", "float16+int8")


def test_every_missing_and_truncated_file_is_named(engine: Path) -> None:
    (engine / "config.json").unlink()
    with (engine / "rank0.engine").open("r+b") as file:
        file.truncate(100)
    message = refusal(engine)
    assert "config.json is missing" in message
    assert "rank0.engine has 100 bytes, but the manifest says 4096" in message


def test_a_flipped_bit_in_a_small_file_is_found_at_open(engine: Path) -> None:
    flip_bit(engine / "rank0.engine", 77)
    assert "rank0.engine was changed" in refusal(engine)


def test_a_flipped_bit_in_a_large_file_is_found_by_verify(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "HASHED_AT_OPEN_BYTES", 1000)
    flip_bit(engine / "rank0.engine", 77)
    directory = EngineDirectory.open(engine)
    with pytest.raises(EngineFileError, match=r"rank0\.engine was changed"):
        directory.verify()


def test_verify_counts_every_byte_and_names_every_file(engine: Path) -> None:
    directory = EngineDirectory.open(engine)
    pieces: list[int] = []
    directory.verify(pieces.append)
    assert sum(pieces) == sum(file.stat().st_size for file in engine.iterdir() if file.name != "manifest.json")
    flip_bit(engine / "rank0.engine", 0)
    flip_bit(engine / "config.json", 0)
    with pytest.raises(EngineFileError, match=r"(?s)2 problems.*config\.json.*rank0\.engine"):
        directory.verify()


def test_an_edited_manifest_is_refused(engine: Path) -> None:
    path = engine / "manifest.json"
    path.write_text(path.read_text().replace('"max_batch_size": 4', '"max_batch_size": 400'))
    assert "changed after the build" in refusal(engine)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b'{"format_version": 1}'])
def test_a_damaged_manifest_is_refused(engine: Path, content: bytes) -> None:
    (engine / "manifest.json").write_bytes(content)
    assert "manifest.json" in refusal(engine)


def test_another_format_version_is_refused_with_what_to_do(engine: Path) -> None:
    content = json.loads((engine / "manifest.json").read_text())
    (engine / "manifest.json").write_text(json.dumps(content | {"format_version": 99}))
    message = refusal(engine)
    assert "format version 99" in message
    assert "llmserve build" in message


def test_file_names_may_not_leave_the_directory(engine: Path) -> None:
    outside = replace(MANIFEST, files={"../../secret": FileRecord(1, "f" * 64)})
    (engine / "manifest.json").write_text(outside.to_json())
    assert "not a valid file name in an engine directory" in refusal(engine)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="llmserve build"):
        EngineDirectory.open(tmp_path / "nothing")


def test_foreign_paths_are_named_for_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file" in refusal(file)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "not an engine directory" in refusal(empty)

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    assert f"llmserve build {checkpoint}" in refusal(checkpoint)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"pretrained_config": {}, "build_config": {}}')
    assert "TensorRT-LLM engine" in refusal(foreign)

    repository = tmp_path / "repository"
    (repository / "model").mkdir(parents=True)
    (repository / "model/config.pbtxt").write_text("")
    assert "--model-repository" in refusal(repository)
