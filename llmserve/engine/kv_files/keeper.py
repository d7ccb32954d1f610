"""Keeps KV blocks of one engine in files, and reads them back. Files are read and written during the steps.

When a block is evicted, its content is copied before the next step overwrites it, and a thread writes it. When the
engine is closed, the remaining blocks follow. A restarted engine reads the most recently used blocks while the pool has
room: for START_S before it is ready, the others during its steps. If files may continue a prompt after its blocks in
the pool, the request waits until another thread has read them; then its blocks are in the pool, as if they had never
been evicted.

Blocks of layers with a window and states are kept, too. A prompt's blocks are useful up to the last position for which
the pool or files have everything that a sequence reads there: the blocks of the window before it, and a state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from threading import Event, Lock

from llmserve.engine.base import BlockRunner
from llmserve.engine.kv_files.block_files import HASH_BYTES, BlockFiles, is_state, is_whole, state_key
from llmserve.engine.posted import Post
from llmserve.errors import Unavailable
from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.scheduler import Scheduler
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.windows import windowed_keys

MAX_UNWRITTEN = 256 * 2**20  # bytes that wait to be written; blocks evicted above this are lost
MAX_FETCHED = 2**30  # bytes for one prompt
PUT_AT_ONCE = 8 * 2**20  # bytes that are put into the pool between two steps after the start
TOUCHED_AT_ONCE = 1024  # blocks
START_S = 1.0  # time for reading before the engine is ready
NUM_READERS = 4  # because a file's checksum takes as long as reading it
MAX_KNOWN = 2**18  # hashes that are remembered
END_S = 10.0  # for writing blocks when the engine is closed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The sequences of a request that has waited, and the data read for its prompt, by key."""

    sequences: Seq[Sequence]
    contents: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Blocks or states: their owner, how the runner reads and writes them, and their keys."""

    pool: BlockPool
    fallen_out: list[tuple[int, bytes]]
    read: Callable[[int], bytes]
    write: Callable[[int, bytes], None]
    key: Callable[[bytes], bytes]  # from the hash under which the pool finds it


class KvKeeper:
    """Keeps the blocks of one engine. The planning thread calls everything except `come_back`."""

    def __init__(
        self,
        files: BlockFiles,
        runner: BlockRunner,
        scheduler: Scheduler,
        come_back: Callable[[Fetched], None],
        post: Post,
        wanted: Container[int],
    ) -> None:
        """`come_back` is called from another thread with the result of `fetch`. The most recently used blocks are put
        into the pool here while there is time, and the others later by `post`; none of them evicts a block. `wanted`:
        ids of sequences that still have a consumer."""
        self.num_stored = 0  # blocks written; here and in num_restored, blocks of windows do not count
        self.num_restored = 0  # blocks read
        self._files = files
        self._scheduler = scheduler
        self._come_back = come_back
        self._wanted = wanted
        pool, slots = scheduler.pool, scheduler.states.slots
        self._blocks = _Kind(pool, pool.watch_evicted(), runner.read_block, runner.write_block, bytes)
        self._states = _Kind(slots, slots.watch_evicted(), runner.read_state, runner.write_state, state_key)
        self._known: set[bytes] = set()  # keys that were written or read
        files.on_removed = self._known.discard
        self._unwritten: dict[bytes, bytes] = {}  # contents that wait to be written, by key
        self._num_given, self._num_done = 0, 0  # bytes to be written, and written: each is counted by one thread
        self._is_closing = Event()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="llmserve-kv-reader")
        self._first_reader = ThreadPoolExecutor(1, thread_name_prefix="llmserve-kv-first-reader")
        self._file_readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="llmserve-kv-file-reader")
        self._turn = Lock()  # requests do not share the disk with the initial reading
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="llmserve-kv-writer")
        # A listener would expect tokens, which files do not have.
        last_first = [] if pool.has_listener else files.latest(pool.num_blocks, slots.num_blocks)[::-1]
        if (num_looked_at := self._start(last_first)) < len(last_first):
            self._first_reader.submit(self._go_on, last_first, num_looked_at, post)

    def fetch(self, sequences: Seq[Sequence]) -> bool:
        """Returns whether files are searched for the prompt of a request's sequences; then `come_back` returns them."""
        pool, hashes = self._scheduler.pool, self._scheduler.shareable_hashes(sequences[0])
        first, num_windowed = len(pool.match(hashes)), len(self._scheduler.windows.keys(hashes))
        room = min(pool.num_free - first, MAX_FETCHED // self._files.block_bytes) - num_windowed
        hashes = hashes[: first + max(0, room)]
        if self._longest(hashes, self._is_here) == len(hashes):
            return False
        here = {key for block_hash in hashes for key in self._keys(block_hash) if self._is_here(key)}
        self._reader.submit(self._read, sequences, hashes, here)
        return True

    def restore(self, fetched: Fetched) -> None:
        """Puts blocks that were read into the pool. Blocks computed in the meantime stay; evicted ones are missing."""
        pool, sequence, contents = self._scheduler.pool, fetched.sequences[0], fetched.contents
        hashes = self._scheduler.shareable_hashes(sequence)
        hashes = hashes[: self._longest(hashes, lambda key: key in contents or self._is_here(key))]
        needed = [*hashes, *self._scheduler.windows.keys(hashes)]
        here = pool.match(filter(pool.has, needed))
        missing = [key for key in needed if not pool.has(key)]
        pool.touch(here)
        fitting = missing[: max(0, pool.num_free - len(here))]
        places = {block_hash: place for place, block_hash in enumerate(hashes)}
        # The end is evicted first.
        adopted = {key: self._adopted(key, places.get(key), sequence, hashes) for key in reversed(fitting)}
        pool.touch(here)
        self.keep()
        for key, block in adopted.items():
            self._blocks.write(block, contents[key])
            self._remember(key)
        self.num_restored += sum(map(is_whole, adopted))
        if hashes and state_key(hashes[-1]) in contents and len(fitting) == len(missing):
            self._restore_state(hashes[-1], contents[state_key(hashes[-1])])

    def _adopted(self, key: bytes, place: int | None, sequence: Sequence, hashes: Seq[bytes]) -> int:
        """Returns a block of the pool for the one at this place of the sequence. None: a block of a window."""
        pool, size = self._scheduler.pool, self._scheduler.config.block_size
        if place is None:
            return pool.adopt(key)
        parent = hashes[place - 1] if place else sequence.cache_root
        return pool.adopt(key, parent, sequence.token_ids[place * size : (place + 1) * size])

    def _restore_state(self, block_hash: bytes, content: bytes) -> None:
        slots = self._states.pool
        if slots.num_free > 1 and not slots.has(block_hash):  # the sequence itself needs a slot, too
            state = slots.adopt(block_hash)
            self.keep()
            self._states.write(state, content)
            self._remember(state_key(block_hash))

    def keep(self) -> None:
        """Copy evicted blocks before anything is written to the pools."""
        for kind in (self._blocks, self._states):
            for place, block_hash in kind.fallen_out:
                self._save(kind, place, block_hash)
            kind.fallen_out.clear()

    def close(self, *, saves: bool) -> None:
        """Ends all threads. `saves`: write the rest of the pool first, as far as time allows."""
        self._is_closing.set()
        self._reader.shutdown(cancel_futures=True)
        self._first_reader.shutdown(cancel_futures=True)
        self._file_readers.shutdown(cancel_futures=True)
        try:
            if saves:
                self._save_all(time.monotonic() + END_S)
        except TimeoutError:
            logger.warning("not all of the KV cache was written within %g s; missing blocks are computed again", END_S)
        self._writer.shutdown(cancel_futures=True)

    def _save_all(self, deadline: float) -> None:
        self.keep()  # the last step may have evicted states, and no later step overwrites them
        self._touch_files(END_S)  # blocks that stayed in the pool have the oldest files, which would be removed first
        for kind in (self._states, self._blocks):
            for block_hash, place in kind.pool.known_blocks():
                if self._num_given - self._num_done >= MAX_UNWRITTEN:
                    self._wait_for_writer(deadline)
                self._save(kind, place, block_hash)
        self._wait_for_writer(deadline)
        self._touch_files()

    def _touch_files(self, ahead_s: float = 0.0) -> None:
        for kind in (self._states, self._blocks):
            self._files.touch((kind.key(block_hash) for block_hash, _ in kind.pool.known_blocks()), ahead_s)

    def _wait_for_writer(self, deadline: float) -> None:
        """Waits for all queued writes. Raises `TimeoutError`."""
        self._writer.submit(int).result(deadline - time.monotonic())  # runs after the queued writes

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
            self._known.clear()  # then the files themselves are checked
        self._known.add(key)

    def _write(self, key: bytes, content: bytes) -> None:
        try:
            if self._files.write(key, content):
                self.num_stored += is_whole(key)
            else:
                self._known.discard(key)
        finally:
            self._unwritten.pop(key, None)
            self._num_done += len(content)

    def _start(self, last_first: Seq[bytes]) -> int:
        """Reads blocks for START_S, and puts them into the pool. Returns the number of keys that were looked up."""
        deadline, num_looked_at = time.monotonic() + START_S, 0
        for contents in self._in_portions(last_first):
            self._adopt(contents)
            num_looked_at += len(contents)
            if time.monotonic() > deadline:
                break
        self._touch(last_first[:num_looked_at])
        return num_looked_at

    def _go_on(self, last_first: Seq[bytes], num_looked_at: int, post: Post) -> None:
        try:
            for contents in self._in_portions(last_first[num_looked_at:]):
                post(partial(self._adopt, contents)).result()
            for end in range(len(last_first), 0, -TOUCHED_AT_ONCE):
                post(partial(self._touch, last_first[max(0, end - TOUCHED_AT_ONCE) : end])).result()
        except Unavailable:  # the engine was closed
            return
        except Exception:  # the border: without these blocks, prompts are computed
            logger.exception("the KV cache starts without the blocks of its folder")

    def _in_portions(self, keys: Seq[bytes]) -> Iterator[Mapping[bytes, bytes | None]]:
        """Yields contents of files, until the engine is closed. None: the file is missing or damaged."""
        size = max(NUM_READERS, PUT_AT_ONCE // self._files.block_bytes)
        for start in range(0, len(keys), size):
            if self._is_closing.is_set():
                return
            with self._turn:
                contents = self._contents(keys[start : start + size])
            yield contents

    def _contents(self, keys: Seq[bytes]) -> dict[bytes, bytes | None]:
        return dict(zip(keys, self._file_readers.map(self._files.read, keys), strict=True))

    def _adopt(self, contents: Mapping[bytes, bytes | None]) -> None:
        self.keep()  # the last step may have evicted blocks whose places are free again
        for key, content in contents.items():
            kind, name = self._place(key)
            if content is not None and kind.pool.has_blank and not kind.pool.has(name):
                kind.write(kind.pool.adopt(name), content)
                self._remember(key)
                self.num_restored += is_whole(key)

    def _touch(self, last_first: Seq[bytes]) -> None:
        """Marks them as the last to be evicted, the first one as the very last."""
        for key in reversed(last_first):
            kind, name = self._place(key)
            kind.pool.touch(kind.pool.match([name]))

    def _read(self, sequences: Seq[Sequence], hashes: Seq[bytes], here: Set[bytes]) -> None:
        contents: dict[bytes, bytes] = {}
        try:
            with self._turn:
                if any(sequence.id in self._wanted for sequence in sequences):  # others must not wait for the rest
                    self._read_into(contents, hashes, here)
        finally:
            self._come_back(Fetched(sequences, contents))

    def _read_into(self, contents: dict[bytes, bytes], hashes: Seq[bytes], here: Set[bytes]) -> None:
        """Reads what the longest usable beginning needs in addition to `here`. Unreadable files count as missing."""
        lost: set[bytes] = set()

        def is_there(key: bytes) -> bool:
            is_read = key in here or key in contents
            return is_read or (key not in lost and (key in self._unwritten or self._files.has(key)))

        while True:
            longest = hashes[: self._longest(hashes, is_there)]
            needed = [*longest, *self._scheduler.windows.keys(longest)]
            needed += map(state_key, longest[-1:]) if self._has_states else ()
            missing = [key for key in needed if key not in here and key not in contents]
            if not missing:
                self._files.touch(reversed(contents))  # a block is useless without earlier ones
                return
            found = {key: self._unwritten.get(key) for key in missing}
            found |= self._contents([key for key, content in found.items() if content is None])
            lost |= {key for key, content in found.items() if content is None}
            self._known -= lost  # they must be written again
            contents |= {key: content for key, content in found.items() if content is not None}

    def _longest(self, hashes: Seq[bytes], is_there: Callable[[bytes], bool]) -> int:
        """The largest number of these blocks that a sequence can start with."""
        longest = partial(self._scheduler.windows.longest, is_known=is_there)
        count = longest(hashes[: sum(1 for _ in takewhile(is_there, hashes))])
        while count and self._has_states and not is_there(state_key(hashes[count - 1])):
            count = longest(hashes[: count - 1])
        return count

    def _keys(self, block_hash: bytes) -> Iterator[bytes]:
        """Yields the keys of all data that may exist for a sequence up to this block's end."""
        yield block_hash
        yield from windowed_keys(block_hash, self._scheduler.config.windowed_layers.num_tables)
        yield from (state_key(block_hash),) if self._has_states else ()

    def _is_here(self, key: bytes) -> bool:
        kind, name = self._place(key)
        return kind.pool.has(name)

    def _place(self, key: bytes) -> tuple[_Kind, bytes]:
        """Returns the kind of the item with this key, and its key in that kind's pool."""
        return (self._states, key[:HASH_BYTES]) if is_state(key) else (self._blocks, key)

    @property
    def _has_states(self) -> bool:
        return self._scheduler.config.num_states > 0
