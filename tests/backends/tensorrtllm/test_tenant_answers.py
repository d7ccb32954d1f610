"""What answers come to is counted for their tenant: once, when they have ended or were given up."""

from __future__ import annotations

from contextlib import suppress

import pytest

from llmserve.backends.tensorrtllm.answer import ResponseBuilder
from llmserve.backends.tensorrtllm.tenant_answers import counted
from llmserve.core import FinishReason, GenerateRequest, Tenant, TokenEvent, Usage
from llmserve.errors import InternalError, RateLimited
from llmserve.stages.generate import GeneratedEvent
from llmserve.tenant_counters import AnswerCounters, TenantCounters

BEGIN = 10**18
COUNTERS = TenantCounters()
TENANT = Tenant("a", counters=COUNTERS)
REQUEST = GenerateRequest("r", (1, 2, 3), num_sequences=2, tenant=TENANT)


@pytest.fixture(autouse=True)
def _nothing_yet() -> None:
    COUNTERS.answers.clear()


def event(*token_ids: int, index: int = 0, end: FinishReason | None = None) -> GeneratedEvent:
    return GeneratedEvent(TokenEvent(token_ids, sequence_index=index, finish_reason=end), window_ids=())


def test_answers_that_end() -> None:
    answer = ResponseBuilder(REQUEST, streaming=True)
    with counted(answer, REQUEST, "m") as ended:
        for index in (0, 1):
            answer.add(event(5, index=index))
            answer.add(event(6, 7, index=index, end=FinishReason.LENGTH))
            ended(Usage(3, 0, 3, BEGIN, BEGIN + 250_000_000, 0, 0, num_preemptions=2))
    assert COUNTERS.answers == {"m": AnswerCounters(3, 6, num_queued=2, queue_s=0.5, num_preemptions=4)}


def test_times_that_are_not_known_and_clocks_that_are_set() -> None:
    with counted(ResponseBuilder(REQUEST, streaming=True), REQUEST, "m") as ended:
        ended(Usage(3, 0, 0, 0, 0, 0, 0))
        ended(Usage(3, 0, 0, BEGIN, BEGIN - 5, 0, 0))
    assert COUNTERS.answers == {"m": AnswerCounters(3, 0, num_queued=1, queue_s=0.0)}


@pytest.mark.parametrize(
    ("error", "has_begun", "expected"),
    [
        (GeneratorExit(), False, (3, 0)),  # given up in the queue
        (GeneratorExit(), True, (3, 2)),
        (InternalError("the engine is gone"), True, (3, 2)),
        (RateLimited("too many"), False, (0, 0)),
    ],
)
def test_what_was_given_up_counts_and_what_was_refused_does_not(
    error: BaseException, has_begun: bool, expected: tuple[int, int]
) -> None:
    answer = ResponseBuilder(REQUEST, streaming=False)
    with suppress(type(error)), counted(answer, REQUEST, "m"):
        if has_begun:
            answer.add(event(5, 6))
        raise error
    found = COUNTERS.answers["m"]
    assert (found.prompt_tokens, found.generation_tokens) == expected


def test_nobody_is_not_counted() -> None:
    request = GenerateRequest("r", (1, 2, 3))
    with counted(ResponseBuilder(request, streaming=True), request, "m") as ended:
        ended(Usage(3, 0, 3, 0, 0, 0, 0))
    assert not COUNTERS.answers
