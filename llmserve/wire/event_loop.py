"""Keeps long work off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from llmserve.wire.request_memory import RequestMemory, Share

INLINE_BYTES = 64 * 1024  # input up to this size is decoded on the event loop: a few milliseconds at most
Result = TypeVar("Result")


class TooMuchForLoop(Exception):
    """The work is too long for the event loop, and nothing has been done yet: repeat it in a thread."""


def leave_loop(*, when: bool) -> None:
    """Raise `TooMuchForLoop` in a thread that runs an event loop."""
    if when:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise TooMuchForLoop


async def beside_loop(work: Callable[[], Result], *, size: int, memory: RequestMemory, share: Share) -> Result:
    """Do `work` on about `size` bytes: here if they are few and it raises no `TooMuchForLoop`, else in a thread."""
    if size <= INLINE_BYTES:
        try:
            return work()
        except TooMuchForLoop:
            pass
    return await memory.work(work, share)
