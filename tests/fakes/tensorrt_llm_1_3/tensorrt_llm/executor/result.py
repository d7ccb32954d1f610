"""What a request answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from llmserve.core import FinishReason, TokenEvent
from tensorrt_llm.sampling_params import SamplingParams


class RequestError(RuntimeError):
    pass


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    """The end token stays in `token_ids`, as the PyTorch sampler leaves it there."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_last_tokens: int = 0

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self.num_last_tokens :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return self.logprobs[self.num_last_tokens :]


class RequestOutput:
    """A future and an asynchronous iterator, for the loop on which it was made."""

    finished = False
    outputs: list[CompletionOutput] = []  # noqa: RUF012

    def __init__(self, llm: Any, inputs: list[int], parameters: SamplingParams, streaming: bool) -> None:
        self.prompt_token_ids = inputs
        self.outputs = [CompletionOutput(index) for index in range(parameters.n)]
        self._parameters = parameters
        self._streaming = streaming
        self._loop = asyncio.get_running_loop()  # without one there is no asynchronous iteration
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._future = llm._host.start(llm._as_ours(inputs, parameters), self._on_event)
        llm._running.add(self)

    def abort(self) -> None:
        self._future.cancel()
        self._put("cancelled")

    def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        return self

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        for output in self.outputs:
            output.num_last_tokens = len(output.token_ids)
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        if item == "cancelled":
            self.outputs[0].finish_reason = "cancelled"
        else:
            self._take(item)
        self.finished = all(output.finish_reason for output in self.outputs)
        return self

    async def aresult(self) -> "RequestOutput":
        assert not self._streaming
        async for _ in self:
            pass
        if self._parameters.use_beam_search:
            self.outputs.sort(
                key=lambda output: (
                    -sum(entry[t].logprob for entry, t in zip(output.logprobs, output.token_ids, strict=True))
                )
            )
        return self

    def _on_event(self, event: TokenEvent) -> bool:
        self._put(event)
        return True

    def _put(self, item: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def _take(self, event: TokenEvent) -> None:
        output = self.outputs[event.sequence_index]
        output.token_ids += event.token_ids
        output.logprobs += [{t: Logprob(value)} for t, value in zip(event.token_ids, event.log_probs, strict=True)]
        if event.finish_reason is FinishReason.END_ID:
            output.finish_reason = "stop"
            assert self._parameters.end_id is not None
            output.token_ids.append(self._parameters.end_id)
            output.logprobs.append({self._parameters.end_id: Logprob(-0.5)})
        elif event.finish_reason is not None:
            output.finish_reason = {"LENGTH": "length", "TIMED_OUT": "timeout"}.get(
                event.finish_reason.name, "cancelled"
            )
