"""The ensemble: one stream composed of the streams of its steps.

A unary step runs as soon as its inputs are available. A decoupled step opens a stream, and later steps run once for
each of its responses, in order, when the reader asks for it. So order, back-pressure and cancellation are those of the
streams: closing the ensemble's stream closes the running steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument, LlmserveError
from llmserve.serving.ensemble_plan import EnsemblePlan, Stage, Step, reads_from
from llmserve.serving.instruments.model_statistics import ModelStatistics, RequestTiming
from llmserve.serving.schedulers.base import Rejected
from llmserve.serving.schedulers.loop_turn import LoopTurn
from llmserve.serving.signature import ModelSignature
from llmserve.serving.types import InferRequest, InferResponse, Tensor

MAX_PLANS = 64  # cached, one for each set of outputs that clients ask for


class StepModel(Protocol):
    """The model of a step, as an ensemble uses it."""

    @property
    def runs_inline(self) -> bool: ...

    def infer(self, request: InferRequest, ensemble_timing: RequestTiming) -> AsyncGenerator[InferResponse, None]: ...

    def infer_inline(self, request: InferRequest, ensemble_timing: RequestTiming) -> InferResponse | None:
        """See `ServedModel.infer_inline`."""
        ...


@dataclass(frozen=True, slots=True)
class _Pass:
    """One request on its way through the steps."""

    request: InferRequest
    timing: RequestTiming
    stages: tuple[Stage, ...]
    output_names: tuple[str, ...]  # outputs that its responses may have, in order


class EnsembleScheduler:
    def __init__(
        self,
        config: ModelConfig,
        version: str,
        plan: EnsemblePlan,
        *,
        models: Mapping[tuple[str, str], StepModel],
        statistics: ModelStatistics,
        turn: LoopTurn | None = None,
    ) -> None:
        """`models`: those of the steps, by name and version."""
        self._name: str = config.name
        self._version = version
        self._plan = plan
        self._models = models
        self._turn = turn or LoopTurn()
        self._is_decoupled = plan.decoupled
        self._signature = ModelSignature(config)
        self._output_names = tuple(sorted(output.name for output in config.output))
        self._stages_for = lru_cache(MAX_PLANS)(plan.stages)
        self._statistics = statistics
        limit = config.ensemble_scheduling.max_inflight_requests
        self._in_flight = {step.place: asyncio.Semaphore(limit) for step in plan.steps} if limit else {}
        self._stopped = False

    @property
    def num_pending(self) -> int:
        return 0

    async def stop(self) -> None:
        self._stopped = True

    async def infer(self, request: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        if self._stopped:
            raise Rejected(f"model '{self._name}' is being unloaded")
        steps_timing = RequestTiming()
        wanted = request.requested_outputs
        if wanted:
            names = tuple([name for name in self._output_names if name in wanted])
            current = _Pass(request, steps_timing, self._stages_for(wanted), names)
        else:
            stages = self._stages_for(self._output_names, by_name=False, needed=request.needed_outputs)
            current = _Pass(request, steps_timing, stages, self._output_names)
        try:
            async with aclosing(self._responses(current, 0, dict(request.inputs), True)) as responses:
                async for response in responses:
                    yield response
        except LlmserveError as error:
            problem = error.at(f"in ensemble '{self._name}'")
            yield InferResponse(self._name, self._version, request.request_id, error=problem, final=True)
        else:
            self._statistics.batch_executed(
                self._signature.batch_size(request),
                input_ns=steps_timing.input_ns,
                infer_ns=steps_timing.infer_ns,
                output_ns=steps_timing.output_ns,
            )
        finally:
            timing.add(steps_timing)

    async def _responses(
        self, current: _Pass, index: int, tensors: dict[str, Tensor], final: bool
    ) -> AsyncGenerator[InferResponse, None]:
        """The ensemble's responses from stage `index` on. Adds the outputs of its unary steps to `tensors`.

        `final`: earlier steps have no more responses.
        """
        stage = current.stages[index]
        await self._run_unary(current, stage, tensors)
        if not stage.decoupled:
            yield self._answer(current, tensors, final)
            return
        following = current.stages[index + 1]
        async with aclosing(self._open_all(current, stage, tensors)) as stream:
            async for response in stream:
                last = final and response.final
                known = tensors | _produced(stage.decoupled, response)
                if not response.outputs:
                    if last:
                        yield InferResponse(self._name, self._version, current.request.request_id, final=True)
                elif not following.decoupled:
                    await self._run_unary(current, following, known)
                    yield self._answer(current, known, last)
                else:
                    async with aclosing(self._responses(current, index + 1, known, last)) as answers:
                        async for answer in answers:
                            yield answer

    def _open_all(
        self, current: _Pass, stage: Stage, tensors: Mapping[str, Tensor]
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses of the decoupled steps of a stage; those of several are joined."""
        streams = [self._open(current, step, self._step_request(current, step, tensors)) for step in stage.decoupled]
        return streams[0] if len(streams) == 1 else _rounds(streams, stage.decoupled)

    async def _run_unary(self, current: _Pass, stage: Stage, known: dict[str, Tensor]) -> None:
        """Run the unary steps of the stage and add their outputs to `known`. The first failure cancels the others."""
        if stage.is_chain:
            for step in stage.unary:
                await self._run(current, step, known)
            return
        tasks: dict[Step, asyncio.Task[None]] = {}

        async def run(step: Step) -> None:
            for producer, task in list(tasks.items()):
                if reads_from(step, producer):
                    await asyncio.wait((task,))
            await self._run(current, step, known)

        async with _first_failure(), asyncio.TaskGroup() as group:
            for step in stage.unary:
                tasks[step] = group.create_task(run(step))

    async def _run(self, current: _Pass, step: Step, known: dict[str, Tensor]) -> None:
        """Run a unary step and add its outputs to `known`. It runs inline if its model supports that."""
        request = self._step_request(current, step, known)
        model = self._models[step.model_name, step.model_version]
        if model.runs_inline and not self._in_flight:
            if self._turn.is_over():
                await asyncio.sleep(0)
            if (answer := model.infer_inline(request, current.timing)) is not None:
                known.update(_produced((step,), answer))
                return
        async with aclosing(self._open(current, step, request)) as stream:
            async for response in stream:
                known.update(_produced((step,), response))

    def _open(self, current: _Pass, step: Step, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Start a step. The stream waits while as many requests are in the step as the ensemble allows."""
        stream = self._models[step.model_name, step.model_version].infer(request, current.timing)
        return _limited(stream, self._in_flight[step.place]) if self._in_flight else stream

    def _step_request(self, current: _Pass, step: Step, tensors: Mapping[str, Tensor]) -> InferRequest:
        """The request to a step. Absent tensors (optional inputs) stay absent."""
        request = current.request
        return InferRequest(
            model_name=step.model_name,
            inputs={name: _named(name, tensors[source]) for name, source in step.inputs if source in tensors},
            model_version=step.model_version,
            request_id=request.request_id,
            requested_outputs=step.requested_outputs,
            needed_outputs=step.needed_outputs,
            parameters=request.parameters,
            priority=request.priority,
            timeout_us=request.timeout_us,
            deadline=request.deadline,
            sequence_id=request.sequence_id,
            sequence_start=request.sequence_start,
            sequence_end=request.sequence_end,
            tenant=request.tenant,
            trace=None if request.trace is None else request.trace.child(),
        )

    def _answer(self, current: _Pass, tensors: Mapping[str, Tensor], final: bool) -> InferResponse:
        outputs = tuple([_named(name, tensors[name]) for name in current.output_names if name in tensors])
        if not self._is_decoupled and len(outputs) < len(current.request.requested_outputs):
            raise InvalidArgument(
                "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
            )
        return InferResponse(self._name, self._version, current.request.request_id, outputs, final=final)


def _named(name: str, tensor: Tensor) -> Tensor:
    """The tensor under another name. Tensors are renamed only when they are passed to a reader."""
    return tensor if tensor.name == name else Tensor(name, tensor.datatype, tensor.data)


def _produced(steps: Sequence[Step], response: InferResponse) -> dict[str, Tensor]:
    """The ensemble's tensors in a response; a response of several steps is a round. Raises the response's error."""
    if response.error is not None:
        raise response.error
    if len(steps) > 1:
        return {tensor.name: tensor for tensor in response.outputs}
    targets = steps[0].targets
    return {targets[tensor.name]: tensor for tensor in response.outputs if tensor.name in targets}


async def _rounds(
    streams: Sequence[AsyncGenerator[InferResponse, None]], steps: Sequence[Step]
) -> AsyncGenerator[InferResponse, None]:
    """Joins one response of each step at a time into one response with the ensemble's tensors.

    Ends with the step that has the fewest responses; the others are closed.
    """
    async with AsyncExitStack() as open_streams:
        for stream in streams:
            await open_streams.enter_async_context(aclosing(stream))
        final = False
        while not final:
            async with _first_failure(), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_next_produced(step, stream)) for step, stream in zip(steps, streams, strict=True)
                ]
            results = [task.result() for task in tasks]
            final = any(ends for _, ends in results)
            is_complete = all(produced for produced, _ in results)
            made = [_named(name, tensor) for produced, _ in results for name, tensor in produced.items()]
            outputs = tuple(made) if is_complete else ()
            yield InferResponse("", "", outputs=outputs, final=final)


async def _next_produced(step: Step, stream: AsyncGenerator[InferResponse, None]) -> tuple[dict[str, Tensor], bool]:
    """The next response with tensors, and whether it is the last one."""
    async for response in stream:
        produced = _produced((step,), response)
        if produced or response.final:
            return produced, response.final
    return {}, True


async def _limited(
    stream: AsyncGenerator[InferResponse, None], in_flight: asyncio.Semaphore
) -> AsyncGenerator[InferResponse, None]:
    async with in_flight, aclosing(stream):
        async for response in stream:
            yield response


@asynccontextmanager
async def _first_failure() -> AsyncIterator[None]:
    """Raise the first failure of a task group instead of the group."""
    try:
        yield
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
