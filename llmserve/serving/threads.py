"""Blocking work in threads that do not delay the exit of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def in_daemon_thread(work: Callable[[], Result], name: str) -> Result:
    """Like `asyncio.to_thread`, whose pool is joined at exit, but for work that may hang, such as a model's own code.

    If the caller is cancelled, the work continues and its result is discarded.
    """
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()  # so that a cancelled caller cannot cancel it

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # border: raised where it is awaited
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)
