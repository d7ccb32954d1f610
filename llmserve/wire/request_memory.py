"""Counts and limits the memory of running requests: one count for all ports of a server.

Each request has a share. Code that reads, inflates or decodes grows it before it allocates memory. The connection
releases it when the request ends, however it ends. Work in a thread may outlast its request, so it holds the share
until it is done.
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
# While a request is decoded, threads yield the GIL to the event loop after this time instead of 5 ms: the loop waits
# for it once per connection. Set always, it would slow small requests by a tenth: models' threads switch more, too.
SWITCH_INTERVAL_S = 0.0002
USUAL_INTERVAL_S = sys.getswitchinterval()
UNREAD_TIMEOUT_S = 300.0  # in which a client must read part of a waiting answer, which holds its share
MOST_OF_QUICK_BYTES = 1024 * 1024  # a request up to this size does not wait behind larger ones
Result = TypeVar("Result")


class RequestTooLarge(ResourceExhausted):
    """The request needs more memory than one request may use, so it will never be served."""


class Share:
    """The memory of one request. Thread-safe."""

    __slots__ = ("_memory", "_num_holders", "num_bytes")

    def __init__(self, memory: RequestMemory, num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        self._memory = memory
        self._num_holders = 1

    def grow(self, size: int) -> None:
        """Add bytes. Raises `RequestTooLarge`, or `ResourceExhausted` if all requests together use too much."""
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
        """Subtract `size` bytes that were freed."""
        with self._memory.lock:
            self._memory.taken_bytes -= size
            self.num_bytes -= size

    def split(self, size: int) -> Share:
        """Move `size` bytes of this share to a new one."""
        with self._memory.lock:
            self.num_bytes -= size
        return Share(self._memory, size)

    def hold(self) -> None:
        """Add a holder: the share then ends after one more `release`."""
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
        self.lock = threading.Lock()  # guards the counts of all shares, and `_num_working`
        self._num_working = 0
        # Decoding holds the GIL: more threads would not be faster, and would leave less of it to the event loop.
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="decode-large")

    def share(self) -> Share:
        return Share(self)

    async def work(self, work: Callable[[], Result], share: Share) -> Result:
        """Do `work` in a thread, and hold `share` until it is done, even if nobody waits for it any more.

        Only the caller keeps a reference to its result or error. `asyncio.wrap_future` would create cycles, which keep
        large results alive until the garbage collector runs.
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
            del outcome  # it refers to the error, whose traceback would refer to it

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
    """Run the one item of `due`, which is a list so that the caller keeps no reference to the item."""
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
    """Clear the frames of an error and of its causes, so that they keep no large values alive."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without this frame, which still runs
    failure: BaseException | None = error
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__
