"""Which adapters an engine knows, and which of them are in its memory.

An adapter is known by its digest from `add` on. It has a slot of the runner while it is in memory, which has limits:
those that were used least recently make room, and are read again when a request wants them; never one that a request
uses. What has been removed stays for the requests that use it.

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
    adapters: list[SealedAdapter]  # one from each directory that it was added from, the last one first
    num_names: int = 1  # under which it was added
    num_uses: int = 0
    slot: int = 0  # 0: not in memory
    num_bytes: int = 0  # there
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
        self._loaded: list[_Known] = []  # also what has been removed, while it is used
        self._clock = 0

    def add(self, adapter: SealedAdapter) -> None:
        """All of it is read, so that what is wrong with it is said now."""
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
        with suppress(ResourceExhausted):  # it is whole, and comes when there is room
            self._load(added, self._runner)
        with self._lock:
            known = self._known.setdefault(adapter.digest, added)
            if known is not added:  # another thread was faster
                known.name_again(adapter)
        self._release(added)

    def remove(self, digest: str) -> None:
        """Once for every `add`. Requests under way keep it."""
        with self._lock:
            known = self._known[digest]
            known.num_names -= 1
            if not known.num_names:
                del self._known[digest]
                self._drop(known)

    @property
    def digests(self) -> KeysView[str]:
        """That requests may name."""
        return self._known.keys()

    @asynccontextmanager
    async def held(self, digest: str) -> AsyncIterator[int]:
        """The slot of an adapter, which keeps it meanwhile."""
        with self._lock:
            if (known := self._known.get(digest)) is None:  # removed since the request was checked
                raise InvalidArgument(f"the engine has no adapter {digest}")
            known.num_uses += 1
        try:
            if not known.slot:
                assert self._runner is not None
                try:
                    await asyncio.to_thread(self._load, known, self._runner)
                except EngineFileError as error:  # nothing that the request can help
                    raise InternalError(f"an adapter can no longer be read: {error}") from error
            yield known.slot
        finally:
            self._release(known)

    def _load(self, known: _Known, runner: AdapterRunner) -> None:
        """Into a slot; somebody uses it."""
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
                self._drop(known)  # who waited for it may be gone

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
        """One more beside these."""
        limits, taken = self._limits, sum(each.num_bytes for each in others)
        return len(others) < limits.count and (not limits.num_bytes or taken + num_bytes <= limits.num_bytes)

    def _release(self, known: _Known) -> None:
        with self._lock:
            known.num_uses -= 1
            self._clock += 1
            known.last_used = self._clock
            self._drop(known)

    def _drop(self, known: _Known) -> None:
        """Out of memory, if it has been removed and nobody uses it. With the lock held."""
        if known.slot and not known.num_uses and self._known.get(known.adapters[0].digest) is not known:
            self._unload(known)

    def _unload(self, known: _Known) -> None:
        assert self._runner is not None
        runner, slot = self._runner, known.slot
        self._post(lambda: runner.unload_adapter(slot))
        self._loaded.remove(known)
        known.slot = 0


def _packed(known: _Known, runner: AdapterRunner) -> Packed:
    """From the directory that was added last, or one that is still whole."""
    last, *others = known.adapters
    try:
        return runner.packed(last)
    except EngineFileError:
        for adapter in others:
            with suppress(EngineFileError):
                return runner.packed(adapter)
        raise
