"""In the server: a model in a process of its own.

A thread starts the process, takes its messages, and starts it again when it has died. Requests that it had are answered
with an error; those that come meanwhile wait for the new one, unless that cannot be started either.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

from llmserve.backends.python.bls import Cancel
from llmserve.backends.python.host import ModelSpec
from llmserve.backends.python.instance import Done, Kill
from llmserve.backends.python.line import ServerLine
from llmserve.backends.python.local_server import LocalServer
from llmserve.backends.python.process import messages as m
from llmserve.backends.python.process.environment import Environment
from llmserve.backends.python.process.launch import ModelProcess
from llmserve.errors import InternalError, LlmserveError, Unavailable
from llmserve.serving.streams import Outbox
from llmserve.serving.types import InferRequest, InferResponse

SETTLED_AFTER_S = 10.0  # a process that has lived so long is started again at once
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
SLOW_QUESTIONS = frozenset({"load_model", "unload_model", "is_model_ready"})

logger = logging.getLogger(__name__)


class State(Enum):
    STARTING = auto()
    OPEN = auto()
    FAILED = auto()  # the last attempt to start it again failed; there will be others
    ENDED = auto()


@dataclass(slots=True, eq=False)
class _Batch:
    lines: dict[int, ServerLine]
    message: m.Execute
    on_done: Done


@dataclass(slots=True, eq=False)
class _Life:
    """One process, from its start to its end."""

    process: ModelProcess
    outgoing: queue.SimpleQueue[object | None] = field(default_factory=queue.SimpleQueue)
    batches: dict[int, _Batch] = field(default_factory=dict)  # not done
    lines: dict[int, ServerLine] = field(default_factory=dict)  # without a final response
    calls: dict[int, Cancel] = field(default_factory=dict)
    has_answered: bool = False  # whether the model could be opened
    killed_because: str = ""

    def send_all(self) -> None:
        """A thread of its own: a process that does not read must not keep the loop waiting."""
        while (message := self.outgoing.get()) is not None:
            try:
                self.process.channel.send(message)
            except OSError:
                return  # its end is noticed by who receives
            del message


class ProcessHost:
    """See `instance.Host`."""

    def __init__(self, spec: ModelSpec, server: LocalServer, environment: Environment | None = None) -> None:
        self.is_async = False
        self.queues = False  # what it is given dies with the process
        self._environment = environment
        self._spec = spec
        self._server = server
        self._opened: Future[None] = Future()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._state = State.STARTING
        self._life: _Life | None = None
        self._waiting: list[_Batch] = []  # for a process that can take them
        self._unreleased: list[Done] = []  # of batches that died with a process
        self._problem = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name=f"model-{spec.instance_name}", daemon=True)

    def start(self) -> Future[None]:
        self._thread.start()
        return self._opened

    def submit(self, work: Sequence[tuple[InferRequest, ServerLine]], on_done: Done, outbox: Outbox) -> Kill:
        self._server.open(asyncio.get_running_loop())
        numbered = [(next(self._numbers), request, line) for request, line in work]
        message = m.Execute(next(self._numbers), tuple((number, request) for number, request, _ in numbered))
        batch = _Batch({number: line for number, _, line in numbered}, message, on_done)
        for number, line in batch.lines.items():
            line.when_cancelled(partial(self._tell_cancelled, number))
        with self._lock:
            if self._state is State.STARTING:
                self._waiting.append(batch)
            elif self._state is State.OPEN and self._life is not None:
                _hand_over(self._life, batch)
            else:
                self._refuse([batch])
        return partial(self._end_batch, batch)

    def alive(self) -> bool:
        return self._state is State.OPEN

    def problem(self) -> str:
        """A process that is being started takes requests already: they wait for it."""
        return "" if self._state in (State.OPEN, State.STARTING) else self._problem

    def abandon(self) -> None:
        threading.Thread(target=self.stop, args=(0.0,), daemon=True).start()

    def stop(self, timeout_s: float) -> bool:
        with self._lock:
            self._state = State.ENDED
            self._ending.set()
            if self._life is not None:
                self._life.outgoing.put(m.End())
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return True
        with self._lock:
            if self._life is not None:
                self._life.process.kill()
        self._thread.join()
        return False

    def _end_batch(self, batch: _Batch, why: str) -> None:
        """With its process, if it has it; whatever else that process does."""
        with self._lock:
            if self._life is not None and batch.message.batch in self._life.batches:
                self._life.killed_because = why
                self._life.process.kill()
                return
            if batch not in self._waiting:
                return
            self._waiting.remove(batch)
        self._refuse([batch])

    def _tell_cancelled(self, number: int) -> None:
        with self._lock:
            if self._life is not None and number in self._life.lines:
                self._life.outgoing.put(m.Cancelled(number))

    def _supervise(self) -> None:
        pause_s = 0.0
        while True:
            started = time.monotonic()
            self._live()
            if self._ending.is_set():
                self._release()
                return
            if self._opened.exception() is not None:
                return
            settled = time.monotonic() - started > SETTLED_AFTER_S
            pause_s = 0.0 if settled else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
            self._ending.wait(pause_s)

    def _live(self) -> None:
        """One process, from its start to its end."""
        try:
            process = ModelProcess(self._environment)
        except OSError as error:
            self._fail(f"its process cannot be started: {error}")
            return
        life = _Life(process)
        life.outgoing.put(m.Open(self._spec))
        sender = threading.Thread(target=life.send_all, name=f"to-{self._spec.instance_name}", daemon=True)
        sender.start()
        with self._lock:
            self._life = life
            if self._ending.is_set():
                process.kill()
        try:
            while True:
                self._take(life, process.channel.receive())
        except EOFError:
            pass
        except Exception:  # border: what the model's process has sent cannot be used
            logger.exception("model instance '%s': its process sends what cannot be read", self._spec.instance_name)
            process.kill()
        how = process.wait()
        life.outgoing.put(None)
        self._bury(life, life.killed_because or how)

    def _bury(self, life: _Life, how: str) -> None:
        """Answer what the process had. If it could take requests, later ones wait for the next process."""
        with self._lock:
            self._life = None
            was_open = self._state is State.OPEN
            if was_open:
                self._state = State.STARTING
                self._problem = f"its process {how}, and is being started again"
            elif self._state is State.ENDED:
                self._problem = f"its process {how}"
            lines, batches = list(life.lines.values()), list(life.batches.values())
            self._unreleased += [batch.on_done for batch in batches]
        for cancel in list(life.calls.values()):
            cancel()
        for line in lines:
            line.post(self._failure())
        if was_open:
            logger.warning("model instance '%s': %s", self._spec.instance_name, self._problem)
        elif not (life.has_answered or self._ending.is_set()):
            self._fail(f"its process {how} while the model was loaded")

    def _take(self, life: _Life, message: object) -> None:
        match message:
            case m.Response(number, response):
                line = life.lines.pop(number, None) if response.final else life.lines.get(number)
                if line is not None:  # else another thread of the model has ended it
                    line.post(response)
            case m.Done(number):
                with self._lock:
                    batch = life.batches.pop(number)
                batch.on_done(None)
            case m.Call(number, request, only_first):
                receive = partial(self._forward, life, number)
                life.calls[number] = self._server.call(request, receive, only_first=only_first)
            case m.CancelCall(number):
                if (cancel := life.calls.get(number)) is not None:
                    cancel()
            case m.Ask(_, method, _) if method in SLOW_QUESTIONS:
                threading.Thread(target=self._answer, args=(life, message), daemon=True).start()
            case m.Ask():
                self._answer(life, message)
            case m.LogLine(name, level, text):
                logging.getLogger(name).log(level, "%s", text)
            case m.Opened(error, is_async):
                life.has_answered = True
                if error is None:
                    self._open(life, is_async)
                else:
                    self._fail(str(error), error)
            case m.Dead():
                life.process.kill()

    def _open(self, life: _Life, is_async: bool) -> None:
        self.is_async = is_async
        with self._lock:
            if self._state is not State.ENDED:
                self._state = State.OPEN
            waiting, self._waiting = self._waiting, []
            for batch in waiting:
                _hand_over(life, batch)
        self._release()
        if not self._opened.done():
            self._opened.set_result(None)

    def _fail(self, problem: str, error: Exception | None = None) -> None:
        """The model could not be opened. Requests do not wait for the next attempt."""
        if not self._opened.done():
            self._opened.set_exception(error or self._error(problem))
            return
        with self._lock:
            self._problem = problem
            if self._state is not State.ENDED:
                self._state = State.FAILED
            waiting, self._waiting = self._waiting, []
        logger.error("model instance '%s' could not be started again: %s", self._spec.instance_name, problem)
        self._refuse(waiting)
        self._release()

    def _release(self) -> None:
        with self._lock:
            unreleased, self._unreleased = self._unreleased, []
        for on_done in unreleased:
            on_done(None)

    def _refuse(self, batches: Sequence[_Batch]) -> None:
        for batch in batches:
            for line in batch.lines.values():
                line.post(self._failure())
            batch.on_done(None)

    def _forward(self, life: _Life, number: int, response: InferResponse | None) -> None:
        if response is None:
            life.calls.pop(number, None)
        life.outgoing.put(m.CallResponse(number, response))

    def _answer(self, life: _Life, asked: m.Ask) -> None:
        value: Any = None
        error: Exception | None = None
        try:
            value = self._server.ask(asked.method, *asked.arguments)
        except LlmserveError as problem:
            error = problem
        except Exception as problem:  # border: whatever goes wrong is the answer
            error = InternalError(f"{type(problem).__name__}: {problem}")
        if asked.question:
            life.outgoing.put(m.Answer(asked.question, value, error))

    def _failure(self) -> InferResponse:
        error = Unavailable(f"model instance '{self._spec.instance_name}': {self._problem}")
        return InferResponse(self._spec.model_name, self._spec.version, error=error, final=True)

    def _error(self, problem: str) -> InternalError:
        return InternalError(f"model instance '{self._spec.instance_name}': {problem}")


def _hand_over(life: _Life, batch: _Batch) -> None:
    life.batches[batch.message.batch] = batch
    life.lines.update(batch.lines)
    life.outgoing.put(batch.message)
