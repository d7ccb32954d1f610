"""Generates responses while no client waits for them. They end as stored responses, or with the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.errors import ResourceExhausted
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.failures import failure_of

# Running at once, of all API keys and of one. Connections limit clients that wait for answers, but not these.
MOST, MOST_OF_ONE = 256, 64
FINAL = ("completed", "incomplete")  # states of a response that can be continued
Document = Callable[[str], dict[str, Json]]  # makes the document of a response in a state


@dataclass(frozen=True, slots=True)
class _Running:
    document: Document
    task: asyncio.Task[None]


class Background:
    def __init__(self, tasks: set[asyncio.Task[None]]) -> None:
        """`tasks`: the server's, which it cancels when it stops."""
        self._tasks = tasks
        self._running: dict[tuple[str, str], _Running] = {}  # by owner and id

    def begin(
        self,
        owner: str,
        document: Document,
        making: Coroutine[Any, Any, object],
        keep: Callable[[Mapping[str, Json]], None],
    ) -> dict[str, Json]:
        """`making` stores its response itself; `keep` stores one that failed or was cancelled. Raises
        `ResourceExhausted`."""
        of_owner = sum(each == owner for each, _ in self._running)
        if len(self._running) >= MOST or of_owner >= MOST_OF_ONE:
            making.close()
            count, whose = (MOST_OF_ONE, " of yours") if of_owner >= MOST_OF_ONE else (MOST, "")
            raise ResourceExhausted(f"{count} responses{whose} already run in the background; try again later")
        queued = document("queued")
        key = owner, str(queued["id"])
        task = asyncio.get_running_loop().create_task(_make(document, making, keep))
        self._running[key] = _Running(document, task)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            making.close()  # if it was cancelled before it began
            del self._running[key]
            self._tasks.discard(task)
            if task.cancelled():
                keep(document("cancelled"))

        task.add_done_callback(ended)
        return queued

    def find(self, owner: str, response_id: str) -> dict[str, Json] | None:
        """The document of a running response; None if it is not running."""
        found = self._running.get((owner, response_id))
        return None if found is None else found.document("in_progress")

    async def cancel(self, owner: str, response_id: str) -> None:
        """Cancel a running response, which is then stored as cancelled. Other responses are not changed."""
        if (found := self._running.get((owner, response_id))) is not None:
            found.task.cancel()
            await asyncio.wait([found.task])


async def _make(
    document: Document, making: Coroutine[Any, Any, object], keep: Callable[[Mapping[str, Json]], None]
) -> None:
    try:
        await making
    except Exception as error:  # border: no client waits for it
        failure = failure_of(error)
        told: Json = {"code": failure.code or "server_error", "message": failure.message}
        keep({**document("failed"), "error": told})
