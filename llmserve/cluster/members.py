"""The workers of a cluster, as its client knows them.

Each worker that discovery lists is asked for its engine, and is not used if that is another one. It is then asked
regularly, which detects workers that hang. Runs on one event loop, except where noted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from llmserve.cluster.address import ClusterAddress
from llmserve.cluster.own_requests import hello_fields, read_hello_chunk
from llmserve.engine.base import EngineInfo
from llmserve.engine.remote.frames import ProtocolError
from llmserve.engine.remote.messages import EngineState

ASK_S, ASK_AGAIN_S = 1.0, 1.0  # between two queries of a worker; after a query without an answer
ANSWER_S = 2.0  # a worker without any message for so long is lost: within 3 s of its last one
LEAVING_S = 10.0  # for a worker that left discovery: it is not queried, and a long prompt sends no messages

logger = logging.getLogger(__name__)


class Client(Protocol):
    """The methods of Dynamo's `Client` that are used here."""

    def instance_ids(self) -> list[int]: ...

    async def direct(self, request: Any, instance_id: int, annotated: bool) -> AsyncIterator[Any]: ...


class WorkerLost(Exception):
    """A worker cannot finish a request; send it to another one."""


class WorkerSilent(WorkerLost):
    """A worker did not answer a query for its engine in time."""


@dataclass(eq=False, slots=True)
class Worker:
    """A worker that has identified its engine."""

    worker_id: int
    state: EngineState
    heard_at: float  # time of its last message, on the loop's clock
    readers: set[asyncio.Task[None]] = field(default_factory=set)  # of its running answers


class Members:
    """The workers with the engine `info`."""

    def __init__(self, info: EngineInfo, address: ClusterAddress) -> None:
        self.info = info  # with the workers' kernels, if one is known and all are the same
        self.are_met = threading.Event()  # set when all workers in discovery have been queried
        self._address = address
        self._workers: dict[int, Worker] = {}
        self._has_met = False  # at least one worker
        self._attended: dict[int, asyncio.Task[None]] = {}
        self._asked = set[int]()  # queried, with or without an answer

    def there(self) -> list[Worker]:
        """The running workers. Call it from any thread."""
        return list(self._workers.values())

    def look(self, client: Client) -> None:
        """Update the workers from discovery, with a task for each one. Call it regularly."""
        listed = set(client.instance_ids())
        self._asked &= listed
        for worker_id in listed - self._attended.keys():
            self._attended[worker_id] = asyncio.create_task(self._attend(worker_id, client))
        for worker_id in self._attended.keys() - listed:
            self._attended.pop(worker_id).cancel()
            logger.warning("worker %d of the cluster %s has left", worker_id, self._address.name)
        for worker_id in self._workers.keys() - listed:
            worker = self._workers[worker_id]
            if not worker.readers:  # else it may be finishing its answers
                del self._workers[worker_id]
            elif asyncio.get_running_loop().time() - worker.heard_at > LEAVING_S:
                self._lose(worker_id, f"it has left, and sent nothing for {LEAVING_S:g} s")

    async def _attend(self, worker_id: int, client: Client) -> None:
        """Ask a worker for its engine, and regularly for its state, while discovery lists it."""
        while True:
            try:
                info, state = await self._hello(worker_id, client)
            except (ProtocolError, WorkerLost) as error:
                # A worker that just left discovery cannot be queried, but may be streaming: `look` handles it.
                is_listed = worker_id in client.instance_ids()
                if is_listed and not (isinstance(error, WorkerSilent) and self._is_heard(worker_id)):
                    self._lose(worker_id, str(error))
                self._has_asked(worker_id)
                await asyncio.sleep(ASK_AGAIN_S)
                continue
            if info.digest != self.info.digest:
                self._has_asked(worker_id)
                logger.error(
                    "worker %d of the cluster %s is not used: its engine is %s, this server's is %s; start workers of "
                    "another engine with another --component",
                    worker_id, self._address.name, info.digest, self.info.digest,
                )  # fmt: skip
                return
            self._meet(worker_id, info, state)
            self._has_asked(worker_id)
            await asyncio.sleep(ASK_S)

    def _has_asked(self, worker_id: int) -> None:
        self._asked.add(worker_id)
        if self._workers and self._asked >= self._attended.keys():
            self.are_met.set()

    def _is_heard(self, worker_id: int) -> bool:
        """Whether it sends answers, although it is slow to answer queries."""
        worker = self._workers.get(worker_id)
        return worker is not None and asyncio.get_running_loop().time() - worker.heard_at <= ANSWER_S

    async def _hello(self, worker_id: int, client: Client) -> tuple[EngineInfo, EngineState]:
        """Raises `WorkerLost`, and `ProtocolError` if the answer is not from an llmserve worker."""

        async def ask() -> tuple[EngineInfo, EngineState]:
            found = None
            async for chunk in await client.direct(hello_fields(self._address.component), worker_id, False):
                found = found or read_hello_chunk(chunk)
            if found is None:
                raise WorkerLost("it said nothing")
            return found

        try:
            async with asyncio.timeout(ANSWER_S):  # wait_for of Python 3.11 drops a cancellation that meets the answer
                return await ask()
        except (ProtocolError, WorkerLost):
            raise
        except TimeoutError:
            raise WorkerSilent(f"no message for {ANSWER_S:g} s") from None
        except Exception as error:  # of Dynamo's, of many kinds
            raise WorkerLost(str(error)) from error

    def _meet(self, worker_id: int, info: EngineInfo, state: EngineState) -> None:
        now = asyncio.get_running_loop().time()
        if (worker := self._workers.get(worker_id)) is not None:
            worker.state, worker.heard_at = state, now
            return
        if not self._has_met:
            self.info = replace(self.info, kernels=info.kernels)
        elif info.kernels != self.info.kernels:
            logger.warning(
                "worker %d of the cluster %s computes with %r, others with %r: answers may differ in their last bits",
                worker_id, self._address.name, info.kernels, self.info.kernels,
            )  # fmt: skip
            self.info = replace(self.info, kernels="")  # answers may differ
        self._workers[worker_id] = Worker(worker_id, state, now)
        self._has_met = True
        logger.info("worker %d of the cluster %s answers, engine %s", worker_id, self._address.name, info.digest)

    def _lose(self, worker_id: int, why: str) -> None:
        worker = self._workers.pop(worker_id, None)
        logger.warning("worker %d of the cluster %s does not answer: %s", worker_id, self._address.name, why)
        for reader in worker.readers if worker is not None else ():
            reader.cancel()
