"""In the server: the thread that starts a model's process, receives its messages, and restarts it if it dies."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from llmserve.backends.python.host import ModelSpec
from llmserve.backends.python.local_server import LocalServer
from llmserve.backends.python.process import messages as m
from llmserve.backends.python.process.back_off import BackOff
from llmserve.backends.python.process.environment import Environment
from llmserve.backends.python.process.launch import ModelProcess
from llmserve.backends.python.process.life import Life
from llmserve.backends.python.process.server_calls import ServerCalls

logger = logging.getLogger(__name__)


class Supervised(Protocol):
    """The owner of the process's requests. Called on the supervisor's thread."""

    def began(self, life: Life) -> None:
        """A process runs; the model is not open yet."""
        ...

    def opened(self, life: Life, is_async: bool) -> None: ...

    def failed(self, problem: str, error: Exception | None = None) -> None:
        """The model could not be opened."""
        ...

    def died(self, life: Life, how: str) -> None: ...

    def goes_on(self) -> bool:
        """Whether to start another process."""
        ...

    def ended(self) -> None:
        """No other process will start."""
        ...


class Supervisor:
    def __init__(
        self, spec: ModelSpec, server: LocalServer, environment: Environment | None, supervised: Supervised
    ) -> None:
        self._spec = spec
        self._server = server
        self._environment = environment
        self._supervised = supervised
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"model-{spec.instance_name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Check at once whether to go on."""
        self._ending.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether the thread has ended, and with it the last process."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        back_off = BackOff()
        while True:
            started = time.monotonic()
            self._live()
            if not self._supervised.goes_on():
                self._supervised.ended()
                return
            self._ending.wait(back_off.pause_after(time.monotonic() - started))

    def _live(self) -> None:
        """Run one process from start to end."""
        try:
            process = ModelProcess(self._environment)
        except OSError as error:
            self._supervised.failed(f"its process cannot be started: {error}")
            return
        life = Life(process, self._spec.instance_name)
        calls = ServerCalls(self._server, life.send)
        life.start(m.Open(self._spec))
        self._supervised.began(life)
        try:
            while True:
                self._take(life.receive(), life, calls)
        except EOFError:
            pass
        except Exception:  # border: the messages of the model's process cannot be read
            logger.exception("model instance '%s': its process sent unreadable data", self._spec.instance_name)
            life.kill()
        how = life.wait()
        calls.cancel_all()
        self._supervised.died(life, how)

    def _take(self, message: object, life: Life, calls: ServerCalls) -> None:
        match message:
            case m.Response(number, response):
                life.respond(number, response)
            case m.Done(number):
                life.finish(number)
            case m.Call():
                calls.begin(message)
            case m.CancelCall(number):
                calls.cancel(number)
            case m.Ask():
                calls.ask(message)
            case m.LogLine(name, level, text):
                logging.getLogger(name).log(level, "%s", text)
            case m.Opened(error, is_async):
                life.has_answered = True
                if error is None:
                    self._supervised.opened(life, is_async)
                else:
                    self._supervised.failed(str(error), error)
            case m.Dead():
                life.kill()
