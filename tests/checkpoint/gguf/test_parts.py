"""Files that gguf-split has divided are one checkpoint, and parts that do not belong together are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmserve.builder.options import BuildOptions
from llmserve.checkpoint.reader import Checkpoint
from llmserve.cli.build import default_output_dir
from llmserve.errors import CheckpointError
from tests.gguf_files import add_metadata, finish, make_gguf

NAMES = tuple(f"m-{no:05}-of-00003.gguf" for no in (1, 2, 3))


@pytest.fixture(name="parts")
def _parts(tmp_path: Path) -> list[Path]:
    """Of a checkpoint with 21 tensors."""
    make_gguf(tmp_path / "parts" / "m.gguf", tokenizer="pieces", split={"split_max_tensors": 8})
    parts = sorted((tmp_path / "parts").iterdir())
    assert tuple(part.name for part in parts) == NAMES
    return parts


def problem_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def write_part(path: Path, metadata: dict[str, Any], *tensors: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, metadata)
    for name in tensors:
        writer.add_tensor(name, np.ones(64, np.float32))
    finish(writer)


@pytest.mark.parametrize("given", range(4), ids=["first", "second", "third", "folder"])
def test_parts_are_the_file_that_they_were_made_of(given: int, parts: list[Path], tmp_path: Path) -> None:
    whole = make_gguf(tmp_path / "m.gguf", tokenizer="pieces")
    path = [*parts, tmp_path / "parts"][given]
    with Checkpoint.open(whole) as wanted, Checkpoint.open(path) as found:
        assert found.file_names == NAMES
        assert found.config == wanted.config
        assert found.text_file("tokenizer.model") == wanted.text_file("tokenizer.model") is not None
        assert found.tensors == wanted.tensors
        assert all(np.array_equal(found.read(name), wanted.read(name)) for name in wanted.tensors)
        with Checkpoint.open(parts[0]) as first:
            assert found.digest() == first.digest()


def test_the_first_part_may_have_no_tensors(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf", split={"split_max_tensors": 8, "small_first_shard": True})
    with Checkpoint.open(tmp_path) as found:
        assert len(found.file_names) == 4
        assert found.read("model.norm.weight").shape == (64,)


def test_the_engine_has_the_name_of_the_model() -> None:
    options = BuildOptions(dtype="float32")
    assert default_output_dir(Path(NAMES[1]), options) == default_output_dir(Path("m.gguf"), options)


def test_a_file_that_was_joined_may_keep_its_name(tmp_path: Path) -> None:
    with Checkpoint.open(make_gguf(tmp_path / NAMES[0])) as found:
        assert found.file_names == NAMES[:1]


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[0].unlink()
    parts[2].unlink()
    for path in (parts[1], parts[1].parent):
        message = problem_of(path)
        assert f"{NAMES[1]} is one of 3 parts, and these are missing beside it: {NAMES[0]}, {NAMES[2]}" in message


def test_a_part_that_git_lfs_has_not_downloaded(parts: list[Path]) -> None:
    parts[2].write_text("version https://git-lfs.github.com/spec/v1\n")
    assert f"{NAMES[2]} is a Git LFS pointer" in problem_of(parts[0])


def test_a_part_without_its_number(parts: list[Path]) -> None:
    assert "other.gguf is one of 3 parts, but its name does not say so" in problem_of(
        parts[0].rename(parts[0].with_name("other.gguf"))
    )


def test_parts_that_do_not_fit_together(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    message = problem_of(parts[0])
    assert f"{NAMES[2]} has split.no 1 instead of 2" in message
    assert f"is both in {NAMES[1]} and in {NAMES[2]}" in message
    assert "they have 16 tensors, but split.tensors.count is 21" in message


def test_a_part_of_another_division(parts: list[Path]) -> None:
    write_part(parts[2], {"split.no": 2, "split.count": 4}, "output_norm.weight")
    assert f"{NAMES[2]} has split.count 4 instead of 3" in problem_of(parts[0])
