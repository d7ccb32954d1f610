from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmserve.core import TopTokens
from llmserve.engine.fake import FAKE_RUNNER_INFO, fake_answer, fake_engine
from llmserve.errors import InvalidArgument, LlmserveError, NotFound, Unavailable, Unsupported
from llmserve.evaluation.answers import Answer, Performance, Sample
from llmserve.evaluation.candidates import EngineCandidate, ServerCandidate, decide_all, run_candidate
from llmserve.evaluation.decisions import Decision
from llmserve.evaluation.prompts import PromptEncoder, ids_digest
from llmserve.stages.chat import Message
from llmserve.stages.postprocess import Postprocessor
from tests.checkpoints import make_checkpoint

INFO = replace(FAKE_RUNNER_INFO, vocab_size=512)
SAMPLES = [Sample(str(i), (Message("user", "word " * (i + 1)),), "unused") for i in range(12)]


def decision(token: int) -> Decision:
    return Decision(token, -0.5, TopTokens((token, 1), (-0.5, -1.5)))


class SlowCandidate:
    """Answers with the sample's id, after longer for earlier samples; notes how many ask at once."""

    name = "slow"

    def __init__(self, bad_id: str = "") -> None:
        self.bad_id = bad_id
        self.active = self.most_active = self.num_done = 0

    async def answer(self, sample: Sample, request_id: str) -> Answer:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            await asyncio.sleep(0.02 / (1 + int(sample.id)))
            if sample.id == self.bad_id:
                raise InvalidArgument("too long")
        finally:
            self.active -= 1
        self.num_done += 1
        return Answer(sample.id, 1, 1, 0.02)

    async def decide(self, prompt: Sequence[int], tokens: Sequence[int], request_id: str) -> tuple[Decision, ...]:
        await asyncio.sleep(0.02 / (1 + len(prompt)))
        return tuple(decision(token) for token in (*prompt, *tokens))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("candidate"), "baichuan2-7b")


async def test_an_engine_answers_with_its_greedy_tokens(checkpoint: Path) -> None:
    encoder = PromptEncoder(checkpoint, 8)
    engine = fake_engine(INFO)
    postprocessor = Postprocessor.open(checkpoint)
    try:
        run = await run_candidate(EngineCandidate(engine, encoder, postprocessor, 8), SAMPLES, concurrency=5)
    finally:
        engine.close()
    for sample, answer in zip(SAMPLES, run.answers, strict=True):
        prompt = encoder.encode(sample.prompt).input_ids
        expected = fake_answer(prompt, 8, 512)
        expected = expected[: expected.index(2)] if 2 in expected else expected
        assert answer.token_ids == tuple(expected)
        assert answer.prompt_digest == ids_digest(encoder.encode(sample.prompt))
        assert answer.text == postprocessor.text(expected)
        assert (answer.num_prompt_tokens, answer.num_tokens) == (len(prompt), len(expected))


async def test_answers_come_in_order_with_bounded_concurrency() -> None:
    candidate, progress = SlowCandidate(), list[int]()
    run = await run_candidate(candidate, SAMPLES, concurrency=4, progress=progress.append)
    assert [answer.text for answer in run.answers] == [sample.id for sample in SAMPLES]
    assert candidate.most_active == 4
    assert sum(progress) == len(SAMPLES)
    assert candidate.num_done == len(SAMPLES) + 1  # the warm-up


async def test_an_engine_decides_on_the_baselines_tokens_as_far_as_there_is_room(checkpoint: Path) -> None:
    engine = fake_engine(INFO)
    try:
        candidate = EngineCandidate(engine, PromptEncoder(checkpoint, 8), Postprocessor.open(checkpoint), 8)
        prompt = [5] * (INFO.max_seq_len - 4)
        full = await candidate.decide(prompt[:4], (7, 8, 9, 2), "a")
        cut = await candidate.decide(prompt, (7, 8, 9, 2), "b")
    finally:
        engine.close()
    assert [one.token for one in full] == [7, 8, 9, 2]
    assert [one.token for one in cut] == [7, 8, 9]
    for one in full:
        assert len(one.top.ids) == len(one.top.log_probs) == 20
        assert one.log_prob <= max(one.top.log_probs)


async def test_decisions_come_in_order_on_the_tokens_of_the_baseline() -> None:
    progress = list[int]()
    tokens = [[100 + i] for i in range(12)]
    prompts = [[i] for i in range(12)]
    found = await decide_all(SlowCandidate(), SAMPLES, prompts, tokens, concurrency=4, progress=progress.append)
    assert [[one.token for one in sample] for sample in found] == [[i, 100 + i] for i in range(12)]
    assert sum(progress) == 12


class RefusingClient:
    """Of a server that answers no question about tokens."""

    def __init__(self, error: LlmserveError) -> None:
        self.error = error

    async def infer(self, inputs: object, *, request_id: str) -> dict[str, object]:
        raise self.error


@pytest.mark.parametrize("error", [NotFound("no model"), InvalidArgument("no input"), LlmserveError("not supported")])
async def test_a_server_that_tells_no_such_things_is_no_error(error: LlmserveError) -> None:
    client: Any = RefusingClient(error)
    with pytest.raises(Unsupported, match=str(error)):
        await ServerCandidate(client, client, 8).decide([1], [2], "a")


async def test_a_server_that_has_gone_is_one() -> None:
    client: Any = RefusingClient(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await ServerCandidate(client, client, 8).decide([1], [2], "a")


async def test_an_error_names_its_sample_and_stops_the_rest() -> None:
    candidate = SlowCandidate(bad_id="3")
    with pytest.raises(InvalidArgument, match="sample 3: too long"):
        await run_candidate(candidate, SAMPLES, concurrency=2)
    assert candidate.active == 0
    assert candidate.num_done < len(SAMPLES)


def test_performance() -> None:
    answers = [Answer("", 1, tokens, seconds) for tokens, seconds in ((10, 1.0), (20, 2.0), (30, 3.0))]
    performance = Performance.of(answers, 4.0)
    assert (performance.mean, performance.p50, performance.tokens_per_second) == (2.0, 2.0, 15.0)
    assert performance.p95 == pytest.approx(2.9)
