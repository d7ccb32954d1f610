"""Blocking work beside the loop that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def in_daemon_thread(work: Callable[[], Result], name: str) -> Result:
    """`asyncio.to_thread` for work that may hang, such as a model's own code: its pool is joined at exit.

    When the caller is cancelled the work goes on, for nobody.
    """
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()  # so that a cancelled caller cannot take it away from the thread

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # border: raised where it is awaited
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)
