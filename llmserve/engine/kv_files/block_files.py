"""A folder of KV blocks: `<engine>/<two digits>/<hash of the block>`, one file each.

A block's hash covers all tokens up to its end, so equal hashes mean equal contents: every server writes the same file,
and several may share the folder. The same applies to a block of layers with a window, named by the hash and the number
of its table, and to a state that sequences may start from, named by the hash of the last block before it and `STATE`. A
file is renamed into place and begins with a checksum of its name and content. A faulty file is a miss, and logged once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmserve.engine.base import EngineInfo, RunnerInfo
from llmserve.engine.settings import GpuSettings
from llmserve.errors import InvalidArgument
from llmserve.scheduler.settings import WindowedLayers

MAGIC = b"llmserve KV 1\0\0\0"
CHECKSUM_BYTES = 32
HASH_BYTES = 32
STATE = b"s"  # ends the key of a state
NAME = re.compile(r"[0-9a-f]{64}(73|0[0-9a-f])?")
# Suffix of an engine's name: tables and window of layers with a window, bytes of a state, and bytes of a block.
SIZES = re.compile(r"(?:-(\d+)x(\d+))?(?:-(\d+))?-(\d+)$")
UNFINISHED = "unfinished-"  # prefix of a file that is being written
ABANDONED_S = 3600.0  # after this time, its writer was killed
LEFT = 0.9  # share of the limit that is left after the oldest files have been removed
DEFAULT_MAX_BYTES = 10 * 2**30

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    used_ns: int  # time of its last use
    num_bytes: int
    path: Path


class BlockFiles:
    """Files of one engine, in a folder shared with other engines. One thread writes; any thread may read."""

    def __init__(
        self, folder: Path, engine: str, block_bytes: int, max_bytes: int = DEFAULT_MAX_BYTES, *, state_bytes: int = 0
    ) -> None:
        """`engine`: a folder name for everything besides its hash that a block's content depends on. `max_bytes`: limit
        for all engines' files. Raises `InvalidArgument` if the folder cannot exist. A read-only folder is only read.

        Keys are block hashes, or made from them by `windowed_keys` and `state_key`.
        """
        self._root = folder
        self._folder = folder / engine
        self.block_bytes = block_bytes
        self.state_bytes = state_bytes
        self.on_removed: Callable[[bytes], object] = lambda key: None  # called if this object removes one
        self._max_bytes = max_bytes
        self._num_bytes: int | None = None  # of all files; None: not counted yet
        self._told: set[str] = set()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if not folder.is_dir():
                raise InvalidArgument(f"the folder of the KV cache, {folder}: {error.strerror or error}") from error
            self._tell("no block of this engine can be written", error)

    def has(self, key: bytes) -> bool:
        return self._path(key).exists()

    def read(self, key: bytes) -> bytes | None:
        """The block's content; None if it is missing or damaged."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                head, content = file.read(len(MAGIC) + CHECKSUM_BYTES), file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell("a block cannot be read", error)
            return None
        num_bytes = self.state_bytes if is_state(key) else self.block_bytes
        if len(content) != num_bytes or head != MAGIC + _checksum(key, content):
            self._tell("a block is damaged and will be computed again", path)
            with suppress(OSError):
                path.unlink()
            return None
        return content

    def touch(self, keys: Iterable[bytes], ahead_s: float = 0.0) -> None:
        """Marks them as used now, the last one as the most recent. `ahead_s`: marks them as used later, so that they
        outlast files written until then."""
        now = time.time_ns() + int(1e9 * ahead_s)  # clocks of file systems are coarse
        for place, key in enumerate(keys):
            with suppress(OSError):  # missing, or in a read-only folder
                os.utime(self._path(key), ns=(now + place, now + place))

    def latest(self, num_blocks: int, num_states: int = 0) -> list[bytes]:
        """Keys of this engine's most recently used blocks and states, least recently used first."""
        found = sorted(_found_in(self._folder, "??/*"), key=lambda one: one.used_ns, reverse=True)
        keys, room = [bytes.fromhex(one.path.name) for one in found], {False: num_blocks, True: num_states}
        chosen = []
        for key in keys:
            if room[is_state(key)]:
                room[is_state(key)] -= 1
                chosen.append(key)
        return chosen[::-1]

    def write(self, key: bytes, content: bytes) -> bool:
        """Writes the block; returns whether it is stored now. Removes least recently used blocks to make room."""
        path = self._path(key)
        num_bytes = len(MAGIC) + CHECKSUM_BYTES + len(content)
        if path.exists():
            return True
        try:
            if not self._make_room(num_bytes):
                return False
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._write(path, (MAGIC, _checksum(key, content), content))
        except OSError as error:
            self._tell("a block cannot be written", error)
            return False
        self._num_bytes = (self._num_bytes or 0) + num_bytes
        return True

    @staticmethod
    def _write(path: Path, parts: tuple[bytes, ...]) -> None:
        handle, unfinished = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.writelines(parts)
            os.rename(unfinished, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise

    def _make_room(self, num_bytes: int) -> bool:
        if num_bytes > self._max_bytes:
            self._tell(f"a block of {num_bytes} bytes is larger than the limit", self._max_bytes)
            return False
        if self._num_bytes is None or self._num_bytes + num_bytes > self._max_bytes:
            self._num_bytes = self._trim(num_bytes)
        return True

    def _trim(self, num_bytes: int) -> int:
        """Counts the files again, because other servers write here, too. Returns the number of bytes left."""
        for path in self._root.glob(f"*/??/{UNFINISHED}*"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - ABANDONED_S:
                    path.unlink()
        found = sorted(_found_in(self._root, "*/??/*"), key=lambda one: one.used_ns)
        total = sum(one.num_bytes for one in found)
        if total + num_bytes <= self._max_bytes:
            return total
        for one in found:
            if total + num_bytes <= LEFT * self._max_bytes:
                break
            with suppress(FileNotFoundError):
                one.path.unlink()
            if one.path.is_relative_to(self._folder):
                self.on_removed(bytes.fromhex(one.path.name))
            total -= one.num_bytes
        return max(0, total)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name

    def _tell(self, problem: str, why: object) -> None:
        """Logs a problem once."""
        if problem not in self._told:
            self._told.add(problem)
            logger.warning("KV cache in %s: %s: %s", self._root, problem, why)


def _found_in(folder: Path, pattern: str) -> list[_Found]:
    """Blocks in a folder; other files are ignored."""
    found = []
    for path in folder.glob(pattern):
        with suppress(OSError):  # another server may have removed it
            if NAME.fullmatch(path.name):
                status = path.stat()
                found.append(_Found(status.st_mtime_ns, status.st_size, path))
    return found


def state_key(block_hash: bytes) -> bytes:
    """Key of the state after this block."""
    return block_hash + STATE


def is_state(key: bytes) -> bool:
    return key[HASH_BYTES:] == STATE


def is_whole(key: bytes) -> bool:
    """Whether the key counts as a block: not a state, and not an additional block of layers with a window."""
    return len(key) == HASH_BYTES


def written_files(folder: Path) -> tuple[BlockFiles, WindowedLayers] | None:
    """The files of the only engine that has written to `folder`; None if there is none."""
    engines = [path.name for path in folder.iterdir()]
    if len(engines) != 1 or (found := SIZES.search(engines[0])) is None:
        return None
    num_tables, window, state_bytes, block_bytes = (int(size or 0) for size in found.groups())
    files = BlockFiles(folder, engines[0], block_bytes, state_bytes=state_bytes)
    return files, WindowedLayers(window, num_tables)


def _checksum(key: bytes, content: bytes) -> bytes:
    checksum = hashlib.sha256(key)
    checksum.update(content)
    return checksum.digest()


def block_files(settings: GpuSettings, info: EngineInfo, runner: RunnerInfo) -> BlockFiles | None:
    """Files in the operator's folder. Contents depend on the engine, its kernels, and the layout of blocks."""
    if not settings.kv_cache_dir:
        return None
    layers, state_bytes, block_bytes = runner.windowed_layers, runner.state_bytes, runner.block_bytes
    windows = (f"{layers.num_tables}x{layers.window}",) if layers.num_tables else ()
    sizes = (*windows, *((state_bytes,) if state_bytes else ()), block_bytes)
    engine = "-".join(map(str, (info.digest, info.kernels, *sizes)))
    max_bytes = settings.kv_cache_disk_size or DEFAULT_MAX_BYTES
    return BlockFiles(Path(settings.kv_cache_dir), engine, block_bytes, max_bytes, state_bytes=state_bytes)
