"""An engine as a worker of NVIDIA Dynamo: token ids in, token ids out, on the planes that its settings name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.backend.run import run
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.llm.exceptions import EngineShutdown
from dynamo.llm.exceptions import InvalidArgument as InvalidRequest

from llmserve.cluster.block_events import BlockEvents
from llmserve.cluster.model_folder import DIGEST, model_folder
from llmserve.cluster.own_requests import LAST, asked, error_chunk, event_chunk, hello_chunk, read_request
from llmserve.cluster.requests import chunk_of, request_of
from llmserve.cluster.settings import WorkerSettings
from llmserve.core import GenerateRequest, TokenEvent
from llmserve.engine.base import Engine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.registry import runtime_for
from llmserve.engine.remote.frames import Frame, Kind, ProtocolError
from llmserve.errors import InternalError, InvalidArgument, LlmserveError, ResourceExhausted, Unavailable
from llmserve.stages.guides import GuidesOfDirectory

logger = logging.getLogger(__name__)
TICK_S = 0.1  # between two reports of cache usage
END = None


class LlmserveWorker(LLMEngine):  # type: ignore[misc]
    """One engine. Requests are cancelled in `abort`, because a cancellation may reach `generate` much later."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._directory = EngineDirectory.open(settings.engine)
        self._folder = model_folder(self._directory)  # files for the front end
        self._events = BlockEvents()
        self._engine: Engine | None = None
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._snapshots: Any = None
        self._ticks: asyncio.Task[None] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[LlmserveWorker, WorkerConfig]:
        raise AssertionError("`serve_worker` makes the worker; it has no flags of Dynamo's")

    def config(self) -> WorkerConfig:
        settings = self._settings
        name = settings.name or self._directory.path.name
        return WorkerConfig(
            namespace=get_worker_namespace(settings.namespace),  # an operator adds a suffix for a generation of pods
            component=settings.component or name,
            model_name=str(self._folder),
            served_model_name=name,
            endpoint_types="chat,completions",
            discovery_backend=settings.discovery,
            request_plane=settings.request_plane,
            event_plane=settings.event_plane,
            use_kv_events=True,
        )

    async def start(self, worker_id: int) -> EngineConfig:
        loop, given = asyncio.get_running_loop(), self._settings.settings
        settings = replace(given, scheduler=replace(given.scheduler, block_listener=self._events))
        runtime = runtime_for(self._directory.manifest.target)
        self._engine = engine = await loop.run_in_executor(None, runtime.open, self._directory, settings)
        self._guides = GuidesOfDirectory(self._directory.path, engine.info.vocab_size)
        info, stats = engine.info, engine.stats()
        self._ticks = loop.create_task(self._report())
        logger.info("worker %d answers with %s, engine %s", worker_id, info.name, info.digest)
        return EngineConfig(
            model=str(self._folder),
            served_model_name=self._settings.name or self._directory.path.name,
            runtime_data={DIGEST: info.digest},
            llm=LlmRegistration(
                context_length=info.max_seq_len,
                kv_cache_block_size=stats.tokens_per_block,
                total_kv_blocks=stats.max_num_blocks,
                max_num_seqs=info.max_batch_size,
                max_num_batched_tokens=info.max_num_tokens,
            ),
        )

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [PushSource(on_ready=self._events.publish_to)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots = publisher

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Answer a request of Dynamo's front end, or of llmserve's server, which uses its own messages."""
        try:
            frame = asked(request)
        except ProtocolError as error:
            raise InvalidRequest(f"a request of an llmserve server cannot be read: {error}") from error
        async with aclosing(self._own(request, frame, context) if frame else self._theirs(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _theirs(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        assert self._engine is not None
        limit, migrates = self._engine.info.max_seq_len, self._settings.migrates
        try:
            asked = request_of(request, context.id(), max_seq_len=limit, migrates=migrates)
            stream = self._engine.submit(asked)
        except InvalidArgument as error:
            raise InvalidRequest(str(error)) from error
        async with aclosing(self._events_of(stream, context)) as events:
            async for event in events:
                if isinstance(event, Exception):
                    raise _told(event)
                yield chunk_of(event)

    async def _own(self, request: Any, frame: Frame, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Answer llmserve's server. Errors are sent as chunks, which keep class and message; Dynamo's errors do not."""
        assert self._engine is not None
        if frame.kind is Kind.HELLO:
            yield hello_chunk(self._engine)
        else:
            try:
                stream = self._engine.submit(await self._read(request, frame, context))
            except LlmserveError as error:
                yield error_chunk(error)
            else:
                async with aclosing(self._events_of(stream, context)) as events:
                    async for event in events:
                        yield _own_chunk(event)
        yield dict(LAST)

    async def _read(self, request: Any, frame: Frame, context: Any) -> GenerateRequest:
        try:
            asked, guide = read_request(request, frame, context.id())
        except ProtocolError as error:
            raise InvalidArgument(str(error)) from error
        return asked if guide is None else replace(asked, guide=await self._guides.compiled(*guide))

    async def _events_of(
        self, stream: AsyncGenerator[TokenEvent, None], context: Any
    ) -> AsyncGenerator[TokenEvent | Exception, None]:
        """Events of one answer. An exception is the last one."""
        events: asyncio.Queue[TokenEvent | Exception | None] = asyncio.Queue()
        answer = asyncio.create_task(self._answer(stream, events))
        self._answers[context.id()] = answer
        try:
            while (event := await events.get()) is not END:
                yield event
        finally:
            answer.cancel()
            self._answers.pop(context.id(), None)

    async def _answer(self, stream: AsyncGenerator[TokenEvent, None], events: asyncio.Queue[Any]) -> None:
        """Reads one stream, and closes it when this task ends, which frees its blocks."""
        try:
            async with aclosing(stream):
                async for event in stream:
                    events.put_nowait(event)
        except Exception as error:  # the reader gets it
            events.put_nowait(error)
        finally:
            events.put_nowait(END)

    async def abort(self, context: Any) -> None:
        if (answer := self._answers.get(context.id())) is not None:
            answer.cancel()

    async def cleanup(self) -> None:
        """Wait for running answers, for at most `drain_s`, then close the engine."""
        if self._ticks is not None:
            self._ticks.cancel()
        if self._answers:
            await asyncio.wait(list(self._answers.values()), timeout=self._settings.drain_s)
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await asyncio.get_running_loop().run_in_executor(None, engine.close)

    async def _report(self) -> None:
        """Report cache usage, for the router and for /metrics."""
        while self._engine is not None:
            if self._snapshots is not None:
                stats = self._engine.stats()
                found = stats.reused_blocks + stats.missed_blocks
                self._snapshots.publish(
                    0,
                    ComponentSnapshot(
                        kv_used_blocks=stats.used_num_blocks,
                        kv_total_blocks=stats.max_num_blocks,
                        gpu_cache_usage=stats.used_num_blocks / max(1, stats.max_num_blocks),
                        dp_rank=0,
                        kv_cache_hit_rate=stats.reused_blocks / found if found else None,
                    ),
                )
            await asyncio.sleep(TICK_S)


def _own_chunk(event: TokenEvent | Exception) -> dict[str, Any]:
    if isinstance(event, LlmserveError):
        return error_chunk(event)
    if isinstance(event, Exception):
        return error_chunk(InternalError(f"the worker failed: {event!r}"))
    return event_chunk(event)


def _told(error: Exception) -> Exception:
    """The error for Dynamo's front end. If another worker may succeed, the front end retries there, or returns a 503.
    An engine that is gone or full is not the client's error."""
    is_elsewhere = isinstance(error, Unavailable | ResourceExhausted)
    return EngineShutdown(str(error)) if is_elsewhere else error


def serve_worker(settings: WorkerSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    worker = LlmserveWorker(settings)

    async def made(_: list[str] | None) -> tuple[LlmserveWorker, WorkerConfig]:
        return worker, worker.config()

    run(LlmserveWorker, [], made)
