"""What is too much work for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from llmserve.wire.request_memory import RequestMemory, Share

INLINE_BYTES = 64 * 1024  # of input that is decoded on the event loop: a few milliseconds at most
Result = TypeVar("Result")


class TooMuchForLoop(Exception):
    """Raised where it turns out, and nothing has been done yet: do it again in a thread."""


def leave_loop(*, when: bool) -> None:
    """Raise `TooMuchForLoop` in a thread that runs an event loop."""
    if when:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise TooMuchForLoop


async def beside_loop(work: Callable[[], Result], *, size: int, memory: RequestMemory, share: Share) -> Result:
    """Do `work` on about `size` bytes: here when they are few, and it does not find that there is more to do."""
    if size <= INLINE_BYTES:
        try:
            return work()
        except TooMuchForLoop:
            pass
    return await memory.work(work, share)
