"""OpenTelemetry's spans of a trace, and the data that a trace keeps for them besides its records.

    POST /v1/chat/completions       the request, as its client sees it
      ensemble                      each model that it has used
        preprocessing
        tensorrt_llm
          queue, prefill, decode    of an LLM, for each answer
            step                    for the answer's 2nd, 4th, 8th, ... token
        postprocessing

Ids are W3C's trace context. Times of spans are time.time_ns().
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from llmserve.core import TokenEvent, Usage

if TYPE_CHECKING:
    from llmserve.serving.instruments.trace import Trace

Attributes: TypeAlias = Mapping[str, str | int]


def new_id(num_bits: int) -> int:
    """An id of a trace (128 bits) or of a span (64); never 0, which means none."""
    return secrets.randbits(num_bits) or 1


@dataclass(frozen=True, slots=True)
class SpanIds:
    trace_id: int
    span_id: int
    parent_id: int = 0  # of the enclosing span; 0: there is none

    def child(self) -> SpanIds:
        return SpanIds(self.trace_id, new_id(64), self.span_id)

    @property
    def traceparent(self) -> str:
        """The header for requests that this span sends to other servers."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """The request that a trace records."""

    name: str
    ids: SpanIds
    began_ns: int  # time.monotonic_ns()
    attributes: Attributes
    state: str = ""  # W3C's tracestate, passed on


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    ids: SpanIds
    began_ns: int
    ended_ns: int
    attributes: Attributes = field(default_factory=dict)
    error: str = ""  # its kind; "": no error
    is_request: bool = False
    state: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens that an engine's step added to an answer. It begins when the previous step's tokens arrived."""

    num_tokens: int  # of the answer, including this step's
    began_ns: int
    ended_ns: int


@dataclass(slots=True)
class AnswerSteps:
    """The steps of one answer of an LLM, from its events."""

    num_tokens: int = 0
    latest_ns: int = 0
    shown: list[Step] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str = ""

    def add(self, event: TokenEvent) -> None:
        before, now = self.num_tokens, time.time_ns()
        self.num_tokens += len(event.token_ids)
        if before and before.bit_length() < self.num_tokens.bit_length():  # it has passed a power of two
            self.shown.append(Step(self.num_tokens, self.latest_ns, now))
        self.latest_ns = now
        if event.finish_reason is not None:
            self.usage, self.finish_reason = event.usage, event.finish_reason.value


def spans_of(trace: Trace, ended_ns: int) -> Iterator[Span]:
    """The spans of a request that was answered at `ended_ns`, in time.monotonic_ns(); none for a trace without ids."""
    offset = time.time_ns() - time.monotonic_ns()
    if (request := trace.request) is not None:
        yield Span(
            request.name,
            request.ids,
            request.began_ns + offset,
            ended_ns + offset,
            request.attributes,
            trace.error,
            is_request=True,
            state=request.state,
        )
    for span in _of_models(trace, ended_ns):
        yield replace(span, began_ns=span.began_ns + offset, ended_ns=span.ended_ns + offset)
    yield from _of_answers(trace)


def _of_models(trace: Trace, ended_ns: int) -> Iterator[Span]:
    """The spans of its models, in time.monotonic_ns()."""
    times, ids = trace.times(), trace.ids_of_span
    if ids is None or "REQUEST_START" not in times:  # refused before it reached a model
        return
    attributes = {"gen_ai.request.model": trace.model, "llmserve.model.version": trace.version}
    ended_ns = times.get("REQUEST_END", ended_ns)
    yield Span(trace.model, ids, times["REQUEST_START"], ended_ns, attributes, trace.error)
    if not trace.answers and "COMPUTE_START" in times:
        yield Span("queue", ids.child(), times["QUEUE_START"], times["COMPUTE_START"])
        yield Span("compute", ids.child(), times["COMPUTE_START"], times["COMPUTE_END"])
    for child in trace.children:
        yield from _of_models(child, ended_ns)


def _of_answers(trace: Trace) -> Iterator[Span]:
    """The spans of answers of the LLMs among its models."""
    for index, answer in sorted(trace.answers.items()):
        if trace.ids_of_span is not None and answer.usage is not None:
            yield from _of_answer(trace.ids_of_span, index, answer, answer.usage)
    for child in trace.children:
        yield from _of_answers(child)


def _of_answer(ids: SpanIds, index: int, answer: AnswerSteps, usage: Usage) -> Iterator[Span]:
    of_all = {"llmserve.sequence_index": index}
    if not usage.first_scheduled_ns:
        yield Span("queue", ids.child(), usage.arrival_ns, answer.latest_ns, of_all)
        return
    yield Span("queue", ids.child(), usage.arrival_ns, usage.first_scheduled_ns, of_all)
    prompt = {"gen_ai.usage.input_tokens": usage.prompt_tokens, "llmserve.cached_tokens": usage.cached_tokens}
    first_ns = usage.first_token_ns or answer.latest_ns
    yield Span("prefill", ids.child(), usage.first_scheduled_ns, first_ns, {**of_all, **prompt})
    if not usage.first_token_ns:
        return
    decode = ids.child()
    said: Attributes = {
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "llmserve.finish_reason": answer.finish_reason,
    }
    yield Span("decode", decode, first_ns, max(first_ns, usage.last_token_ns), {**of_all, **said})
    for step in answer.shown:
        yield Span("step", decode.child(), step.began_ns, step.ended_ns, {"llmserve.num_tokens": step.num_tokens})
