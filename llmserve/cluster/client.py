"""`ClusterEngine`: the `Engine` protocol over the workers of a cluster of NVIDIA Dynamo.

Dynamo's runtime and an event loop run on a separate thread. A request goes to the worker that has its beginning cached,
or to the workers in turn if the router has no answer. If its worker is lost or full, it goes to one that was not tried
yet. Its reader does not get any token twice (`said.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from dynamo._core import Context
from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime

from llmserve.cluster.address import ClusterAddress
from llmserve.cluster.members import Members, Worker, WorkerLost
from llmserve.cluster.own_requests import read_chunk, request_fields
from llmserve.cluster.said import Said
from llmserve.core import GenerateRequest, TokenEvent
from llmserve.engine.base import EngineInfo, EngineStats
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.remote.frames import ProtocolError
from llmserve.engine.remote.messages import guide_source
from llmserve.engine.settings import EngineSettings
from llmserve.engine.stream import EngineEnd, Item, Outbox, TokenStream
from llmserve.engine.validation import check_request
from llmserve.errors import InternalError, LlmserveError, RateLimited, ResourceExhausted, Unavailable

START_S = 10.0  # for Dynamo's runtime
FIRST_WORKERS_S = 3.0  # at the start, for the workers that are running
LOOK_S = 0.1  # between two checks for workers
ROUTE_S = 2.0
GONE_S = 5.0  # without workers, until discovery is restarted
CLOSE_S = 10.0

logger = logging.getLogger(__name__)


class ClusterEngine:
    """Runs the engine in `directory`, which is not opened here, on workers. `close` does not stop the workers."""

    def __init__(self, directory: EngineDirectory, address: ClusterAddress) -> None:
        """Raises `Unavailable` if Dynamo's runtime does not start. Having no workers is not an error."""
        self._address = address
        self._members = Members(directory.info(), address)
        self._end = EngineEnd()
        self._lock = threading.Lock()  # guards the fields below
        self._streams = set[TokenStream]()
        self._router: Any = None
        self._client: Any = None
        self._turns = itertools.count()
        self._failure = ""
        self._has_begun = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"llmserve-cluster-{address.name}", daemon=True)
        self._thread.start()
        if not self._has_begun.wait(START_S) or self._failure:
            raise Unavailable(f"no client of the cluster {address.name}: {self._failure or 'its start takes too long'}")
        self._members.are_met.wait(FIRST_WORKERS_S)

    @property
    def info(self) -> EngineInfo:
        return self._members.info

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `Engine.submit`. Errors that only a worker can detect are raised at the first pull. So is `Unavailable`
        if there is no worker."""
        self._end.check()
        info = self.info
        check_request(
            request, vocab_size=info.vocab_size, max_seq_len=info.max_seq_len, max_beam_width=info.max_beam_width
        )
        if request.guide is not None:
            guide_source(request.guide)  # raises now if it cannot be sent
        return self._stream(request)

    def stats(self) -> EngineStats:
        """Sums over all workers, from their last reports. They include requests of other clients."""
        states = [worker.state.stats for worker in self._members.there()]
        if not states:
            return EngineStats()
        summed = (
            "num_waiting_requests", "num_active_requests", "max_num_active_requests", "num_scheduled_requests",
            "num_context_requests", "num_gen_requests", "num_paused_requests", "num_ctx_tokens", "max_num_blocks",
            "free_num_blocks", "used_num_blocks", "reused_blocks", "missed_blocks",
        )  # fmt: skip
        sums = {name: sum(getattr(state, name) for state in states) for name in summed}
        return EngineStats(tokens_per_block=states[0].tokens_per_block, **sums)

    def healthy(self) -> bool:
        """Whether this client works. Without workers, it is healthy and requests fail."""
        return self._end.reason is None

    def close(self) -> None:
        """See `Engine.close`."""
        with self._lock:
            outbox = self._end.say(Unavailable("the engine has been closed"), self._streams)
        outbox.flush()
        self._soon(self._closing.set)
        self._thread.join(CLOSE_S)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        stream = TokenStream(asyncio.get_running_loop(), request.num_answers)
        with self._lock:
            self._end.check()
            self._streams.add(stream)
        answer = asyncio.run_coroutine_threadsafe(self._answer(request, stream), self._loop)
        try:
            while stream.num_open:
                yield await stream.get()
        finally:
            with self._lock:
                self._streams.discard(stream)
            if stream.num_open:
                answer.cancel()

    def _soon(self, callback: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed
            logger.debug("the cluster client of %s has stopped", self._address.name)

    # The methods below run on the thread of the cluster.

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except Exception as error:  # outermost handler: every open stream gets the error
            logger.exception("the client of the cluster %s failed", self._address.name)
            self._failure = repr(error)
            with self._lock:
                outbox = self._end.say(Unavailable(f"the client of the cluster failed: {error!r}"), self._streams)
            outbox.flush()
        finally:
            self._has_begun.set()
            self._loop.close()

    async def _live(self) -> None:
        """Run Dynamo's runtime, and replace it when discovery has no workers any more: after losing its records, it
        never finds workers again."""
        address = self._address
        while not self._closing.is_set():
            runtime = DistributedRuntime(
                self._loop, address.discovery, address.request_plane, event_plane=address.event_plane
            )
            endpoint = runtime.endpoint(f"{address.name}.generate")
            client = self._client = await endpoint.client()
            self._has_begun.set()
            try:
                await self._watch(client, endpoint)
            finally:
                left = asyncio.all_tasks() - {asyncio.current_task()}
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
                self._router = None
                runtime.shutdown()

    async def _watch(self, client: Any, endpoint: Any) -> None:
        """Return when closing, or when all workers have been gone for `GONE_S`."""
        gone_at: float | None = None
        while not self._closing.is_set():
            self._members.look(client)
            if there := self._members.there():
                if self._router is None:
                    self._router = KvRouter(endpoint, there[0].state.stats.tokens_per_block, KvRouterConfig())
                gone_at = math.inf
            elif gone_at == math.inf:
                gone_at = self._loop.time()
            elif gone_at is not None and self._loop.time() - gone_at > GONE_S and not self._streams:
                logger.warning(
                    "all workers of the cluster %s have been unreachable for %g s", self._address.name, GONE_S
                )
                return
            await _before(self._closing, LOOK_S)

    async def _answer(self, request: GenerateRequest, stream: TokenStream) -> None:
        """Answer a request. The reader gets every error."""
        try:
            await self._tried(request, stream)
        except LlmserveError as error:
            _put(stream, error)
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            _put(stream, InternalError(f"the client of the cluster failed: {error!r}"))

    async def _tried(self, request: GenerateRequest, stream: TokenStream) -> None:
        """Try one worker after the other, each once."""
        said, been, last = Said(request.num_answers), set[int](), ""
        refusal: ResourceExhausted | None = None
        while not said.is_complete:
            ask_id = uuid.uuid4().hex
            worker = await self._chosen(request, ask_id, been)
            if worker is None:
                raise refusal or Unavailable(self._nobody(last))
            been.add(worker.worker_id)
            reading = self._loop.create_task(self._read(request, worker, ask_id, said, stream))
            worker.readers.add(reading)
            try:
                await asyncio.wait({reading})
                reading.result()
            except RateLimited:  # applies to the tenant at every worker
                raise
            except ResourceExhausted as error:
                refusal = error
            except (WorkerLost, Unavailable, asyncio.CancelledError) as error:
                if self._has_left():
                    raise
                last = str(error) or "it stopped answering"
                self._log_move(request, worker, said, last)
            finally:
                reading.cancel()
                worker.readers.discard(reading)
                await self._freed(ask_id)

    @staticmethod
    def _has_left() -> bool:
        """Whether the reader has cancelled this task."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    def _log_move(self, request: GenerateRequest, worker: Worker, said: Said, why: str) -> None:
        logger.warning(
            "request %s fails over to another worker of the cluster %s, after %d tokens: %d is lost (%s)",
            request.request_id, self._address.name, said.num_tokens, worker.worker_id, why,
        )  # fmt: skip

    async def _read(
        self, request: GenerateRequest, worker: Worker, ask_id: str, said: Said, stream: TokenStream
    ) -> None:
        """Read one worker's answer, or the rest of it after a failover."""
        context = Context(ask_id)
        said.begin_again()
        try:
            fields = request_fields(request, self._address.component)
            is_first = True
            async for chunk in await self._client.direct(fields, worker.worker_id, False, context):
                worker.heard_at = self._loop.time()
                for item in read_chunk(chunk):
                    if isinstance(item, LlmserveError):
                        raise item
                    if (news := said.news(item)) is not None:
                        _put(stream, news)
                if is_first and self._router is not None:
                    is_first = False
                    await self._told(self._router.mark_prefill_complete(ask_id))
        except (LlmserveError, ProtocolError):
            raise
        except Exception as error:  # Dynamo raises many kinds
            raise WorkerLost(str(error)) from error
        finally:
            context.stop_generating()
        if not said.is_complete:
            raise WorkerLost("its answer has no end")

    async def _chosen(self, request: GenerateRequest, ask_id: str, been: set[int]) -> Worker | None:
        """The worker that has the prompt's beginning cached, among the running ones that were not tried yet."""
        free = [worker for worker in self._members.there() if worker.worker_id not in been]
        if self._router is not None and len(free) > 1:
            best = await self._told(self._router.best_worker(list(request.prompt_ids), request_id=ask_id))
            found = next((worker for worker in free if best is not None and worker.worker_id == best[0]), None)
            if found is not None:
                return found
            await self._freed(ask_id)
        return free[next(self._turns) % len(free)] if free else None

    async def _freed(self, ask_id: str) -> None:
        if self._router is not None:
            await self._told(self._router.free(ask_id))

    async def _told(self, telling: Any) -> Any:
        """The router's answer; None if it fails, which must not fail a request."""
        try:
            async with asyncio.timeout(ROUTE_S):
                return await telling
        except Exception as error:  # Dynamo raises many kinds
            logger.debug("the router of the cluster %s: %s", self._address.name, error)
            return None

    def _nobody(self, last: str) -> str:
        found = f"the last worker's answer: {last}; " if last else ""
        return (
            f"no worker of the cluster {self._address.name} can answer with engine {self.info.digest[:12]}: {found}"
            f"start one (llmserve worker ENGINE --namespace {self._address.namespace} "
            f"--component {self._address.component}), or ask again later"
        )


def open_cluster(address: ClusterAddress, path: Path, settings: EngineSettings) -> ClusterEngine:
    """Like `open_engine`. `settings` is not used, because each worker has its own."""
    return ClusterEngine(EngineDirectory.open(path), address)


def _put(stream: TokenStream, item: Item) -> None:
    outbox = Outbox()
    outbox.put(stream, item)
    outbox.flush()


async def _before(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until `event` is set or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
