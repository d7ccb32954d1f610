"""How much memory requests under way take, and may: one count for all ports of a server.

Each request has a share. Whoever reads, inflates or decodes grows it before the memory is there; its connection
releases it when the request is over, in whatever way. Work in a thread goes on when its request has ended, so it keeps
the share until it is done.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from llmserve.errors import InvalidArgument, ResourceExhausted

UNLIMITED_BYTES = 2**62
# While something is decoded, a thread that computes gives way to the event loop after this, not 5 ms: the loop asks
# anew for each connection. All the time, it would cost small requests a tenth: models' threads switch more often, too.
SWITCH_INTERVAL_S = 0.0002
USUAL_INTERVAL_S = sys.getswitchinterval()
UNREAD_TIMEOUT_S = 300.0  # in which a client has to take something of an answer that waits for it, and has its share
MOST_OF_QUICK_BYTES = 1024 * 1024  # of a request that does not wait behind larger ones
Result = TypeVar("Result")


class RequestTooLarge(ResourceExhausted):
    """It asks for more than any one request may take: it will never be served."""


class Share:
    """What one request takes. From any thread."""

    __slots__ = ("_memory", "_num_holders", "num_bytes")

    def __init__(self, memory: RequestMemory, num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        self._memory = memory
        self._num_holders = 1

    def grow(self, size: int) -> None:
        """Raises `RequestTooLarge`, or `ResourceExhausted` when all requests together take too much."""
        memory = self._memory
        with memory.lock:
            own, taken = self.num_bytes + size, memory.taken_bytes + size
            if own > memory.each_bytes:
                raise RequestTooLarge(
                    f"the request takes more than {memory.each_bytes} bytes of memory, the limit for one request. "
                    "Use --request-memory-each to increase the limit."
                )
            if taken > memory.limit_bytes:
                raise ResourceExhausted(
                    f"running requests use most of the {memory.limit_bytes} bytes of memory that all may use together "
                    "(--request-memory): try again later"
                )
            self.num_bytes, memory.taken_bytes = own, taken

    def shrink(self, size: int) -> None:
        """`size` bytes are no more."""
        with self._memory.lock:
            self._memory.taken_bytes -= size
            self.num_bytes -= size

    def split(self, size: int) -> Share:
        """A share of its own for `size` bytes of this one."""
        with self._memory.lock:
            self.num_bytes -= size
        return Share(self._memory, size)

    def hold(self) -> None:
        """It ends with one more `release`."""
        with self._memory.lock:
            self._num_holders += 1

    def release(self) -> None:
        with self._memory.lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                self._memory.taken_bytes -= self.num_bytes
                self.num_bytes = 0


class RequestMemory:
    def __init__(self, limit_bytes: int = UNLIMITED_BYTES, each_bytes: int = UNLIMITED_BYTES) -> None:
        if not 0 < each_bytes <= limit_bytes:
            raise InvalidArgument(
                f"--request-memory-each ({each_bytes}) must be above 0, and at most --request-memory ({limit_bytes})"
            )
        self.limit_bytes = limit_bytes
        self.each_bytes = each_bytes
        self.taken_bytes = 0
        self.lock = threading.Lock()  # of every share's count, and of how many work
        self._num_working = 0
        # Decoding holds the interpreter lock: more threads would not be faster, and leave less of it to the event loop.
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="decode-large")

    def share(self) -> Share:
        return Share(self)

    async def work(self, work: Callable[[], Result], share: Share) -> Result:
        """Do `work` in a thread, and keep `share` until it is done, even when nobody waits any more.

        What it returns or raises is in nobody's memory but its caller's: `asyncio.wrap_future` makes cycles, which
        keep large results until the garbage collector comes by.
        """
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        share.hold()
        worker = self._quick if share.num_bytes <= MOST_OF_QUICK_BYTES else self._slow
        self._add_working(1)
        running = worker.submit(_run, [(work, outcome)])
        running.add_done_callback(lambda _: self._end(share))
        try:
            return await outcome
        except asyncio.CancelledError:
            running.cancel()  # unless it has begun
            raise
        finally:
            del outcome  # which has the error, whose traceback would have it

    def _end(self, share: Share) -> None:
        self._add_working(-1)
        share.release()

    def _add_working(self, count: int) -> None:
        with self.lock:
            self._num_working += count
            sys.setswitchinterval(SWITCH_INTERVAL_S if self._num_working else USUAL_INTERVAL_S)

    def close(self) -> None:
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)


def _run(due: list[tuple[Callable[[], Result], asyncio.Future[Result]]]) -> None:
    """The one piece of work that is `due`; a list, so that whoever called this does not have it any more."""
    work, outcome = due.pop()
    loop = outcome.get_loop()
    try:
        result = work()
    except BaseException as error:  # border: raised where it is awaited
        _let_go(error)
        loop.call_soon_threadsafe(_fail, outcome, error)
    else:
        loop.call_soon_threadsafe(_succeed, outcome, result)
        del result
    finally:
        del work, outcome


def _succeed(outcome: asyncio.Future[Result], result: Result) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _fail(outcome: asyncio.Future[Result], error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)


def _let_go(error: BaseException) -> None:
    """Of what the frames of an error and of its causes hold."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without ours, which is not over
    failure: BaseException | None = error
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__
