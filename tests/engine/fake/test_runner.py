from __future__ import annotations

from dataclasses import replace

import pytest

from llmserve.core import SamplingParams
from llmserve.engine.base import StepResult
from llmserve.engine.fake import FAKE_RUNNER_INFO, FakeRunner, fake_answer
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan

GREEDY = SampleRequest(SamplingParams(temperature=0.0), stream=0, position=3)


def step(runner: FakeRunner, *chunks: Chunk) -> StepResult:
    return runner.step(StepPlan(chunks))


def test_the_worked_example() -> None:
    assert fake_answer([1, 2, 3], 4) == [31, 125, 501, 11]
    runner = FakeRunner()
    assert step(runner, Chunk(0, (1, 2, 3), 0, (7,), GREEDY)).tokens == [31]
    assert step(runner, Chunk(0, (31,), 3, (7,), GREEDY)).tokens == [125]
    assert step(runner, Chunk(0, (125,), 4, (7, 2), GREEDY)).tokens == [501]


def test_a_wrong_block_table_gives_a_wrong_number() -> None:
    runner = FakeRunner()
    step(runner, Chunk(0, (1, 2, 3), 0, (7,)))
    assert step(runner, Chunk(0, (31,), 3, (8,), GREEDY)).tokens != [125]


def test_chunks_of_a_prompt_add_up() -> None:
    runner = FakeRunner()
    assert step(runner, Chunk(0, (1, 2), 0, (0,))).tokens == []
    assert step(runner, Chunk(0, (3,), 2, (0,), GREEDY)).tokens == [31]


def test_sampling_parameters_move_the_token() -> None:
    def sampled(**fields: object) -> int:
        return int(step(FakeRunner(), Chunk(0, (1, 2, 3), 0, (0,), replace(GREEDY, **fields))).tokens[0])  # type: ignore[arg-type]

    assert sampled(params=SamplingParams(seed=5), stream=2) == 38
    assert sampled(banned=(31, 32)) == 33
    assert sampled(bias=((8, 1.0), (9, 2.0))) == 9
    assert sampled(bias=((8, -1.0),)) == 31


def test_the_log_prob_is_known() -> None:
    result = step(FakeRunner(), Chunk(0, (1, 2, 3), 0, (0,), replace(GREEDY, log_prob=True)))
    assert result.log_probs == [-0.032]


def test_a_block_with_two_writers_is_noticed() -> None:
    result = step(FakeRunner(), Chunk(0, (1, 2, 3), 0, (0,), GREEDY), Chunk(1, (3, 2, 1), 0, (0,), GREEDY))
    assert list(result.tokens) != [31, fake_answer([3, 2, 1], 1)[0]]


def test_a_plan_over_the_limits_is_refused() -> None:
    runner = FakeRunner(replace(FAKE_RUNNER_INFO, max_num_tokens=2, max_batch_size=1))
    with pytest.raises(AssertionError, match="budget"):
        step(runner, Chunk(0, (1, 2, 3), 0, (0,)))
    with pytest.raises(AssertionError, match="chunks"):
        step(runner, Chunk(0, (1,), 0, (0,)), Chunk(1, (1,), 0, (1,)))


def test_it_fails_when_told() -> None:
    runner = FakeRunner(fail_at_step=1)
    step(runner, Chunk(0, (1,), 0, (0,)))
    with pytest.raises(RuntimeError, match="step 1"):
        step(runner, Chunk(0, (1,), 1, (0,)))
