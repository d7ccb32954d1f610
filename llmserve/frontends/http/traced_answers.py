"""The HTTP part of a request's trace: from the handler's start to the last byte of the answer."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from llmserve.errors import LlmserveError
from llmserve.frontends.http.error_answers import error_response
from llmserve.frontends.shared.tracer import Tracer
from llmserve.serving.instruments.trace import Trace
from llmserve.wire.http1.answers import Answer, Reply


@dataclass(frozen=True, slots=True)
class TracedAnswer:
    """An answer that finishes its request's trace when it has been sent."""

    answer: Answer
    tracer: Tracer
    model: str
    trace: Trace

    async def send(self, reply: Reply) -> None:
        self.trace.stamp("HTTP_SEND_START")
        try:
            await self.answer.send(reply)
        finally:
            self.trace.stamp("HTTP_SEND_END")
            self.tracer.finish(self.model, self.trace)


async def traced_answer(tracer: Tracer, model: str, trace: Trace, handling: Awaitable[Answer]) -> TracedAnswer:
    """The answer of a handler, errors included."""
    try:
        return TracedAnswer(await handling, tracer, model, trace)
    except LlmserveError as error:
        return TracedAnswer(error_response(error), tracer, model, trace)
    except BaseException:
        tracer.finish(model, trace)
        raise
