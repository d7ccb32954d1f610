"""Computes KV blocks of prompt prefixes and seals them in an engine directory (`engine/kv_files/sealed_prefixes.py`).

The engine computes them like any prompt, and writes them as files of its KV cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from llmserve.builder.options import BuildOptions
from llmserve.builder.resolve import resolve
from llmserve.checkpoint.adapters.adapted import open_checkpoint
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.directory.artifact import MANIFEST_FILE, EngineDirectory
from llmserve.engine.directory.manifest import FileRecord
from llmserve.engine.kv_files.block_files import state_key, written_files
from llmserve.engine.kv_files.sealed_prefixes import Header, SealedPrefixes, prefix_file, seal_file
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import InvalidArgument, Unsupported, raise_problems
from llmserve.stages.chat import Message, parse_messages
from llmserve.stages.preprocess import Preprocessor, TextPrompt

GOES_ON = ("A", "7")  # two possible continuations of a prompt: their common beginning is the prefix
USER = "user"


@dataclass(frozen=True, slots=True)
class Prefix:
    """A text, or messages, with which prompts begin."""

    name: str
    text: str = ""
    messages: Sequence[Message] = ()

    @classmethod
    def read(cls, path: Path, *, is_chat: bool) -> Prefix:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"prefix {path} cannot be read: {error}") from error
        try:
            return cls(path.name, messages=parse_messages(text)) if is_chat else cls(path.name, text)
        except InvalidArgument as error:
            raise InvalidArgument(f"prefix {path}: {error}") from error

    def token_ids(self, preprocessor: Preprocessor) -> tuple[int, ...]:
        """The ids that every prompt with this prefix begins with."""
        first, second = (preprocessor.prepare(self._prompt(more)) for more in GOES_ON)
        if first.warning:
            raise InvalidArgument(first.warning)
        pairs = zip(first.input_ids, second.input_ids, strict=False)
        return tuple(token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _prompt(self, more: str) -> TextPrompt:
        if not self.messages:
            return TextPrompt(self.text + more, max_tokens=1)
        asks = self.messages[-1].role != USER
        return TextPrompt(messages=[*self.messages, *([Message(USER, more)] if asks else ())], max_tokens=1)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A summary of what was sealed, for display."""

    file: str
    num_bytes: int
    num_tokens: Sequence[tuple[str, int, int]]  # (name, tokens, tokens that will be found)


def check_prefixes(checkpoint_dir: Path, options: BuildOptions, prefixes: Sequence[Prefix]) -> None:
    """Raise, before a build, the errors that `seal_prefixes` would raise for these prefixes after it."""
    with open_checkpoint(checkpoint_dir, options.adapter) as checkpoint:
        build = resolve(checkpoint, options)
        if build.program.pools:
            raise _makes_no_tokens(checkpoint_dir)
        all_ids = _all_ids(build.encoder.preprocessor(), prefixes, build.options.max_seq_len)
    _check_lengths(prefixes, all_ids, build.options.tokens_per_block)


def seal_prefixes(path: Path, prefixes: Sequence[Prefix], *, threads: int = 0) -> Sealed:
    """Replace the directory's prefixes for this machine's kernels.

    Raises InvalidArgument, which lists all prefixes that the engine does not accept, and Unsupported if the engine
    keeps no KV blocks.
    """
    directory = EngineDirectory.open(path)
    info = directory.info()
    if info.pooling:
        raise _makes_no_tokens(path)
    all_ids = _all_ids(Preprocessor.open(path), prefixes, info.max_seq_len)
    with tempfile.TemporaryDirectory(prefix="llmserve-prefix-") as folder:
        num_tokens = sum(map(len, all_ids)) + info.max_seq_len  # for all of them, and for partly filled blocks
        settings = EngineSettings(threads, max_kv_tokens=num_tokens, gpu=GpuSettings(kv_cache_dir=folder))
        engine = open_engine(path, settings)
        try:
            block_size, kernels = engine.stats().tokens_per_block, engine.info.kernels
            _check_lengths(prefixes, all_ids, block_size)
            asyncio.run(_compute(engine, all_ids))
        finally:
            engine.close()
        sealed = _written(Path(folder), Header(info.digest, kernels, block_size, 0, tuple(all_ids)))
    if sealed is None:
        raise Unsupported(f"{path} does not support prefixes: its target or its network cannot keep KV blocks")
    data = sealed.to_bytes()
    _seal(directory, prefix_file(kernels), data)
    found = [
        (prefix.name, len(ids), len(ids) // block_size * block_size)
        for prefix, ids in zip(prefixes, all_ids, strict=True)
    ]
    return Sealed(prefix_file(kernels), len(data), found)


def _makes_no_tokens(path: Path) -> Unsupported:
    return Unsupported(f"{path} does not generate tokens and keeps no KV blocks, so it does not support prefixes")


def _written(folder: Path, header: Header) -> SealedPrefixes | None:
    """The KV files of the header's prefixes; None if any is missing."""
    if (written := written_files(folder)) is None:
        return None
    files, layers = written
    header = replace(
        header, block_bytes=files.block_bytes, state_bytes=files.state_bytes, window=layers.window,
        num_tables=layers.num_tables,
    )  # fmt: skip
    keys = [*header.blocks(), *map(state_key, header.states())]
    contents = [content for key in keys if (content := files.read(key)) is not None]
    return SealedPrefixes(header, contents) if len(contents) == len(keys) else None


def _all_ids(preprocessor: Preprocessor, prefixes: Sequence[Prefix], max_seq_len: int) -> list[tuple[int, ...]]:
    preprocessor.max_seq_len = max_seq_len
    found: list[tuple[int, ...]] = []
    problems = []
    for prefix in prefixes:
        try:
            ids = prefix.token_ids(preprocessor)
        except InvalidArgument as error:
            problems.append(f"{prefix.name}: {error}")
            continue
        found.append(ids[: max_seq_len - 2])  # a prompt has at least one token more than its prefix, and an answer
        if len(ids) >= max_seq_len:
            problems.append(
                f"{prefix.name} has {len(ids)} tokens, but this engine allows at most {max_seq_len} per sequence, "
                "including the answer"
            )
    raise_problems(InvalidArgument, "the engine does not accept these prefixes", problems)
    return found


def _check_lengths(prefixes: Sequence[Prefix], all_ids: Sequence[Sequence[int]], block_size: int) -> None:
    raise_problems(
        InvalidArgument,
        "these prefixes are too short",
        [
            f"{prefix.name} has {len(ids)} tokens, but a KV block of this engine has {block_size}: none is reused"
            for prefix, ids in zip(prefixes, all_ids, strict=True)
            if len(ids) < block_size
        ],
    )


async def _compute(engine: Engine, all_ids: Sequence[tuple[int, ...]]) -> None:
    """Compute each prefix with one more token, since a state is kept after the last block before it."""
    for ids in all_ids:
        request = GenerateRequest("prefix", (*ids, ids[-1]), SamplingParams(max_tokens=1), speculation=False)
        async with aclosing(engine.submit(request)) as events:
            async for _ in events:
                pass


def _seal(directory: EngineDirectory, name: str, data: bytes) -> None:
    """Write the manifest last: until then, its entry for an older file is a miss."""
    record = FileRecord(len(data), hashlib.sha256(data).hexdigest())
    manifest = replace(directory.manifest, prefixes={**directory.manifest.prefixes, name: record})
    try:
        seal_file(directory.path / name, data)
        seal_file(directory.path / MANIFEST_FILE, manifest.to_json().encode())
    except OSError as error:
        raise InvalidArgument(f"{directory.path} cannot be written: {error.strerror}") from error
