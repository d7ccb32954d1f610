"""The ensemble: one stream composed of the streams of its steps.

Waves of unary steps run one after the other; a decoupled step opens a stream, and what follows runs once for each of
its responses, in order, when the reader asks for it. So order, back-pressure and cancellation are those of the streams:
closing the ensemble's stream closes the step that is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import LlmserveError
from llmserve.serving.ensemble_plan import Step, Wave
from llmserve.serving.schedulers.base import Rejected
from llmserve.serving.signature import ModelSignature
from llmserve.serving.statistics import ModelStatistics, RequestTiming
from llmserve.serving.types import InferRequest, InferResponse, Tensor

InferStep = Callable[[InferRequest, RequestTiming], AsyncGenerator[InferResponse, None]]


@dataclass(frozen=True, slots=True)
class _Pass:
    """One request on its way through the steps."""

    request: InferRequest
    timing: RequestTiming


class EnsembleScheduler:
    def __init__(
        self,
        config: ModelConfig,
        version: str,
        waves: tuple[Wave, ...],
        *,
        statistics: ModelStatistics,
        infer_step: InferStep,
    ) -> None:
        self._name: str = config.name
        self._version = version
        self._waves = waves
        self._signature = ModelSignature(config)
        self._output_names = tuple(sorted(output.name for output in config.output))
        self._statistics = statistics
        self._infer_step = infer_step
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
        try:
            async with aclosing(self._responses(_Pass(request, steps_timing), 0, request.inputs, True)) as responses:
                async for response in responses:
                    yield response
        except LlmserveError as error:
            problem = type(error)(f"in ensemble '{self._name}', {error}")
            yield InferResponse(self._name, self._version, request.request_id, error=problem, final=True)
        finally:
            timing.add(steps_timing)
            self._statistics.batch_executed(
                self._signature.batch_size(request),
                input_ns=steps_timing.input_ns,
                infer_ns=steps_timing.infer_ns,
                output_ns=steps_timing.output_ns,
            )

    async def _responses(
        self, current: _Pass, index: int, tensors: Mapping[str, Tensor], final: bool
    ) -> AsyncGenerator[InferResponse, None]:
        """The ensemble's responses from wave `index` on. `final`: no earlier step will give more."""
        while index < len(self._waves) and not self._waves[index].decoupled:
            tensors = {**tensors, **await self._run_unary(current, self._waves[index], tensors)}
            index += 1
        if index == len(self._waves):
            yield self._answer(current.request, tensors, final)
            return
        (step,) = self._waves[index].steps
        async with aclosing(self._open(current, step, tensors)) as stream:
            async for response in stream:
                if response.error is not None:
                    raise response.error
                last = final and response.final
                if response.outputs:
                    produced = {**tensors, **_renamed(step, response)}
                    async with aclosing(self._responses(current, index + 1, produced, last)) as answers:
                        async for answer in answers:
                            yield answer
                elif last:
                    yield InferResponse(self._name, self._version, current.request.request_id, final=True)

    async def _run_unary(self, current: _Pass, wave: Wave, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the steps of a wave produce. The first failure cancels the others."""
        if len(wave.steps) == 1:
            return await self._run(current, wave.steps[0], tensors)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run(current, step, tensors)) for step in wave.steps]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return {name: tensor for task in tasks for name, tensor in task.result().items()}

    async def _run(self, current: _Pass, step: Step, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        produced: dict[str, Tensor] = {}
        async with aclosing(self._open(current, step, tensors)) as stream:
            async for response in stream:
                if response.error is not None:
                    raise response.error
                produced.update(_renamed(step, response))
        return produced

    def _open(self, current: _Pass, step: Step, tensors: Mapping[str, Tensor]) -> AsyncGenerator[InferResponse, None]:
        """Start a step. Tensors that are not there (optional inputs) stay absent."""
        request = current.request
        inputs = {
            name: Tensor(name, tensors[source].datatype, tensors[source].data)
            for name, source in step.inputs
            if source in tensors
        }
        step_request = InferRequest(
            model_name=step.model_name,
            inputs=inputs,
            model_version=step.model_version,
            request_id=request.request_id,
            requested_outputs=step.requested_outputs,
            parameters=request.parameters,
            priority=request.priority,
            timeout_us=request.timeout_us,
            deadline=request.deadline,
            sequence_id=request.sequence_id,
            sequence_start=request.sequence_start,
            sequence_end=request.sequence_end,
        )
        return self._infer_step(step_request, current.timing)

    def _answer(self, request: InferRequest, tensors: Mapping[str, Tensor], final: bool) -> InferResponse:
        outputs = tuple(tensors[name] for name in self._output_names if name in tensors)
        return InferResponse(self._name, self._version, request.request_id, outputs, final=final)


def _renamed(step: Step, response: InferResponse) -> dict[str, Tensor]:
    tensors = {tensor.name: tensor for tensor in response.outputs}
    return {
        target: Tensor(target, tensors[name].datatype, tensors[name].data)
        for name, target in step.outputs
        if name in tensors
    }
