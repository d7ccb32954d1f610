"""The server's substitute in a model's process. Messages arrive on a thread that must not be blocked."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

from llmserve.backends.python.bls import CLOSED, Cancel, Receive
from llmserve.backends.python.errors import TritonModelException
from llmserve.backends.python.host import ModelHost
from llmserve.backends.python.process.channel import Channel
from llmserve.backends.python.process.messages import (
    Answered,
    Ask,
    Call,
    CallResponse,
    CancelCall,
    Cancelled,
    Done,
    End,
    Execute,
    LogLine,
    Response,
)
from llmserve.serving.types import InferRequest, InferResponse

logger = logging.getLogger(__name__)

NOT_ANSWERED = frozenset({"change_metric"})  # requests without an answer


class RemoteLine:
    """The way back for a request, through the channel."""

    __slots__ = ("_guest", "_number", "cancelled")
    shares_memory = False

    def __init__(self, guest: Guest, number: int) -> None:
        self._guest = guest
        self._number = number
        self.cancelled = False

    def post(self, response: InferResponse) -> None:
        if response.final:
            self._guest.forget_line(self._number)
        self._guest.send(Response(self._number, response))


class Guest:
    """The process's end of the channel; also the model's `ServerApi`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._has_work = False
        self._lines: dict[int, RemoteLine] = {}
        self._calls: dict[int, Receive] = {}
        self._questions: dict[int, Future[Any]] = {}

    def send(self, message: object) -> None:
        """Without a server, there is nothing to do and nobody to notify."""
        try:
            self._channel.send(message)
        except OSError:
            _end_everything()

    def call(self, request: InferRequest, receive: Receive, *, only_first: bool = False) -> Cancel:
        if not self._has_work:
            raise TritonModelException(CLOSED)
        number = next(self._numbers)
        with self._lock:
            self._calls[number] = receive
        self.send(Call(number, request, only_first))
        return partial(self.send, CancelCall(number))

    def ask(self, method: str, *arguments: Any) -> Any:
        if method in NOT_ANSWERED:
            self.send(Ask(0, method, arguments))
            return None
        number = next(self._numbers)
        answer: Future[Any] = Future()
        with self._lock:
            self._questions[number] = answer
        self.send(Ask(number, method, arguments))
        return answer.result()

    def forget_line(self, number: int) -> None:
        with self._lock:
            self._lines.pop(number, None)

    def serve(self, host: ModelHost) -> None:
        """Pass messages to the model until the server has gone."""
        while True:
            try:
                self._take(self._channel.receive(), host)
            except EOFError:
                _end_everything()
            except Exception:  # border: no further message could be read, and requests would wait forever
                logger.exception("the process of a model cannot read what the server sends")
                _end_everything()

    def _take(self, message: object, host: ModelHost) -> None:
        match message:
            case Execute(batch, requests):
                self._has_work = True
                work = [(request, self._new_line(number)) for number, request in requests]
                host.submit(work, lambda execution: self.send(Done(batch)))
            case Cancelled(number):
                with self._lock:
                    line = self._lines.get(number)
                if line is not None:
                    line.cancelled = True
            case CallResponse(call, response):
                with self._lock:
                    receive = self._calls[call] if response is not None else self._calls.pop(call)
                receive(response)
            case Answered(question, value, error):
                with self._lock:
                    answer = self._questions.pop(question)
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(error)
            case End():
                host.submit_end()

    def _new_line(self, number: int) -> RemoteLine:
        line = RemoteLine(self, number)
        with self._lock:
            self._lines[number] = line
        return line


def _end_everything() -> None:
    """End this process and those that the model started."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


class ForwardingHandler(logging.Handler):
    """Sends log lines to the server, which knows the level and the format."""

    def __init__(self, guest: Guest) -> None:
        super().__init__()
        self._guest = guest

    def emit(self, record: logging.LogRecord) -> None:
        self._guest.send(LogLine(record.name, record.levelno, self.format(record)))
