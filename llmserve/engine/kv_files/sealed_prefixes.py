"""KV blocks of prompt prefixes, computed ahead of time: a file in the engine directory for each kind of kernels.

    MAGIC, a line of JSON (`Header`), the contents of the blocks, and of the states after them if there are any

The manifest has its SHA-256. A file that does not fit this machine, this engine or the manifest is not used, which is
logged; then requests compute their prompts, with the same result.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from llmserve.engine.base import BlockRunner, RunnerInfo
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.scheduler.blocks import ROOT_HASH, hash_block
from llmserve.scheduler.scheduler import Scheduler
from llmserve.scheduler.settings import WindowedLayers
from llmserve.scheduler.windows import keys_read

MAGIC = b"llmserve prefixes 1\n"
COMMAND = "llmserve prefix"

logger = logging.getLogger(__name__)


class PrefixBlock(NamedTuple):
    """A block's parent and tokens; None for a block of layers with a window."""

    parent: bytes | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Header:
    """Everything that the contents depend on, and their prefixes."""

    engine: str  # digest
    kernels: str
    block_size: int  # tokens
    block_bytes: int
    prefixes: tuple[tuple[int, ...], ...]  # token ids
    state_bytes: int = 0  # of each state; 0: the network has none
    window: int = 0  # of layers whose blocks have their own tables, as in `WindowedLayers`
    num_tables: int = 0

    def blocks(self) -> dict[bytes, PrefixBlock]:
        """All prefixes' full blocks, and the blocks of a window before their ends, by key. In the order of the file:
        earlier blocks first."""
        layers, size = WindowedLayers(self.window, self.num_tables), self.block_size
        found: dict[bytes, PrefixBlock] = {}
        for token_ids in self.prefixes:
            hashes = [ROOT_HASH]
            for start in range(0, len(token_ids) - size + 1, size):
                parent, ids = hashes[-1], tuple(token_ids[start : start + size])
                hashes.append(hash_block(parent, ids))
                found[hashes[-1]] = PrefixBlock(parent, ids)
            found |= {key: PrefixBlock() for key in keys_read(layers, hashes[1:], size)}
        return found

    def states(self) -> list[bytes]:
        """Hashes of the blocks followed by a state, in the order of the file: the last block of each prefix."""
        if not self.state_bytes:
            return []
        last = []
        for token_ids in self.prefixes:
            *_, block_hash = replace(self, prefixes=(token_ids,), num_tables=0).blocks()
            last.append(block_hash)
        return list(dict.fromkeys(last))


@dataclass(frozen=True, slots=True)
class SealedPrefixes:
    header: Header
    contents: Sequence[bytes]  # of the header's blocks, then of its states

    def to_bytes(self) -> bytes:
        return b"".join((MAGIC, json.dumps(asdict(self.header)).encode(), b"\n", *self.contents))

    def fill(self, scheduler: Scheduler, runner: BlockRunner) -> None:
        """Puts the blocks into the pool before the first step, as far as they fit. Some may already come from files."""
        pool, slots, blocks = scheduler.pool, scheduler.states.slots, self.header.blocks()
        pool.touch(pool.match(filter(pool.has, blocks)))  # otherwise they would be evicted for the new blocks
        fitting = list(blocks)[: pool.num_free]
        contents = dict(zip(blocks, self.contents, strict=False))
        for block_hash in reversed(fitting):  # the end is evicted first
            if pool.has(block_hash):
                pool.touch(pool.match([block_hash]))
            else:
                runner.write_block(pool.adopt(block_hash, *blocks[block_hash]), contents[block_hash])
        for block_hash, content in zip(self.header.states(), self.contents[len(blocks) :], strict=True):
            if slots.has_blank and not slots.has(block_hash):
                runner.write_state(slots.adopt(block_hash), content)
        logger.info("%d of %d KV blocks of sealed prefixes are in the cache", len(fitting), len(blocks))


def prefix_file(kernels: str) -> str:
    return f"prefixes-{kernels}.kv"


def load_prefixes(directory: EngineDirectory, kernels: str, runner: RunnerInfo) -> SealedPrefixes | None:
    """Prefixes of `directory` that this engine, opened with these kernels, blocks and states, can use."""
    sealed = directory.manifest.prefixes
    if not sealed:
        return None
    try:
        return _read(directory, kernels, runner)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning(
            "the sealed prefixes of %s are not used: %s; compute them again: %s", directory.path, error, COMMAND
        )
        return None


def _read(directory: EngineDirectory, kernels: str, runner: RunnerInfo) -> SealedPrefixes:
    """Reads and checks the file. Raises one of several errors whose messages say what is wrong."""
    name, sealed = prefix_file(kernels), directory.manifest.prefixes
    if name not in sealed:
        raise ValueError(f"they are for other kernels ({', '.join(sorted(sealed))}); this machine has {kernels}")
    data = (directory.path / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != sealed[name].sha256:
        raise ValueError(f"{name} was changed: its SHA-256 is not the one in the manifest")
    line, _, content = data.removeprefix(MAGIC).partition(b"\n")
    document: dict[str, Any] = json.loads(line)
    header = Header(**{**document, "prefixes": tuple(map(tuple, document["prefixes"]))})
    expected = Header(
        directory.manifest.engine_digest, kernels, runner.block_size, runner.block_bytes, header.prefixes,
        runner.state_bytes, runner.windowed_layers.window, runner.windowed_layers.num_tables,
    )  # fmt: skip
    if header != expected:
        raise ValueError(f"{name} belongs to another engine, or its KV blocks have another format")
    num_blocks, num_states = len(header.blocks()), len(header.states())
    sizes = [header.block_bytes] * num_blocks + [header.state_bytes] * num_states
    if len(content) != sum(sizes):
        raise ValueError(
            f"{name} has {len(content)} bytes of blocks, its prefixes {num_blocks} blocks and {num_states} states"
        )
    ends = accumulate(sizes)
    return SealedPrefixes(header, [content[end - size : end] for size, end in zip(sizes, ends, strict=True)])


def seal_file(path: Path, content: bytes) -> None:
    """Writes and renames it, so that a server that has the old file open keeps that file."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.rename(path)
