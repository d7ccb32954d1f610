"""Opening a checkpoint folder: every layout, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from llmserve.checkpoint.expanded import write_text_files
from llmserve.checkpoint.reader import Checkpoint
from llmserve.checkpoint.stored_tensor import TensorInfo
from llmserve.core import TOKENIZER_FILES
from llmserve.errors import CheckpointError
from tests.checkpoints import DTYPES, FORMATS, KINDS, make_checkpoint, random_tensors, write_json

KIND = "baichuan2-7b"
SHARD_1 = "model-00001-of-00002.safetensors"
SHARD_2 = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def checkpoint(path: Path, **options: Any) -> Path:
    return make_checkpoint(path, KIND, with_tokenizer=False, **options)


def problems_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("format", FORMATS)
def test_every_layout_gives_the_same_tensors(format: str, dtype: str, tmp_path: Path) -> None:
    wanted = random_tensors(KINDS[KIND], dtype=dtype, seed=3)
    with Checkpoint.open(checkpoint(tmp_path, format=format, dtype=dtype, seed=3)) as found:
        assert set(found.tensors) == set(wanted)
        for name, tensor in wanted.items():
            assert found.tensors[name] == TensorInfo(dtype, tensor.shape, tensor.nbytes)
            assert found.read(name).dtype == DTYPES[dtype]
            assert np.array_equal(found.read(name), tensor)


def test_configs(tmp_path: Path) -> None:
    with Checkpoint.open(checkpoint(tmp_path)) as found:
        assert found.config["model_type"] == "baichuan"
        assert found.generation_config["assistant_token_id"] == 196
    (tmp_path / "generation_config.json").unlink()
    with Checkpoint.open(tmp_path) as found:
        assert found.generation_config == {}


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    checkpoint(tmp_path, format="bin", seed=1)
    checkpoint(tmp_path, format="safetensors", seed=2)
    wanted = random_tensors(KINDS[KIND], dtype="float32", seed=2)["lm_head.weight"]
    with Checkpoint.open(tmp_path) as found:
        assert np.array_equal(found.read("lm_head.weight"), wanted)


def test_a_tensor_outlives_its_checkpoint(tmp_path: Path) -> None:
    for format in ("safetensors", "bin"):
        with Checkpoint.open(checkpoint(tmp_path / format, format=format)) as found:
            tensor = found.read("model.norm.weight")
        assert np.isfinite(tensor).all()


def test_unknown_tensor(tmp_path: Path) -> None:
    with Checkpoint.open(checkpoint(tmp_path)) as found, pytest.raises(CheckpointError, match=r"no tensor nothing"):
        found.read("nothing")


@pytest.mark.parametrize("format", FORMATS)
def test_digest_depends_on_content_only(format: str, tmp_path: Path) -> None:
    original = checkpoint(tmp_path / "original", format=format)
    copy = tmp_path / "some" / "copy"
    shutil.copytree(original, copy, copy_function=shutil.copy)  # new modification times
    (copy / "README.md").write_text("not part of the network")
    with Checkpoint.open(original) as first, Checkpoint.open(copy) as second:
        digest = first.digest()
        assert len(bytes.fromhex(digest)) == 32
        assert second.digest() == digest
    config = json.loads((copy / "config.json").read_text())
    write_json(copy / "config.json", config | {"rms_norm_eps": 1e-5})
    with Checkpoint.open(copy) as changed:
        assert changed.digest() != digest
    with Checkpoint.open(checkpoint(tmp_path / "other", format=format, seed=9)) as other:
        assert other.digest() != digest


def test_the_folder_is_missing_or_empty(tmp_path: Path) -> None:
    assert "does not exist; give a Hugging Face folder or a .gguf file" in problems_of(tmp_path / "nothing")
    (tmp_path / "text").touch()
    assert "is neither a folder nor a .gguf file" in problems_of(tmp_path / "text")
    message = problems_of(tmp_path)
    assert "config.json is missing" in message
    assert "no weights: none of model.safetensors, pytorch_model.bin, model.safetensors.index.json" in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "config.json is not valid JSON"),
        (b"", "config.json is not valid JSON"),
        (b"[]", "config.json must be a JSON object, not list"),
        (b"\xff\xfe", "config.json is not valid JSON"),
        (b"[" * 100_000, "config.json is not valid JSON"),
        (b'{"hidden_size": 64, "hidden_size": 128}', "key 'hidden_size' appears twice"),
    ],
    ids=["cut", "empty", "list", "not UTF-8", "deep", "duplicate key"],
)
def test_a_corrupt_config(content: bytes, problem: str, tmp_path: Path) -> None:
    (checkpoint(tmp_path) / "config.json").write_bytes(content)
    assert problem in problems_of(tmp_path)


def test_a_corrupt_generation_config(tmp_path: Path) -> None:
    (checkpoint(tmp_path) / "generation_config.json").write_text("{]")
    assert "generation_config.json is not valid JSON" in problems_of(tmp_path)


def test_config_is_a_folder(tmp_path: Path) -> None:
    (checkpoint(tmp_path) / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert "config.json cannot be read" in problems_of(tmp_path)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_refused_by_name(name: str, keep: float, tmp_path: Path) -> None:
    checkpoint(tmp_path, format="safetensors" if name.endswith("safetensors") else "bin")
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(len(content) * keep)])
    assert f"{name} is damaged" in problems_of(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
def test_a_git_lfs_pointer_is_told_from_weights(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    assert f"{name} is a Git LFS pointer, not the file itself; run `git lfs pull`" in problems_of(tmp_path)


def test_a_git_lfs_pointer_is_no_tokenizer(tmp_path: Path) -> None:
    (checkpoint(tmp_path) / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with Checkpoint.open(tmp_path) as found, pytest.raises(CheckpointError) as caught:
        found.text_file("tokenizer.json")
    assert f"{tmp_path}/tokenizer.json is a Git LFS pointer, not the file itself; run" in str(caught.value)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    with (checkpoint(tmp_path) / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "model.safetensors is damaged" in problems_of(tmp_path)


def test_a_hostile_safetensors_header(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path) / "model.safetensors"
    outside = {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}}
    for header in (b"{}" * 3, b"\xff" * 8, json.dumps(outside).encode()):
        weights.write_bytes(struct.pack("<Q", len(header)) + header)
        assert "model.safetensors is damaged" in problems_of(tmp_path)
    weights.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert "model.safetensors is damaged" in problems_of(tmp_path)


def test_an_unreadable_dtype_is_described_but_not_read(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path) / "model.safetensors"
    save_file({"x": np.ones((2, 2), ml_dtypes.float8_e5m2)}, weights)
    with Checkpoint.open(tmp_path) as found:
        assert found.tensors["x"].dtype == "F8_E5M2"
        with pytest.raises(CheckpointError, match="tensor x has dtype F8_E5M2"):
            found.read("x")


@pytest.mark.parametrize("format", ["sharded", "bin-sharded"])
def test_missing_shards_are_all_named(format: str, tmp_path: Path) -> None:
    shards = sorted(path for path in checkpoint(tmp_path, format=format).iterdir() if "-of-" in path.name)
    for shard in shards:
        shard.unlink()
    message = problems_of(tmp_path)
    assert "(2 problems)" in message
    assert all(f"{shard.name} is missing" in message for shard in shards)


def edit_index(path: Path, edit: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    write_json(path / INDEX, edit(index))


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    checkpoint(tmp_path, format="sharded")
    edit_index(tmp_path, lambda index: {"weight_map": index["weight_map"] | {"ghost": SHARD_1}})
    assert f"{INDEX} lists tensor ghost in {SHARD_1}, which does not have it" in problems_of(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"x": 3}}])
def test_an_index_without_a_map(index: dict[str, Any], tmp_path: Path) -> None:
    checkpoint(tmp_path, format="sharded")
    write_json(tmp_path / INDEX, index)
    assert f"{INDEX} must have a weight_map" in problems_of(tmp_path)


def test_an_index_that_points_outside_the_folder(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", format="safetensors")
    checkpoint(tmp_path / "b", format="sharded")
    edit_index(tmp_path / "b", lambda index: {"weight_map": {"x": "../a/model.safetensors"}})
    assert "'../a/model.safetensors', which is not a plain file name" in problems_of(tmp_path / "b")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    checkpoint(tmp_path, format="sharded")
    shutil.copy(tmp_path / SHARD_1, tmp_path / SHARD_2)
    assert f"tensor model.embed_tokens.weight is in both {SHARD_1} and {SHARD_2}" in problems_of(tmp_path)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    checkpoint(tmp_path / "c", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (tmp_path / "c" / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with Checkpoint.open(tmp_path / "c") as found:
        assert found.tensors
    assert not (tmp_path / "ran").exists()


def test_an_expanded_checkpoint_has_all_text_files_of_an_engine(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "given", "llama", with_tokenizer=False)
    names = (*TOKENIZER_FILES, "generation_config.json")
    for name in names:
        (tmp_path / "given" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "given" / name).write_text("{}")
    with Checkpoint.open(tmp_path / "given") as checkpoint:
        write_text_files(checkpoint, tmp_path / "written")
    assert all((tmp_path / "written" / name).read_text() == "{}" for name in names)
