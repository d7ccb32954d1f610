"""The calls of one connection: from heads to handlers, and from handlers to statuses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from grpc import StatusCode

from llmserve.errors import ResourceExhausted
from llmserve.wire.http2.call import Aborted, Call
from llmserve.wire.http2.expiry import Expiry
from llmserve.wire.http2.headers import RequestHead
from llmserve.wire.http2.messages import BadMessage
from llmserve.wire.http2.method import Method
from llmserve.wire.http2.sender import CallClosed, Sender
from llmserve.wire.request_memory import RequestMemory
from llmserve.wire.turns import Pace

DEADLINE_GRACE_S = 0.5  # for a handler to end by itself after its client's deadline
MESSAGE_PAUSE_S = 60.0  # longest time without a byte of a message that has begun

logger = logging.getLogger(__name__)


async def _nothing(request: Any, context: Any) -> None:
    """Placeholder for the handler of an unknown path; never called."""


NO_METHOD = Method(_nothing, bytes)


class Calls:
    def __init__(
        self,
        methods: Mapping[str, Method],
        sender: Sender,
        memory: RequestMemory,
        *,
        pace: Pace,
        on_empty: Callable[[], None],
    ) -> None:
        """`methods` by path; `on_empty` is called when the last open call is over."""
        self._memory = memory
        self._methods = methods
        self._sender = sender
        self._on_empty = on_empty
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Call] = {}
        self._expiry = Expiry(self._calls, self._expire)
        self._pause_timer: asyncio.TimerHandle | None = None  # while there are calls

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls.values())

    def get(self, stream: int) -> Call | None:
        return self._calls.get(stream)

    def running(self, stream: int) -> Call | None:
        """The call, if data can still be sent on it."""
        call = self._calls.get(stream)
        return None if call is None or call.is_closed else call

    def open(self, stream: int, head: RequestHead, send_window: int, *, has_ended: bool) -> None:
        """`has_ended`: the client sends nothing after the head."""
        method = self._methods.get(head.path)
        call = Call(
            self._sender, stream, head, method=method or NO_METHOD, memory=self._memory, send_window=send_window
        )
        if has_ended:
            call.end()
        if head.refusal is not None:
            call.finish(head.refusal.code, str(head.refusal))
            return
        if method is None:
            call.finish(StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        if method.open is not None:
            method.open(call)
        if method.refuse is not None and (problem := method.refuse(head.metadata)) is not None:
            call.finish(problem.code, str(problem))
            call.forget()
            return
        self._calls[stream] = call
        if self._pause_timer is None:
            self._pause_timer = self._loop.call_later(MESSAGE_PAUSE_S, self._end_silent)
        if head.timeout_s is not None:
            self._expiry.add(stream, head.timeout_s + DEADLINE_GRACE_S)
        if method.streams:
            self._start(call)
        elif has_ended:
            self._refuse(call, BadMessage(StatusCode.INTERNAL, "the call has no message"))

    def receive(self, call: Call, data: bytes, *, size: int, is_last: bool) -> None:
        """Take data that used `size` bytes of the window."""
        try:
            call.receive(data, size)
            if call.num_messages > 1 and not call.is_started:
                raise BadMessage(StatusCode.INTERNAL, "the call has more than one message")
        except BadMessage as problem:
            self._refuse(call, problem)
            return
        if is_last:
            self.end(call)

    def end(self, call: Call) -> None:
        """The client has sent everything."""
        call.end()
        if call.is_started:
            return
        if call.num_messages != 1:
            problem = f"the call has {call.num_messages} complete messages instead of one"
            self._refuse(call, BadMessage(StatusCode.INTERNAL, problem))
            return
        self._start(call)

    def cancel(self, call: Call) -> None:
        call.is_closed = True
        self._pace.do(partial(self._cancel, call))

    def cancel_all(self) -> None:
        """Cancel the calls of a connection that is over."""
        for call in list(self._calls.values()):
            self.cancel(call)
        self._expiry.stop()
        if self._pause_timer is not None:
            self._pause_timer.cancel()

    def _start(self, call: Call) -> None:
        call.is_started = True
        self._pace.do(partial(self._run_soon, call))

    def _run_soon(self, call: Call) -> None:
        if call.is_closed:  # it has been cancelled meanwhile
            return
        call.task = self._loop.create_task(self._run(call), context=call.context)
        call.task.add_done_callback(lambda _: self._forget(call))  # not in `_run`, which may be cancelled at once

    async def _handle(self, call: Call) -> None:
        method = self._methods[call.head.path]
        if method.streams:
            await method.handle(call)
            call.finish()
        else:
            await call.answer(await method.handle(await call.take(), call))

    async def _run(self, call: Call) -> None:
        try:
            await self._handle(call)
        except Aborted as ending:
            call.finish(ending.code, ending.details)
        except BadMessage as problem:
            call.finish(problem.code, str(problem))
        except ResourceExhausted as error:  # the answer takes too much memory
            call.finish(StatusCode.RESOURCE_EXHAUSTED, str(error))
        except CallClosed:
            pass
        except asyncio.CancelledError:
            call.finish(StatusCode.CANCELLED, "the server cancelled the call")  # no effect if the client cancelled it
            raise
        except Exception as error:  # border: an internal error becomes this call's status
            if isinstance(error, ExceptionGroup) and (bad := error.subgroup(BadMessage)) is not None:  # of a task group
                first = next(_leaves(bad))
                call.finish(first.code, str(first))
            else:
                logger.exception("%s failed", call.head.path)
                call.finish(StatusCode.INTERNAL, f"internal error: {error!r}")

    def _end_silent(self) -> None:
        """End calls with a pause that is too long. One timer per connection notices it after one to two such times."""
        now = time.monotonic()
        text = f"the message stopped arriving: no data for {MESSAGE_PAUSE_S:g} seconds"
        for call in list(self._calls.values()):
            if call.silent_s(now) >= MESSAGE_PAUSE_S:
                self._refuse(call, BadMessage(StatusCode.DEADLINE_EXCEEDED, text))
        self._pause_timer = None
        if self._calls:
            self._pause_timer = self._loop.call_later(MESSAGE_PAUSE_S, self._end_silent)

    def _expire(self, stream: int) -> None:
        self._refuse(self._calls[stream], BadMessage(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _refuse(self, call: Call, problem: BadMessage) -> None:
        call.finish(problem.code, str(problem))
        self.cancel(call)

    def _cancel(self, call: Call) -> None:
        if self._calls.get(call.stream) is not call:  # it has ended meanwhile
            return
        if call.task is None:
            self._forget(call)
        else:
            call.task.cancel()

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.stream, None)
        call.forget()
        if not self._calls:
            self._on_empty()


def _leaves(group: BaseExceptionGroup[BadMessage]) -> Iterator[BadMessage]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
