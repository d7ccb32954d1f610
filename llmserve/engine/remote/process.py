"""`ProcessEngine`: an engine in its own process, which is restarted if it dies.

If the process is killed, by a fault in a kernel or because memory runs out, only the open streams end, with
`Unavailable`. Requests are never repeated automatically: the client decides whether an answer may be computed twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmserve.engine.remote.child import Child, ChildSpec
from llmserve.engine.remote.client import RemoteEngine
from llmserve.engine.remote.replaceable import ReplaceableEngine
from llmserve.engine.settings import EngineSettings
from llmserve.errors import EngineFileError, LlmserveError, Unavailable
from llmserve.owned_directory import new_temporary_directory

PREFIX = "llmserve-engine-"
SOCKET = "engine.sock"
ENDING_S = 2.0  # time to end for a process whose connection has ended

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RestartRule:
    """Determines when a process that died is restarted: at once, and if it dies again, after pauses that double each
    time. After a process has lived for some time, the count starts again."""

    pause_s: float = 1.0  # before the second restart
    longest_pause_s: float = 60.0
    most: int = 5  # restarts in a row
    forgotten_after_s: float = 600.0
    num_in_a_row: int = 0

    def next_pause_s(self, lived_s: float) -> float | None:
        """The pause before the next restart. None: do not restart."""
        if lived_s >= self.forgotten_after_s:
            self.num_in_a_row = 0
        if self.num_in_a_row >= self.most:
            return None
        self.num_in_a_row += 1
        is_first = self.num_in_a_row == 1
        return 0.0 if is_first else min(self.longest_pause_s, self.pause_s * 2.0 ** (self.num_in_a_row - 2))


class ProcessEngine(ReplaceableEngine):
    """Owns the process of an engine, and restarts it."""

    def __init__(
        self,
        command: Sequence[str],
        engine_dir: Path,
        tokenizer_dir: Path,
        settings: EngineSettings,
        restarts: RestartRule | None = None,
    ) -> None:
        """`command`: a program that does what `child.py` describes. Raises the engine's loading error."""
        super().__init__()
        self._command = command
        self._restarts = restarts or RestartRule()
        self._directory = new_temporary_directory(PREFIX)
        level = logging.getLogger("llmserve").getEffectiveLevel()
        socket = self._directory.path / SOCKET
        self._spec = ChildSpec(engine_dir.absolute(), tokenizer_dir.absolute(), settings, socket, level)
        self._child: Child | None = None
        try:
            self._engine = self._started()
        except BaseException:
            self._end_child()
            self._directory.remove()
            raise
        self._info = self._engine.info
        self._since = time.monotonic()
        self._supervisor = threading.Thread(target=self._supervise, name="llmserve-engine-process", daemon=True)
        self._supervisor.start()

    @property
    def pid(self) -> int:
        """Id of the process that was started last."""
        assert self._child is not None
        return self._child.pid

    @property
    def socket(self) -> Path:
        """The socket, to which other clients can connect, too."""
        return self._spec.socket

    def close(self) -> None:
        """See `Engine.close`."""
        if not self._is_first_close():
            return
        self._engine.close()
        self._end_child()
        self._supervisor.join()
        self._directory.remove()

    def _started(self) -> RemoteEngine:
        """Starts a process and connects to it. Raises its loading error."""
        with self._lock:
            if self._closing.is_set():
                raise Unavailable("the engine has been closed")
            child = self._child = Child(self._command, self._spec)
        child.wait_ready()
        return RemoteEngine.connect(self._spec.socket)

    def _end_child(self) -> None:
        with self._lock:
            child = self._child
        if child is not None:
            child.end()

    def _supervise(self) -> None:
        """Runs in its own thread until the engine is closed or given up."""
        self._engine.wait()
        while not self._closing.is_set():
            assert self._child is not None
            how = self._child.end(ENDING_S)
            if not self._is_started_again(how) or self._closing.is_set():
                return
            self._engine.wait()

    def _is_started_again(self, how: str) -> bool:
        """Try to restart it, as long as the rule allows."""
        lived_s = time.monotonic() - self._since
        while (pause_s := self._restarts.next_pause_s(lived_s)) is not None:
            when = f"in {pause_s:g} s" if pause_s else "now"
            self._say_down(f"the engine's process ended ({how}) and will be restarted {when}; try again later")
            if self._closing.wait(pause_s):
                return False
            self._num_restarts += 1
            try:
                engine = self._started()
                self._check_same(engine)
            except (LlmserveError, OSError, ValueError) as error:
                self._end_child()
                how, lived_s = str(error), 0.0
                continue
            if not self._is_put(engine):
                return False
            self._since = time.monotonic()
            logger.warning("the engine's process is running again: %d, restart %d", self.pid, self._num_restarts)
            return True
        self._say_down(
            f"the engine's process ended ({how}) after {self._restarts.most} restarts in a "
            "row; it will not be restarted: look for the reason in the log, and reload the model"
        )
        return False

    def _check_same(self, engine: RemoteEngine) -> None:
        if engine.info != self._info:
            engine.close()
            raise EngineFileError(
                f"{self._spec.engine_dir} now holds another engine ({engine.info.digest}; it was {self._info.digest}); "
                "reload the model"
            )
