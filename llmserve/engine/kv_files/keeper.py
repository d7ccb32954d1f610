"""What one engine keeps in files of its KV cache, and takes from there. Files are read and written beside the steps.

When a block falls out of the pool, its content is copied before the next step overwrites it, and a thread writes it.
When the engine is closed, the blocks that are left follow. An engine that was started again reads those used last,
while the pool has room. A request whose prompt goes on where the pool ends waits until another thread has read what
there is; then its blocks are in the pool, as if they had never left it.

Where the network has states, those that sequences may start from are kept likewise, and blocks are of use up to the
last of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from threading import Event

from llmserve.engine.base import BlockRunner
from llmserve.engine.kv_files.block_files import HASH_BYTES, BlockFiles, is_state, state_key
from llmserve.engine.posted import Post
from llmserve.errors import Unavailable
from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.scheduler import Scheduler
from llmserve.scheduler.sequence import Sequence

MAX_UNWRITTEN = 256 * 2**20  # bytes that wait to be written; what falls out of the pool meanwhile is lost
MAX_FETCHED = 2**30  # bytes of a prompt
PUT_AT_ONCE = 8 * 2**20  # bytes that are put into the pool between two steps when the engine has begun
MAX_KNOWN = 2**18  # hashes that are remembered
END_S = 10.0  # that blocks may take to be written when the engine is closed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The sequences of a request that has waited, and what was read of its prompt: blocks from `first` on, and perhaps
    the state behind the last of them."""

    sequences: Seq[Sequence]
    first: int
    contents: Seq[bytes]
    state: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    """Blocks or states: who owns which, how the runner takes them out and puts them back, and their keys."""

    pool: BlockPool
    fallen_out: list[tuple[int, bytes]]
    read: Callable[[int], bytes]
    write: Callable[[int, bytes], None]
    key: Callable[[bytes], bytes]  # from the hash of a block


class KvKeeper:
    """Everything but `come_back` is called by the thread that plans."""

    def __init__(
        self,
        files: BlockFiles,
        runner: BlockRunner,
        scheduler: Scheduler,
        come_back: Callable[[Fetched], None],
        post: Post,
    ) -> None:
        """`come_back` is called with what `fetch` has begun, in another thread. What was used last is put into the pool
        with `post`: nobody waits for it, and nothing gives way to it."""
        self.num_stored = 0  # blocks written
        self.num_restored = 0  # blocks read
        self._files = files
        self._scheduler = scheduler
        self._come_back = come_back
        pool, slots = scheduler.pool, scheduler.states.slots
        self._blocks = _Kind(pool, pool.watch_evicted(), runner.read_block, runner.write_block, bytes)
        self._states = _Kind(slots, slots.watch_evicted(), runner.read_state, runner.write_state, state_key)
        self._known: set[bytes] = set()  # keys of what has been written or read
        files.on_removed = self._known.discard
        self._unwritten: dict[bytes, bytes] = {}  # contents that wait to be written, by key
        self._num_given, self._num_done = 0, 0  # bytes to be written, and written: each has one thread that counts
        self._is_closing = Event()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="llmserve-kv-reader")
        self._first_reader = ThreadPoolExecutor(1, thread_name_prefix="llmserve-kv-first-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="llmserve-kv-writer")
        # A listener would hear of tokens, and files do not say them.
        if not pool.has_listener and (keys := files.latest(pool.num_blocks, slots.num_blocks)):
            self._first_reader.submit(self._begin, keys, post)

    def fetch(self, sequences: Seq[Sequence]) -> bool:
        """Whether files are looked through for the prompt of these, a request's: they come back."""
        pool, hashes = self._scheduler.pool, self._scheduler.shareable_hashes(sequences[0])
        first = len(pool.match(hashes))
        room = min(pool.num_free - first, MAX_FETCHED // self._files.block_bytes)
        hashes = hashes[: first + max(0, room)]
        states = self._scheduler.states.known_behind(hashes) if self._has_states else set()
        if first == len(hashes) and (first in states or not (first and self._has_states)):
            return False
        self._reader.submit(self._read, sequences, first, states, hashes)
        return True

    def restore(self, fetched: Fetched) -> None:
        """Put what was read into the pool. What somebody else has computed meanwhile stays."""
        scheduler, sequence = self._scheduler, fetched.sequences[0]
        pool, size = scheduler.pool, scheduler.config.block_size
        hashes = scheduler.shareable_hashes(sequence)[: fetched.first + len(fetched.contents)]
        if len(pool.match(hashes[: fetched.first])) < fetched.first:  # it has fallen out itself: the rest is of no use
            return
        here = [block for block_hash in hashes for block in pool.match((block_hash,))]
        places = [place for place in range(fetched.first, len(hashes)) if not pool.match(hashes[place : place + 1])]
        pool.touch(here)
        contents: dict[int, bytes] = {}
        for place in reversed(places[: max(0, pool.num_free - len(here))]):  # the end falls out first
            parent = hashes[place - 1] if place else sequence.cache_root
            token_ids = sequence.token_ids[place * size : (place + 1) * size]
            contents[pool.adopt(hashes[place], parent, token_ids)] = fetched.contents[place - fetched.first]
            self._remember(hashes[place])
        pool.touch(here)
        self.keep()
        for block, content in contents.items():
            self._blocks.write(block, content)
        self.num_restored += len(contents)
        if fetched.state is not None and hashes and len(pool.match(hashes)) == len(hashes):
            self._restore_state(hashes[-1], fetched.state)

    def _restore_state(self, block_hash: bytes, content: bytes) -> None:
        slots = self._states.pool
        if slots.num_free > 1 and not slots.match((block_hash,)):  # the sequence needs one of its own, too
            state = slots.adopt(block_hash, b"", ())
            self.keep()
            self._states.write(state, content)
            self._remember(state_key(block_hash))

    def keep(self) -> None:
        """Copy what has fallen out of the pools, before anything is written there."""
        for kind in (self._blocks, self._states):
            for place, block_hash in kind.fallen_out:
                self._save(kind, place, block_hash)
            kind.fallen_out.clear()

    def close(self, *, saves: bool) -> None:
        """`saves`: what is still in the pool, as far as there is time."""
        self._is_closing.set()
        self._reader.shutdown(cancel_futures=True)
        self._first_reader.shutdown(cancel_futures=True)
        try:
            if saves:
                self._save_all(time.monotonic() + END_S)
        except TimeoutError:
            logger.warning("the KV cache was not written to its folder in %g s: some of it is lost", END_S)
        self._writer.shutdown(cancel_futures=True)

    def _save_all(self, deadline: float) -> None:
        for kind in (self._states, self._blocks):
            for block_hash, place in kind.pool.known_blocks():
                if self._num_given - self._num_done >= MAX_UNWRITTEN:
                    self._wait_for_writer(deadline)
                self._save(kind, place, block_hash)
        self._wait_for_writer(deadline)

    def _wait_for_writer(self, deadline: float) -> None:
        """Raises `TimeoutError`."""
        self._writer.submit(int).result(deadline - time.monotonic())  # behind what waits

    def _save(self, kind: _Kind, place: int, block_hash: bytes) -> None:
        key = kind.key(block_hash)
        if key in self._known or self._num_given - self._num_done >= MAX_UNWRITTEN:
            return
        self._remember(key)
        content = kind.read(place)
        self._num_given += len(content)
        self._unwritten[key] = content
        self._writer.submit(self._write, key, content)

    def _remember(self, key: bytes) -> None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()  # the files themselves are looked at then
        self._known.add(key)

    def _write(self, key: bytes, content: bytes) -> None:
        try:
            if self._files.write(key, content):
                self.num_stored += not is_state(key)
            else:
                self._known.discard(key)
        finally:
            self._unwritten.pop(key, None)
            self._num_done += len(content)

    def _begin(self, keys: Seq[bytes], post: Post) -> None:
        try:
            for contents in self._in_portions(keys):
                post(partial(self._adopt, contents)).result()
        except Unavailable:  # the engine has been closed
            return
        except Exception:  # the border: without these blocks, prompts are computed
            logger.exception("the KV cache does not begin with its folder's blocks")

    def _in_portions(self, keys: Seq[bytes]) -> Iterator[Mapping[bytes, bytes]]:
        """What is there, until the engine is closed."""
        contents: dict[bytes, bytes] = {}
        num_bytes = 0
        for key in keys:
            if self._is_closing.is_set():
                return
            if (content := self._files.read(key)) is not None:
                contents[key] = content
                num_bytes += len(content)
            if num_bytes >= PUT_AT_ONCE:
                yield contents
                contents, num_bytes = {}, 0
        if contents:
            yield contents

    def _adopt(self, contents: Mapping[bytes, bytes]) -> None:
        self.keep()  # of what the last step has given away, a place may be free again
        for key, content in contents.items():
            kind = self._states if is_state(key) else self._blocks
            block_hash = key[:HASH_BYTES]
            if kind.pool.has_blank and not kind.pool.match((block_hash,)):
                kind.write(kind.pool.adopt(block_hash, b"", ()), content)
                self._remember(key)
                self.num_restored += kind is self._blocks

    def _read(self, sequences: Seq[Sequence], first: int, states: Set[int], hashes: Seq[bytes]) -> None:
        """`first`: blocks that are in the pool; `states`: numbers of blocks behind which there is a state."""
        contents: list[bytes] = []
        num_blocks, state = len(hashes), None
        try:
            if self._has_states:
                num_blocks, state = self._last_state(hashes, first, states)
            for block_hash in hashes[first:num_blocks]:
                if (content := self._found(block_hash)) is None:
                    break
                contents.append(content)
        finally:
            is_whole = first + len(contents) >= num_blocks
            self._come_back(Fetched(sequences, min(first, num_blocks), contents, state if is_whole else None))

    def _last_state(self, hashes: Seq[bytes], first: int, states: Set[int]) -> tuple[int, bytes | None]:
        """The most blocks, all in the pool or in files, behind which there is a state; and that state, if in a file."""
        there = takewhile(lambda key: key in self._unwritten or self._files.has(key), hashes[first:])
        for num_blocks in range(first + sum(1 for _ in there), 0, -1):
            if num_blocks in states:
                return num_blocks, None
            if (state := self._found(state_key(hashes[num_blocks - 1]))) is not None:
                return num_blocks, state
        return 0, None

    def _found(self, key: bytes) -> bytes | None:
        return self._unwritten.get(key) or self._files.read(key)

    @property
    def _has_states(self) -> bool:
        return self._scheduler.config.num_states > 0
