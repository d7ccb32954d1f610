"""In the server: requests of a model in its own process to the server, and the answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from llmserve.backends.python.bls import Cancel
from llmserve.backends.python.local_server import LocalServer
from llmserve.backends.python.process import messages as m
from llmserve.errors import InternalError, LlmserveError
from llmserve.serving.types import InferResponse

SLOW_QUESTIONS = frozenset({"load_model", "unload_model", "is_model_ready"})


class ServerCalls:
    """The requests of one process. They arrive on one thread; answers come from any thread."""

    def __init__(self, server: LocalServer, send: Callable[[object], None]) -> None:
        self._server = server
        self._send = send
        self._calls: dict[int, Cancel] = {}  # calls of models that are not complete

    def begin(self, call: m.Call) -> None:
        receive = partial(self._forward, call.call)
        self._calls[call.call] = self._server.call(call.request, receive, only_first=call.only_first)

    def cancel(self, number: int) -> None:
        if (cancel := self._calls.get(number)) is not None:
            cancel()

    def cancel_all(self) -> None:
        for cancel in list(self._calls.values()):
            cancel()

    def ask(self, asked: m.Ask) -> None:
        if asked.method in SLOW_QUESTIONS:
            threading.Thread(target=self._answer, args=(asked,), daemon=True).start()
        else:
            self._answer(asked)

    def _forward(self, number: int, response: InferResponse | None) -> None:
        if response is None:
            self._calls.pop(number, None)
        self._send(m.CallResponse(number, response))

    def _answer(self, asked: m.Ask) -> None:
        value: Any = None
        error: Exception | None = None
        try:
            value = self._server.ask(asked.method, *asked.arguments)
        except LlmserveError as problem:
            error = problem
        except Exception as problem:  # border: any error is the answer
            error = InternalError(f"{type(problem).__name__}: {problem}")
        if asked.question:
            self._send(m.Answered(asked.question, value, error))
