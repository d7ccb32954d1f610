"""`TensorrtLlmBackend`: loads an engine directory and answers requests with it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.tensorrtllm.active import ActiveRequest, ActiveRequests
from llmserve.backends.tensorrtllm.adapters import ServedAdapters, adapter_name
from llmserve.backends.tensorrtllm.answer import ResponseBuilder
from llmserve.backends.tensorrtllm.answer_histograms import AnswerHistograms
from llmserve.backends.tensorrtllm.batches import num_rows, responses_by_row
from llmserve.backends.tensorrtllm.compared_answers import answer_reader
from llmserve.backends.tensorrtllm.gauges import engine_facts, engine_gauges
from llmserve.backends.tensorrtllm.parameters import ENGINE_PATH, GPU, ModelParameters
from llmserve.backends.tensorrtllm.pooling import (
    check_kind,
    made_outputs,
    pooled_outputs,
    pooled_request,
    pooling_facts,
)
from llmserve.backends.tensorrtllm.receipts import Receipts
from llmserve.backends.tensorrtllm.request_tensors import TensorRequest, is_stop, read_request
from llmserve.backends.tensorrtllm.responses import ALWAYS_TOLD, MAKERS, ResponseEvents, asked_outputs, response_tensors
from llmserve.backends.tensorrtllm.sampling_defaults import sampling_defaults
from llmserve.backends.tensorrtllm.tenant_answers import counted
from llmserve.core import MAX_MODEL_LEN, POOLING, SAMPLING_DEFAULTS, GenerateRequest, Usage
from llmserve.engine.base import Engine, EngineInfo, MeteringEngine
from llmserve.engine.directory.artifact import EngineDirectory, read_manifest
from llmserve.engine.directory.file_watch import FileWatch
from llmserve.engine.directory.gate_record import GateRecord, GateRule, standing
from llmserve.engine.directory.identity import EngineIdentity
from llmserve.engine.directory.vocabulary import tokenizer_digests
from llmserve.engine.settings import EngineSettings
from llmserve.errors import CheckpointError, InvalidArgument, LlmserveError, NotFound, Unsupported
from llmserve.serving.answers import every_output
from llmserve.serving.backend import GaugeSample, LoadContext, LoadedModel, no_limits
from llmserve.serving.instruments.trace import Trace
from llmserve.serving.types import ADAPTER_NAME, InferRequest, InferResponse, Tensor
from llmserve.stages.files import resolve_path
from llmserve.stages.generate import GeneratedEvent, generate
from llmserve.stages.guides import GuideCompiler
from llmserve.stages.receipt import AskedTokens
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def no_processes(engine_dir: Path, tokenizer_dir: Path, settings: EngineSettings) -> Engine:
    """For hosts that start no processes."""
    raise Unsupported("separate_process: true is for llmserve serve; here the engine runs in the process that loads it")


@dataclass(frozen=True, slots=True)
class TensorrtLlmBackend:
    """`open_engine` opens an engine directory's engine; tests pass one that opens a fake. `open_process` opens it in
    its own process, which compiles guides with the tokenizer of a second directory."""

    open_engine: Callable[[Path, EngineSettings], Engine]
    open_process: Callable[[Path, Path, EngineSettings], Engine] = no_processes
    name: str = "tensorrtllm"
    verify_every_s: float = 0.0  # interval at which an engine's files are hashed again; 0: never
    gate: GateRule | None = None  # required of adapters; `open_engine` checks engines

    def complete_config(self, config: ModelConfig, model_dir: Path) -> ModelConfig:
        """Clients read the engine's identity there."""
        path = config.parameters[ENGINE_PATH].string_value.strip() if ENGINE_PATH in config.parameters else ""
        identity = _identity(resolve_path(path, model_dir)) if path else None  # else versions have engines of their own
        for name, value in identity.parameters().items() if identity is not None else ():
            config.parameters[name].string_value = value
        return config

    def load(self, context: LoadContext) -> LoadedModel:
        config = context.config
        parameters = ModelParameters.read(config, context.model_dir, context.version_dir)
        if sum(group.count for group in config.instance_group) > 1:
            logger.warning("model '%s': one instance batches every request; more have no effect", config.name)
        if any(group.kind == GPU and not group.gpus for group in config.instance_group):
            logger.warning("model '%s': KIND_GPU has no effect without gpus; list them: gpus: [ 0, 1 ]", config.name)
        settings = replace(parameters.engine, reserved_bytes=context.reserved_bytes)
        engine = (
            self.open_process(parameters.engine_dir, parameters.tokenizer_dir, settings)
            if parameters.own_process
            else self.open_engine(parameters.engine_dir, settings)
        )
        try:
            check_kind(engine.info, config.name, {output.name for output in config.output})
            tokenizer = None if engine.info.pooling else _tokenizer_for_stop_strings(parameters.tokenizer_dir)
            watch = self._watch(parameters.engine_dir)
            adapters = ServedAdapters(engine, self.gate)
            adapters.load_all(parameters.adapters)
            if parameters.adapter_folder is not None:
                adapters.serve_folder(parameters.adapter_folder)
        except BaseException:
            engine.close()
            raise
        instance = EngineInstance(
            f"{config.name}_0", engine, tokenizer, config, context.version, parameters.excludes_input, adapters, watch
        )
        gates = standing(parameters.engine_dir, engine.info.digest)
        identity = _identity(parameters.engine_dir)

        def samples() -> Sequence[GaugeSample]:
            stats = engine.stats()
            found = [*engine_gauges(stats), *engine_facts(engine.info, stats, gates), *adapters.gauges()]
            return found if watch is None else [*found, ("llmserve_engine_files_intact", {}, float(not watch.problem))]

        return LoadedModel(
            [instance],
            batches_itself=True,
            missing_outputs={output.name for output in config.output} - _made(engine),
            gauges=samples,
            facts=_facts(parameters.engine_dir, identity, gates, engine.info),
            allowance=engine.allowance if isinstance(engine, MeteringEngine) else no_limits,
            histograms=instance.histograms.by_name,
            reads_answer=every_output if engine.info.pooling else answer_reader,
            promised_bytes=lambda: engine.stats().promised_bytes,
            id_digests=lambda: _id_digests(parameters.engine_dir, engine.info.digest),
            adapters=adapters,
        )

    def _watch(self, engine_dir: Path) -> FileWatch | None:
        return FileWatch(EngineDirectory.open(engine_dir), self.verify_every_s) if self.verify_every_s else None


def _identity(path: Path) -> EngineIdentity | None:
    """None without an engine directory: `load` reports the problem, and tests have fakes."""
    try:
        return EngineIdentity.of(read_manifest(path))
    except LlmserveError:
        return None


def _id_digests(path: Path, digest: str) -> Mapping[str, str]:
    """For an open engine; empty if its directory has been removed or replaced."""
    try:
        directory = EngineDirectory.open(path)
    except LlmserveError:
        return {}
    return tokenizer_digests(directory) if directory.manifest.engine_digest == digest else {}


def _made(engine: Engine) -> set[str]:
    return set(made_outputs(engine.info) if engine.info.pooling else MAKERS)


def _facts(
    path: Path, identity: EngineIdentity | None, gates: Sequence[GateRecord], info: EngineInfo
) -> Mapping[str, Any]:
    if identity is None or identity.digest != info.digest:
        return {}
    if info.pooling:
        return {**identity.document(gates), POOLING: pooling_facts(info, path)}
    defaults = sampling_defaults(path)
    told = {**identity.document(gates), MAX_MODEL_LEN: info.max_seq_len}
    return {**told, SAMPLING_DEFAULTS: defaults} if defaults else told


def _tokenizer_for_stop_strings(path: Path) -> Tokenizer | None:
    """Ids are sufficient to generate; a tokenizer adds stop strings, and exact windows for the detokenizer."""
    try:
        return load_tokenizer(path)
    except (NotFound, CheckpointError) as error:
        logger.warning("no stop strings, only stop ids: %s", error)
        return None


@dataclass(slots=True)
class EngineInstance:
    """The only instance of a model, because the engine batches by itself."""

    name: str
    engine: Engine
    tokenizer: Tokenizer | None
    config: ModelConfig
    version: str
    excludes_input: bool
    adapters: ServedAdapters
    watch: FileWatch | None = None
    histograms: AnswerHistograms = field(default_factory=AnswerHistograms)
    _active: ActiveRequests = field(default_factory=ActiveRequests)
    _guides: GuideCompiler | None = None  # from the first guide on
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        if self.engine.info.pooling:
            return [self._pool(request) for request in requests]
        is_batched = self.config.max_batch_size > 0
        return [
            self._respond_by_row(request) if is_batched and num_rows(request) > 1 else self._respond(request)
            for request in requests
        ]

    def healthy(self) -> bool:
        return self.engine.healthy() and not (self.watch and self.watch.problem)

    async def close(self) -> None:
        if self._guides is not None:
            self._guides.close()
        if self.watch is not None:
            await asyncio.to_thread(self.watch.close)
        await asyncio.to_thread(self.engine.close)

    async def _respond_by_row(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        count, tenant = num_rows(request), request.tenant
        problem = ""
        if not self.config.model_transaction_policy.decoupled:
            problem = "is answered with several responses and needs a decoupled model"
        elif count > tenant.max_answers > 0:
            problem = f"is more than the {tenant.max_answers} answers that '{tenant.name}' may have running at once"
        if problem:
            error = InvalidArgument(
                f"a batch of {count} {problem}; send one request for each: they are batched in flight"
            )
            yield self._response(request, error=error, final=True)
            return
        async with aclosing(responses_by_row(request, self._respond)) as responses:
            async for response in responses:
                yield response

    async def _respond(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The border: errors become the stream's last response."""
        try:
            if is_stop(request.inputs):
                self._stop(request)
                yield self._response(request, final=True)
                return
            with self.adapters.held(adapter_name(request), candidate=request.wants_candidate) as adapter:
                job = await self._guided(self._read(request, adapter))
                # The engine first refuses requests that it cannot answer; it starts at the first pull.
                # Beams are only stopped by ids, because each has its own text.
                stops = job.stop_strings if job.generate.beam is None else ()
                stream = generate(self.engine, job.generate, tokenizer=self.tokenizer, stop_strings=stops)
                answer = ResponseBuilder(job.generate, streaming=job.streaming)
                echo = () if job.streaming or job.excludes_input else job.generate.prompt_ids
                tokens_per_block = self.engine.stats().tokens_per_block
                asked = asked_outputs(job.generate)
                needed = [name for name in request.needed_outputs if name not in ALWAYS_TOLD]
                receipts = self._receipts(job)
                with (
                    self._active.running(request) as active,
                    counted(answer, job.generate, self.config.name) as ended,
                ):
                    async with aclosing(_sent(stream, answer, active, request.trace)) as sent:
                        async for beams in sent:
                            for event in beams:
                                if event.tokens.finish_reason is not None and event.tokens.usage is not None:
                                    self.histograms.record(event.tokens.usage)
                                    ended(event.tokens.usage)
                            events = ResponseEvents(beams, echo, tokens_per_block, asked)
                            if answer.is_complete:
                                events.warning = self._warning(job, request)
                            if receipts is not None:
                                events.receipt = receipts.take(beams[0])
                            outputs = response_tensors(events, request.requested_outputs, needed)
                            yield self._response(request, outputs, final=answer.is_complete)
        except LlmserveError as error:
            yield self._response(request, error=error, final=True)

    async def _pool(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The response of an engine that does not generate tokens."""
        try:
            job = pooled_request(request.inputs, self.engine.info, self._id_of(request))
            with (
                self.adapters.held(adapter_name(request), candidate=request.wants_candidate) as adapter,
                counted(ResponseBuilder(job, streaming=False), job, self.config.name) as ended,
            ):

                def note(usage: Usage) -> None:
                    self.histograms.record(usage)
                    ended(usage)

                asked = replace(self._scheduled(job, request), adapter=adapter)
                outputs = await pooled_outputs(self.engine, asked, request.requested_outputs, note)
            yield self._response(request, outputs, final=True)
        except LlmserveError as error:
            yield self._response(request, error=error, final=True)

    def _id_of(self, request: InferRequest) -> str:
        """The client's id need not be unique; the engine's must be."""
        return f"{request.request_id or 'request'}/{next(self._numbers)}"

    def _scheduled(self, job: GenerateRequest, request: InferRequest) -> GenerateRequest:
        return replace(job, priority=self._priority(request), deadline=request.deadline, tenant=request.tenant)

    async def _guided(self, job: TensorRequest) -> TensorRequest:
        """The request with its guide compiled, if it has one."""
        if job.guide is None:
            return job
        if self._guides is None:
            if self.tokenizer is None:
                raise InvalidArgument("guides need a tokenizer, but the engine directory has none; set tokenizer_dir")
            self._guides = GuideCompiler(self.tokenizer, self.engine.info.vocab_size)
        return replace(job, generate=replace(job.generate, guide=await self._guides.compiled(job.guide)))

    def _receipts(self, job: TensorRequest) -> Receipts | None:
        if not job.wants_receipt:
            return None
        if not self.engine.info.kernels:
            raise Unsupported("return_receipt: this engine does not promise the same tokens for the same request")
        return Receipts(self.engine.info, AskedTokens(job.generate, job.guide, job.stop_strings))

    def _stop(self, request: InferRequest) -> None:
        if not request.request_id:
            raise InvalidArgument("Trying to stop a request but request ID is not provided")
        self._active.cancel_like(request)

    def _read(self, request: InferRequest, adapter: str) -> TensorRequest:
        job = read_request(
            request.inputs,
            request_id=self._id_of(request),
            max_seq_len=self.engine.info.max_seq_len,
            vocab_sizes={self.tokenizer.vocab_size, self.engine.info.vocab_size} if self.tokenizer else set(),
            excludes_input=self.excludes_input,
            max_beam_width=self.engine.info.max_beam_width,
        )
        if job.streaming and not self.config.model_transaction_policy.decoupled:
            raise InvalidArgument(
                f"streaming needs a decoupled model: set model_transaction_policy {{ decoupled: true }} in the config "
                f"of '{self.config.name}'"
            )
        if job.generate.num_sequences > 1 and not self.config.model_transaction_policy.decoupled:
            raise InvalidArgument("num_return_sequences > 1 returns several responses and requires a decoupled model")
        return replace(job, generate=replace(self._scheduled(job.generate, request), adapter=adapter))

    def _warning(self, job: TensorRequest, request: InferRequest) -> str:
        """Warnings for the client: what was truncated, and which parameters are ignored."""
        limit = job.generate.length_warning(self.engine.info.max_seq_len)
        ignored = ", ".join(sorted(request.parameters.keys() - {ADAPTER_NAME}))
        ignored = f"no input has the name {ignored}, so it was ignored" if ignored else ""
        return "; ".join(filter(None, (*job.prompt_warnings, limit, ignored)))

    def _priority(self, request: InferRequest) -> int:
        """Triton counts from 1, the highest, and 0 is the config's default level; llmserve's is relative to that."""
        policy = self.config.dynamic_batching
        if not policy.priority_levels or not request.priority:
            return 0
        return int(policy.default_priority_level) - request.priority

    def _response(
        self,
        request: InferRequest,
        outputs: tuple[Tensor, ...] = (),
        *,
        final: bool,
        error: LlmserveError | None = None,
    ) -> InferResponse:
        return InferResponse(self.config.name, self.version, request.request_id, outputs, error=error, final=final)


async def _sent(
    stream: AsyncGenerator[GeneratedEvent, None], answer: ResponseBuilder, active: ActiveRequest, trace: Trace | None
) -> AsyncGenerator[Sequence[GeneratedEvent], None]:
    """The events of one response; if the request was cancelled, the last ones say so."""
    async with aclosing(stream):
        while (event := await active.pull(stream)) is not None:
            if trace is not None:
                trace.generated(event.tokens)
            if out := answer.add(event):
                yield out
        for index in answer.open_sequences():
            if out := answer.cancelled(index):
                yield out
