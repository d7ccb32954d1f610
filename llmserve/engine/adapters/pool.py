"""The adapters that an engine knows, and those that are in its memory.

After `add`, an adapter is known by its digest. It has a slot of the runner while it is in memory. Memory is limited:
the least recently used adapters are evicted, and read again when a request needs them. An adapter in use is never
evicted, and a removed one stays for the requests that use it.

Threads. `add`, `remove` and reading run in any thread but an event loop's; slots change in the thread of the steps,
between two of them. `_lock` guards everything here; `_loading` lets one thread at a time fill a slot.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, KeysView, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import AdapterRunner, Packed, Runner
from llmserve.engine.posted import Post
from llmserve.engine.settings import AdapterLimits
from llmserve.errors import EngineFileError, InternalError, InvalidArgument, ResourceExhausted, Unsupported


@dataclass(slots=True, eq=False)
class _Known:
    adapters: list[SealedAdapter]  # one for each directory that it was added from, the last one first
    num_names: int = 1  # the names under which it was added
    num_uses: int = 0
    slot: int = 0  # 0: not in memory
    num_bytes: int = 0  # in memory
    last_used: int = 0

    def name_again(self, adapter: SealedAdapter) -> None:
        self.num_names += 1
        self.adapters = [adapter, *(each for each in self.adapters if each.path != adapter.path)]


class AdapterPool:
    def __init__(self, runner: Runner, post: Post, *, base_digest: str, limits: AdapterLimits | None = None) -> None:
        self._runner = runner if isinstance(runner, AdapterRunner) else None
        self._post = post
        self._base_digest = base_digest
        self._limits = limits or AdapterLimits()
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._loaded: list[_Known] = []  # including removed adapters that are still in use
        self._clock = 0

    def add(self, adapter: SealedAdapter) -> None:
        """Adds an adapter. Reads all of its files, so that problems are reported now."""
        if self._runner is None:
            raise Unsupported(
                "this engine does not support adapters at run time: only the cpu target does; merge it into an "
                "engine with: llmserve build CHECKPOINT --lora ADAPTER"
            )
        adapter.require_base(self._base_digest)
        if adapter.digest in self._known:
            adapter.verify()
        with self._lock:
            if (known := self._known.get(adapter.digest)) is not None:
                known.name_again(adapter)
                return
        added = _Known([adapter], num_uses=1)
        with suppress(ResourceExhausted):  # it is complete, and is loaded when there is room
            self._load(added, self._runner)
        with self._lock:
            known = self._known.setdefault(adapter.digest, added)
            if known is not added:  # another thread was faster
                known.name_again(adapter)
        self._release(added)

    def remove(self, digest: str) -> None:
        """Undoes one `add`. Running requests keep the adapter."""
        with self._lock:
            known = self._known[digest]
            known.num_names -= 1
            if not known.num_names:
                del self._known[digest]
                self._drop(known)

    @property
    def digests(self) -> KeysView[str]:
        """Digests that requests may select."""
        return self._known.keys()

    @asynccontextmanager
    async def held(self, digest: str) -> AsyncIterator[int]:
        """The slot of an adapter, which stays loaded inside the block."""
        with self._lock:
            if (known := self._known.get(digest)) is None:  # removed since the request was checked
                raise InvalidArgument(f"the engine has no adapter {digest}")
            known.num_uses += 1
        try:
            if not known.slot:
                assert self._runner is not None
                try:
                    await asyncio.to_thread(self._load, known, self._runner)
                except EngineFileError as error:  # not an error of the request
                    raise InternalError(f"an adapter can no longer be read: {error}") from error
            yield known.slot
        finally:
            self._release(known)

    def _load(self, known: _Known, runner: AdapterRunner) -> None:
        """Load it into a slot for a request."""
        with self._loading:
            if known.slot:
                return
            packed = _packed(known, runner)
            with self._lock:
                self._make_room(known.adapters[0], packed.num_bytes)
                taken = {each.slot for each in self._loaded}
            slot = next(number for number in range(1, len(taken) + 2) if number not in taken)
            self._post(lambda: runner.load_adapter(slot, packed)).result()
            with self._lock:
                known.slot, known.num_bytes = slot, packed.num_bytes
                self._loaded.append(known)
                self._drop(known)  # the request that waited for it may have ended

    def _make_room(self, adapter: SealedAdapter, num_bytes: int) -> None:
        limits = self._limits
        if limits.num_bytes and num_bytes > limits.num_bytes:
            raise InvalidArgument(
                f"adapter {adapter.path} takes {num_bytes:,} bytes of memory, but all adapters together may take "
                f"{limits.num_bytes:,}; serve with a larger --adapter-memory"
            )
        if not self._fits([each for each in self._loaded if each.num_uses], num_bytes):
            raise ResourceExhausted(
                f"all {sum(bool(each.num_uses) for each in self._loaded)} adapters that fit in memory are in use; "
                "try again later, or serve with a larger --max-adapters or --adapter-memory"
            )
        idle = sorted((each for each in self._loaded if not each.num_uses), key=lambda each: each.last_used)
        while not self._fits(self._loaded, num_bytes):
            self._unload(idle.pop(0))

    def _fits(self, others: Sequence[_Known], num_bytes: int) -> bool:
        """Returns whether `num_bytes` more fit in addition to `others`."""
        limits, taken = self._limits, sum(each.num_bytes for each in others)
        return len(others) < limits.count and (not limits.num_bytes or taken + num_bytes <= limits.num_bytes)

    def _release(self, known: _Known) -> None:
        with self._lock:
            known.num_uses -= 1
            self._clock += 1
            known.last_used = self._clock
            self._drop(known)

    def _drop(self, known: _Known) -> None:
        """Unloads it if it was removed and is not in use. Call with the lock held."""
        if known.slot and not known.num_uses and self._known.get(known.adapters[0].digest) is not known:
            self._unload(known)

    def _unload(self, known: _Known) -> None:
        assert self._runner is not None
        runner, slot = self._runner, known.slot
        self._post(lambda: runner.unload_adapter(slot))
        self._loaded.remove(known)
        known.slot = 0


def _packed(known: _Known, runner: AdapterRunner) -> Packed:
    """Read it from the directory that was added last, or from one that is still intact."""
    last, *others = known.adapters
    try:
        return runner.packed(last)
    except EngineFileError:
        for adapter in others:
            with suppress(EngineFileError):
                return runner.packed(adapter)
        raise
