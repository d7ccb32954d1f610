"""An engine in another process that may end and come back: the common part, independent of what starts the process."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.core import Allowance, GenerateRequest, Tenant, TokenEvent
from llmserve.engine.base import EngineInfo, EngineStats
from llmserve.engine.remote.client import RemoteEngine
from llmserve.errors import EngineFileError, LlmserveError, Unavailable

if TYPE_CHECKING:
    from llmserve.engine.adapters.sealed import SealedAdapter

RETRY_S = 0.25

logger = logging.getLogger(__name__)


class ReplaceableEngine:
    """A `MeteringEngine`, even if the inner engine does not enforce limits: then the full allowance is left. Subclasses
    replace `_engine`."""

    _engine: RemoteEngine

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the following
        self._closing = threading.Event()
        self._num_restarts = 0
        self._down = ""  # why there is no engine now
        # adapters that a restarted engine gets again: one for each directory, the last one first
        self._adapters: dict[str, list[SealedAdapter]] = {}
        self._num_names = Counter[str]()  # how often each was added

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `Engine.submit`. `Unavailable` while there is no process."""
        engine, down = self._engine, self._down
        if down:
            raise Unavailable(down)
        return engine.submit(request)

    def stats(self) -> EngineStats:
        return replace(self._engine.stats(), num_restarts=self._num_restarts)

    def allowance(self, tenant: Tenant) -> Allowance:
        """See `MeteringEngine`."""
        return self._engine.allowance(tenant)

    def add_adapter(self, adapter: SealedAdapter) -> None:
        """See `AdapterEngine`. A restarted engine gets it again."""
        engine, down = self._engine, self._down
        if down:
            raise Unavailable(down)
        engine.add_adapter(adapter)
        with self._lock:
            others = [each for each in self._adapters.get(adapter.digest, ()) if each.path != adapter.path]
            self._adapters[adapter.digest] = [adapter, *others]
            self._num_names[adapter.digest] += 1
            now = self._engine
        if now is not engine:  # it was restarted in the meantime, without the adapter
            now.add_adapter(adapter)

    def remove_adapter(self, digest: str) -> None:
        """See `AdapterEngine`. Does not wait."""
        with self._lock:
            self._num_names[digest] -= 1
            engine = self._engine
        engine.remove_adapter(digest)

    def healthy(self) -> bool:
        return not self._down and self._engine.healthy()

    def _is_first_close(self) -> bool:
        with self._lock:
            is_first = not self._closing.is_set()
            self._closing.set()
            self._down = "the engine has been closed"
        return is_first

    def _is_put(self, engine: RemoteEngine) -> bool:
        """Replaces the ended engine by `engine`; returns False, and closes it, if no engine is needed any more."""
        given, missing = Counter[str](), Counter[str]()
        while True:
            for digest in missing.elements():
                self._give_adapter(engine, self._adapters[digest])
            given += missing
            with self._lock:
                is_closed, missing = self._closing.is_set(), self._num_names - given
                if not missing or is_closed:  # none was added in the meantime
                    surplus = given - self._num_names
                    if not is_closed:
                        self._engine, self._down = engine, ""
                    break
        for digest in surplus.elements():
            engine.remove_adapter(digest)
        if is_closed:
            engine.close()
        return not is_closed

    def _give_adapter(self, engine: RemoteEngine, adapters: Sequence[SealedAdapter]) -> None:
        """Use the first of its directories that works."""
        for adapter in adapters:
            try:
                engine.add_adapter(adapter)
            except LlmserveError as error:
                logger.warning("%s", error)
            else:
                return
        logger.error("requests for the adapter in %s will fail", adapters[0].path)

    def _say_down(self, text: str) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._down = text
        logger.error("%s", text)


class SocketEngine(ReplaceableEngine):
    """The engine that answers at a socket, reconnected when it is gone; another program starts its process."""

    def __init__(self, socket: Path, digest: str) -> None:
        """Raises `Unavailable` if no engine with this protocol version answers, and `EngineFileError` if another one
        does."""
        super().__init__()
        self._socket = socket
        self._digest = digest
        self._engine = self._connected()
        self._watcher = threading.Thread(target=self._watch, name="llmserve-engine-socket", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """See `Engine.close`. Other clients keep the engine."""
        if self._is_first_close():
            self._engine.close()
            self._watcher.join()

    def _connected(self) -> RemoteEngine:
        engine = RemoteEngine.connect(self._socket)
        if engine.info.digest != self._digest:
            engine.close()
            raise EngineFileError(
                f"the engine at {self._socket} is {engine.info.digest}, but this server's directory has "
                f"{self._digest}; serve the engine's own directory"
            )
        return engine

    def _watch(self) -> None:
        """Runs in its own thread until the engine is closed."""
        while True:
            self._engine.wait()
            if self._closing.is_set():
                return
            self._say_down(f"the engine at {self._socket} has ended; the server will use it again when it is back")
            while not self._closing.wait(RETRY_S):
                try:
                    engine = self._connected()
                except Unavailable:
                    continue
                except EngineFileError as error:  # until the right one is back
                    if self._down != str(error):
                        self._say_down(str(error))
                    continue
                self._num_restarts += 1
                if self._is_put(engine):
                    logger.warning("the engine at %s is available again", self._socket)
                break
