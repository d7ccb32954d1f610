"""An engine that cannot tell log-probs is compared without them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from llmserve.client import TextDelta
from llmserve.errors import LlmserveError, Unavailable
from llmserve.evaluation.served.check import Asked, Check
from llmserve.evaluation.served.replies import LOG_PROBS, TOKENS, GrpcAsker

INPUTS = frozenset({TOKENS, LOG_PROBS, "text_input"})


class Client:
    """Refuses what is in `refused`."""

    def __init__(self, refused: str, error: LlmserveError) -> None:
        self.refused = refused
        self.error = error

    async def generate(self, prompt: Any, **parameters: Any) -> AsyncGenerator[TextDelta, None]:
        if self.refused in parameters:
            raise self.error
        yield TextDelta("a", finish_reason="stop", completion_tokens=1, token_ids=(5,))


def check() -> Check:
    return Check(Asked([], [], 8), True, lambda count: None)


async def test_log_probs_that_are_refused_are_left_out_and_noted() -> None:
    checking = check()
    asker = GrpcAsker(Client(LOG_PROBS, LlmserveError("built without logits")), INPUTS)  # type: ignore[arg-type]
    for _ in range(2):  # of several servers, said once
        assert (await checking.warmed_up(asker)).inputs == INPUTS - {LOG_PROBS}
    assert checking.notes == ["log-probs were not compared: built without logits"]


async def test_an_engine_that_tells_them_and_one_that_answers_nothing_are_asked_for_all() -> None:
    for refused in ("nothing", "temperature"):
        checking = check()
        asker = GrpcAsker(Client(refused, LlmserveError("no")), INPUTS)  # type: ignore[arg-type]
        assert (await checking.warmed_up(asker)).inputs == INPUTS
        assert checking.notes == []


async def test_a_server_that_is_gone_ends_it() -> None:
    asker = GrpcAsker(Client("temperature", Unavailable("lost")), INPUTS)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="is gone: lost"):
        await check().warmed_up(asker)
