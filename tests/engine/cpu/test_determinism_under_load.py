"""The same law for whole answers: what a client gets from a busy engine, with preemption and shared prefixes, is what
it gets from an idle one. Drawn tokens and log-probs included."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import EngineInfo, StepResult
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.inflight import InflightEngine
from llmserve.scheduler.plan import StepPlan
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tests.engine.cpu.conftest import EngineFile
from tests.engine.cpu.networks import random_ids

INFO = EngineInfo("test", "cpu", "Odd", "float16", "", 83, 96, 8, 96)
Answer = list[tuple[int, float]]


class RecordingRunner(CpuRunner):
    """Counts how often each sequence was begun: more than once means that it was preempted, and computed again."""

    begun: Counter[int]

    def step(self, plan: StepPlan) -> StepResult:
        self.begun.update(chunk.sequence_id for chunk in plan.chunks if chunk.start == 0)
        return super().step(plan)


def open_engine(path: Path, settings: SchedulerSettings, *, num_blocks: int, threads: int) -> InflightEngine:
    """With slots for checkpoints, where the network has states."""
    runner = RecordingRunner.open(path, num_blocks=num_blocks, threads=threads, num_states=13)
    assert isinstance(runner, RecordingRunner)
    runner.begun = Counter()
    return InflightEngine(runner, INFO, settings)


def requests(rng: random.Random) -> list[GenerateRequest]:
    """Some share a beginning; all draw, each with a seed of its own, some with penalties."""
    common = random_ids(83, 24, 5)
    found = []
    for number in range(24):
        own = random_ids(83, rng.randint(1, 30), number)
        params = SamplingParams(
            max_tokens=rng.randint(5, 40), temperature=0.9, top_k=rng.choice([0, 20]), top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.3]), seed=number,
        )  # fmt: skip
        prompt = tuple(common[: rng.choice([0, 12, 24])] + own)
        found.append(GenerateRequest(str(number), prompt, params, return_log_probs=True))
    return found


async def answer(engine: InflightEngine, request: GenerateRequest, *, delay: float = 0.0) -> Answer:
    await asyncio.sleep(delay)
    async with aclosing(engine.submit(request)) as stream:
        return [pair async for event in stream for pair in zip(event.token_ids, event.log_probs, strict=True)]


@pytest.mark.parametrize(
    ("network", "quantization"), [("rope", ""), ("rope", "int8"), ("rope", "int4"), ("states", ""), ("states", "int8")]
)
@pytest.mark.parametrize("policy", Policy)
async def test_answers_do_not_depend_on_the_load(
    policy: Policy, network: str, quantization: str, engine_file: EngineFile
) -> None:
    path = engine_file(network, "float16", quantization)
    rng = random.Random(len(quantization))
    wanted = requests(rng)
    idle = open_engine(path, SchedulerSettings(enable_block_reuse=False), num_blocks=64, threads=1)
    alone = [await answer(idle, request) for request in wanted]
    idle.close()

    busy = open_engine(path, SchedulerSettings(policy=policy), num_blocks=40, threads=3)
    order = rng.sample(range(len(wanted)), len(wanted))
    together = await asyncio.gather(*(answer(busy, wanted[i], delay=rng.choice([0, 0.005, 0.02])) for i in order))
    begun, stats = busy._runner.begun, busy.stats()  # type: ignore[attr-defined]
    busy.close()
    assert [together[order.index(i)] for i in range(len(wanted))] == alone
    assert stats.reused_blocks > 0
    if policy is Policy.MAX_UTILIZATION:
        assert max(begun.values()) > 1, "nothing was preempted; make the pool smaller"
    assert len({token for tokens in alone for token, _ in tokens}) > 20


async def test_another_seed_gives_another_answer(engine_file: EngineFile) -> None:
    engine = open_engine(engine_file("rope", "float16", ""), SchedulerSettings(), num_blocks=64, threads=1)
    (request, *_) = requests(random.Random(1))
    other = replace(request, sampling=replace(request.sampling, seed=999))
    answers = [await answer(engine, each) for each in (request, request, other)]
    engine.close()
    assert answers[0] == answers[1] != answers[2]
