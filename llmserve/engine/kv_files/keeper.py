"""What one engine keeps in files of its KV cache, and takes from there. Files are read and written beside the steps.

When a block falls out of the pool, its content is copied before the next step overwrites it, and a thread writes it.
When the engine is closed, the blocks that are left follow. An engine that was started again reads those used last,
while the pool has room. A request whose prompt goes on where the pool ends waits until another thread has read what
there is; then its blocks are in the pool, as if they had never left it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event

from llmserve.engine.base import BlockRunner
from llmserve.engine.kv_files.block_files import BlockFiles
from llmserve.engine.posted import Post
from llmserve.errors import Unavailable
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
    """The sequences of a request that has waited, and what was read of its prompt: blocks from `first` on."""

    sequences: Seq[Sequence]
    first: int
    contents: Seq[bytes]


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
        self._runner = runner
        self._scheduler = scheduler
        self._come_back = come_back
        self._fallen_out = scheduler.pool.watch_evicted()
        self._known: set[bytes] = set()  # hashes of blocks that have been written or read
        files.on_removed = self._known.discard
        self._unwritten: dict[bytes, bytes] = {}  # contents that wait to be written, by hash
        self._num_given, self._num_done = 0, 0  # bytes to be written, and written: each has one thread that counts
        self._is_closing = Event()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="llmserve-kv-reader")
        self._first_reader = ThreadPoolExecutor(1, thread_name_prefix="llmserve-kv-first-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="llmserve-kv-writer")
        # A listener would hear of tokens, and files do not say them.
        if not scheduler.pool.has_listener and (hashes := files.latest(scheduler.pool.num_blocks)):
            self._first_reader.submit(self._begin, hashes, post)

    def fetch(self, sequences: Seq[Sequence]) -> bool:
        """Whether files are looked through for the prompt of these, a request's: they come back."""
        pool, hashes = self._scheduler.pool, self._scheduler.shareable_hashes(sequences[0])
        first = len(pool.match(hashes))
        room = min(pool.num_free - first, MAX_FETCHED // self._files.block_bytes)
        missing = hashes[first : first + max(0, room)]
        if not missing:
            return False
        self._reader.submit(self._read, sequences, first, missing)
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
            self._runner.write_block(block, content)
        self.num_restored += len(contents)

    def keep(self) -> None:
        """Copy what has fallen out of the pool, before anything is written there."""
        for block, block_hash in self._fallen_out:
            self._save(block, block_hash)
        self._fallen_out.clear()

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
        for block_hash, block in self._scheduler.pool.known_blocks():
            if self._num_given - self._num_done >= MAX_UNWRITTEN:
                self._wait_for_writer(deadline)
            self._save(block, block_hash)
        self._wait_for_writer(deadline)

    def _wait_for_writer(self, deadline: float) -> None:
        """Raises `TimeoutError`."""
        self._writer.submit(int).result(deadline - time.monotonic())  # behind what waits

    def _save(self, block: int, block_hash: bytes) -> None:
        if block_hash in self._known or self._num_given - self._num_done >= MAX_UNWRITTEN:
            return
        self._remember(block_hash)
        content = self._runner.read_block(block)
        self._num_given += len(content)
        self._unwritten[block_hash] = content
        self._writer.submit(self._write, block_hash, content)

    def _remember(self, block_hash: bytes) -> None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()  # the files themselves are looked at then
        self._known.add(block_hash)

    def _write(self, block_hash: bytes, content: bytes) -> None:
        try:
            if self._files.write(block_hash, content):
                self.num_stored += 1
            else:
                self._known.discard(block_hash)
        finally:
            self._unwritten.pop(block_hash, None)
            self._num_done += len(content)

    def _begin(self, hashes: Seq[bytes], post: Post) -> None:
        try:
            num_at_once = max(1, PUT_AT_ONCE // self._files.block_bytes)
            for start in range(0, len(hashes), num_at_once):
                contents: dict[bytes, bytes] = {}
                for block_hash in hashes[start : start + num_at_once]:
                    if self._is_closing.is_set():
                        return
                    if (content := self._files.read(block_hash)) is not None:
                        contents[block_hash] = content
                post(partial(self._adopt, contents)).result()
        except Unavailable:  # the engine has been closed
            return
        except Exception:  # the border: without these blocks, prompts are computed
            logger.exception("the KV cache does not begin with its folder's blocks")

    def _adopt(self, contents: Mapping[bytes, bytes]) -> None:
        pool = self._scheduler.pool
        for block_hash, content in contents.items():
            if pool.has_blank and not pool.match((block_hash,)):
                self._runner.write_block(pool.adopt(block_hash, b"", ()), content)
                self._remember(block_hash)
                self.num_restored += 1

    def _read(self, sequences: Seq[Sequence], first: int, hashes: Seq[bytes]) -> None:
        contents: list[bytes] = []
        try:
            for block_hash in hashes:
                content = self._unwritten.get(block_hash) or self._files.read(block_hash)
                if content is None:
                    break
                contents.append(content)
        finally:
            self._come_back(Fetched(sequences, first, contents))
