"""The workers of a cluster, as its client knows them.

Each one that discovery tells of is asked who it is, and left out where that is another engine; from then on it is asked
regularly, which finds those that hang. Lives on one event loop, but for what says otherwise.
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

ASK_S, ASK_AGAIN_S = 1.0, 1.0  # between two questions to a worker; after one without an answer
ANSWER_S = 2.0  # after that a worker that says nothing else either is lost: within 3 s of its last word
LEAVING_S = 10.0  # the same of one that discovery has forgotten: it is asked no more, and a long prompt is silent

logger = logging.getLogger(__name__)


class Client(Protocol):
    """Dynamo's `Client`, as far as we use it here."""

    def instance_ids(self) -> list[int]: ...

    async def direct(self, request: Any, instance_id: int, annotated: bool) -> AsyncIterator[Any]: ...


class WorkerLost(Exception):
    """What was asked of a worker is to be asked of another."""


class WorkerSilent(WorkerLost):
    """It was asked who it is, and did not answer in time."""


@dataclass(eq=False, slots=True)
class Worker:
    """One that has said who it is."""

    worker_id: int
    state: EngineState
    heard_at: float  # of it, or from it; of the loop's clock
    readers: set[asyncio.Task[None]] = field(default_factory=set)  # of the answers that it gives


class Members:
    """Those with the engine that `info` tells of."""

    def __init__(self, info: EngineInfo, address: ClusterAddress) -> None:
        self.info = info  # with the workers' kernels, once one is known and as long as all have the same
        self.are_met = threading.Event()  # all that discovery told of
        self._address = address
        self._workers: dict[int, Worker] = {}
        self._has_met = False  # one
        self._attended: dict[int, asyncio.Task[None]] = {}
        self._asked = set[int]()  # and answered, or not

    def there(self) -> list[Worker]:
        """From any thread."""
        return list(self._workers.values())

    def look(self, client: Client) -> None:
        """To be called regularly. A task attends to each that discovery tells of."""
        listed = set(client.instance_ids())
        self._asked &= listed
        for worker_id in listed - self._attended.keys():
            self._attended[worker_id] = asyncio.create_task(self._attend(worker_id, client))
        for worker_id in self._attended.keys() - listed:
            self._attended.pop(worker_id).cancel()
            logger.warning("worker %d of the cluster %s has left", worker_id, self._address.name)
        for worker_id in self._workers.keys() - listed:
            worker = self._workers[worker_id]
            if not worker.readers:  # else it may be finishing what it has begun
                del self._workers[worker_id]
            elif asyncio.get_running_loop().time() - worker.heard_at > LEAVING_S:
                self._lose(worker_id, f"it has left, and sent nothing for {LEAVING_S:g} s")

    async def _attend(self, worker_id: int, client: Client) -> None:
        """Ask it who it is, and again and again whether it is there, as long as discovery tells of it."""
        while True:
            try:
                info, state = await self._hello(worker_id, client)
            except (ProtocolError, WorkerLost) as error:
                # One that discovery has just forgotten can't be asked, and may be streaming: `look` deals with it.
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
        """Whether its answers come, although it is slow to say who it is."""
        worker = self._workers.get(worker_id)
        return worker is not None and asyncio.get_running_loop().time() - worker.heard_at <= ANSWER_S

    async def _hello(self, worker_id: int, client: Client) -> tuple[EngineInfo, EngineState]:
        """Raises `WorkerLost`, and `ProtocolError` where somebody else answers."""

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
            self.info = replace(self.info, kernels="")  # no promise
        self._workers[worker_id] = Worker(worker_id, state, now)
        self._has_met = True
        logger.info("worker %d of the cluster %s answers, engine %s", worker_id, self._address.name, info.digest)

    def _lose(self, worker_id: int, why: str) -> None:
        worker = self._workers.pop(worker_id, None)
        logger.warning("worker %d of the cluster %s does not answer: %s", worker_id, self._address.name, why)
        for reader in worker.readers if worker is not None else ():
            reader.cancel()
