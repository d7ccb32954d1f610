"""Blocks in files: found as they were written, and whatever is wrong with one is a miss."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.engine.base import EngineInfo
from llmserve.engine.fake import FAKE_RUNNER_INFO
from llmserve.engine.kv_files.block_files import ABANDONED_S, BlockFiles, block_files, state_key, written_files
from llmserve.engine.settings import GpuSettings
from llmserve.errors import InvalidArgument
from llmserve.scheduler.blocks import hash_block
from llmserve.scheduler.settings import NO_WINDOWS, WindowedLayers
from llmserve.scheduler.windows import windowed_keys

SIZE = 64
FILE_BYTES = SIZE + 16 + 32


def block(number: int) -> tuple[bytes, bytes]:
    """Its hash and content."""
    return hash_block(b"", [number]), bytes([number]) * SIZE


def files(folder: Path, engine: str = "engine", max_bytes: int = 2**20) -> BlockFiles:
    return BlockFiles(folder, engine, SIZE, max_bytes)


def paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_is_written_is_read_by_others_too(tmp_path: Path) -> None:
    here, there = files(tmp_path), files(tmp_path)
    block_hash, content = block(1)
    assert here.read(block_hash) is None
    assert here.write(block_hash, content)
    assert there.read(block_hash) == content
    assert there.write(block_hash, content)
    assert [path.stat().st_size for path in paths(tmp_path)] == [FILE_BYTES]
    assert files(tmp_path, "another engine").read(block_hash) is None


def test_what_killed_servers_have_left_unfinished_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "another engine/00"
    folder.mkdir(parents=True)
    for name, age_s in (("unfinished-old", 2 * ABANDONED_S), ("unfinished-new", 0), ("notes", 2 * ABANDONED_S)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age_s,) * 2)
    assert files(tmp_path).write(*block(1))
    assert {path.name for path in folder.iterdir()} == {"unfinished-new", "notes"}


def test_a_state_has_the_hash_of_the_block_before_it(tmp_path: Path) -> None:
    settings = GpuSettings(kv_cache_dir=str(tmp_path))
    info = EngineInfo("e", "cpu", "E", "float16", "d" * 64, 83, 96, 8, 96, kernels="avx2")
    sizes = replace(FAKE_RUNNER_INFO, block_bytes=SIZE, state_bytes=24)
    here = block_files(settings, info, sizes)
    assert here is not None
    states = [state_key(block(number)[0]) for number in range(3)]
    for number, key in enumerate(states):
        assert here.write(*block(number))
        assert here.write(key, bytes([number]) * 24)
    assert [here.read(key) for key in (block(1)[0], states[1])] == [bytes([1]) * SIZE, bytes([1]) * 24]
    for place, key in enumerate((*states, *(block(number)[0] for number in range(3)))):
        os.utime(next(path for path in paths(tmp_path) if path.name == key.hex()), (place, place))
    assert here.latest(1, 2) == [states[1], states[2], block(2)[0]]
    written = written_files(tmp_path)
    assert written is not None
    found, layers = written
    assert (found.block_bytes, found.state_bytes, found.read(states[2])) == (SIZE, 24, bytes([2]) * 24)
    assert layers == NO_WINDOWS
    other = block_files(settings, info, replace(sizes, state_bytes=28))
    plain = block_files(settings, info, replace(sizes, state_bytes=0))
    assert other is not None
    assert plain is not None
    assert not other.has(states[0])
    assert not plain.has(block(0)[0])


@pytest.mark.parametrize("state_bytes", [0, 24])
def test_a_block_of_a_window_has_the_number_of_its_table(tmp_path: Path, state_bytes: int) -> None:
    settings = GpuSettings(kv_cache_dir=str(tmp_path))
    info = EngineInfo("e", "cpu", "E", "float16", "d" * 64, 83, 96, 8, 96, kernels="avx512")
    layers = WindowedLayers(window=128, num_tables=3)
    sizes = replace(FAKE_RUNNER_INFO, block_bytes=SIZE, state_bytes=state_bytes, windowed_layers=layers)
    here = block_files(settings, info, sizes)
    assert here is not None
    keys = windowed_keys(block(0)[0], 3)
    assert all(here.write(key, bytes([place]) * SIZE) for place, key in enumerate(keys))
    assert sorted(here.latest(3)) == keys
    written = written_files(tmp_path)
    assert written is not None
    found, read = written
    assert [found.read(key) for key in keys] == [bytes([place]) * SIZE for place in range(3)]
    assert (found.block_bytes, found.state_bytes, read) == (SIZE, state_bytes, layers)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def put_another_in_its_place(path: Path) -> None:
    other = files(path.parents[2])
    other.write(*block(2))
    (second,) = set(paths(path.parents[2])) - {path}
    second.rename(path)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [cut, empty, flip, put_another_in_its_place, make_a_folder])
def test_a_damaged_file_is_a_miss_and_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    here = files(tmp_path)
    block_hash, content = block(1)
    here.write(block_hash, content)
    damage(paths(tmp_path)[0])
    assert here.read(block_hash) is None
    assert here.read(block_hash) is None
    assert len(caplog.records) == 1
    if damage is not make_a_folder:  # the next one that computes it writes it again
        assert here.write(block_hash, content)
        assert here.read(block_hash) == content


def test_the_least_recently_used_make_room_whosever_they_are(tmp_path: Path) -> None:
    old, new = files(tmp_path, "old engine", 10 * FILE_BYTES), files(tmp_path, "new engine", 10 * FILE_BYTES)
    for number in range(8):
        old.write(*block(number))
    for place, number in enumerate((*range(1, 8), 0)):
        path = next(path for path in paths(tmp_path) if path.name == block(number)[0].hex())
        os.utime(path, (place, place))  # the first was used last
    foreign = [tmp_path / "notes.txt", tmp_path / "old engine" / "ab" / "notes.txt", tmp_path / "x" / "ab" / "y"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
    for number in range(4):
        assert new.write(*block(number))
    assert all(path.exists() for path in foreign)
    assert sum(path.stat().st_size for path in set(paths(tmp_path)) - set(foreign)) <= 10 * FILE_BYTES
    assert old.read(block(0)[0]) is not None
    assert old.read(block(1)[0]) is None
    assert all(new.read(block(number)[0]) for number in range(4))


def test_a_block_larger_than_the_limit_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = files(tmp_path, max_bytes=SIZE)
    assert not here.write(*block(1))
    assert not here.write(*block(2))
    assert paths(tmp_path) == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_nothing_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    here = files(tmp_path)
    here.write(*block(1))

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        assert not here.write(*block(2))
        assert not here.write(*block(3))
    (line,) = caplog.messages
    assert os.strerror(number) in line
    assert len(paths(tmp_path)) == 1, "something unfinished is left"
    assert here.read(block(1)[0]) is not None
    assert here.write(*block(2))


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=r"the folder of the KV cache, .*file/folder: Not a directory"):
        files(tmp_path / "file" / "folder")
