"""Time limits for a client's headers, for an answer that it does not read, and for idle connections."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Protocol

from llmserve.wire.request_memory import UNREAD_TIMEOUT_S

HEADERS_TIMEOUT_S = 60
KEEP_ALIVE_S = 75  # for idle connections of clients with a pool


class Watched(Protocol):
    """A connection, as its deadlines see it."""

    @property
    def is_serving(self) -> bool:
        """Whether a request is being answered."""
        ...

    @property
    def is_in_headers(self) -> bool:
        """Whether a request has begun to arrive, and its headers have not ended."""
        ...

    @property
    def num_unsent(self) -> int:
        """Bytes not yet sent, because the client does not read."""
        ...

    def refuse(self, status: HTTPStatus, problem: str) -> None: ...

    def cut_off(self) -> None:
        """Close at once, as if the client had gone."""
        ...

    def close(self) -> None: ...


class Deadlines:
    def __init__(self, connection: Watched) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._idle_until = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._headers_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The client has connected. Its first request must begin within the time limit for headers."""
        self._idle_until = self._loop.time() + HEADERS_TIMEOUT_S
        self._idle_timer = self._loop.call_at(self._idle_until, self._check_idle)

    def stop(self) -> None:
        self.headers_ended()
        self.reading_goes_on()
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def served(self) -> None:
        """A request was answered. The connection is idle unless there is another one."""
        self._idle_until = self._loop.time() + KEEP_ALIVE_S

    def headers_pending(self) -> None:
        """Headers have begun to arrive, now or earlier."""
        if self._headers_timer is None:
            self._headers_timer = self._loop.call_later(HEADERS_TIMEOUT_S, self._end_headers)

    def headers_ended(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def reading_stopped(self) -> None:
        """The client does not read, and an answer waits for it."""
        unsent = self._connection.num_unsent
        self._unread_timer = self._loop.call_later(UNREAD_TIMEOUT_S, self._check_unread, unsent)

    def reading_goes_on(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()

    def _check_unread(self, before: int) -> None:
        if self._connection.num_unsent < before:
            self.reading_stopped()
        else:
            self._connection.cut_off()

    def _end_headers(self) -> None:
        self._headers_timer = None
        if self._connection.is_serving:  # reading is paused, or the previous answer is still being sent
            self.headers_pending()
        else:
            problem = f"request headers took more than {HEADERS_TIMEOUT_S} seconds"
            self._connection.refuse(HTTPStatus.REQUEST_TIMEOUT, problem)

    def _check_idle(self) -> None:
        """Close if idle. One timer is rearmed for the life of a connection: a timer for each request costs more."""
        if self._connection.is_serving or self._connection.is_in_headers:
            self._idle_timer = self._loop.call_later(KEEP_ALIVE_S, self._check_idle)
        elif self._loop.time() < self._idle_until:
            self._idle_timer = self._loop.call_at(self._idle_until, self._check_idle)
        else:
            self._connection.close()
