"""A layer for drafts reads the engine's rows: which, when, and where the engine does not compute some.

That they are the right ones under every load is among the laws of `test_properties.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from llmserve.engine.draft_engine import DraftEngine
from llmserve.engine.fake import FakeRunner
from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import Draftable, Speculation
from llmserve.scheduler.drafts.lookup import LookupDrafter
from llmserve.scheduler.drafts.pending import MAX_PENDING, PendingRows
from llmserve.scheduler.settings import Policy, SchedulerSettings
from llmserve.scheduler.step_costs import StepCosts
from tests.scheduler.harness import GREEDY, Bench
from tests.scheduler.harness import INFO as SMALL
from tests.scheduler.layers import HIDDEN_WIDTH, LayerRunner

DRAFTING = SchedulerSettings(speculation=Speculation.DRAFT)
INFO = replace(SMALL, max_num_tokens=64, max_seq_len=256, num_blocks=128)
LAYER = replace(INFO, hidden_width=HIDDEN_WIDTH)
RIGHT = 10**9
PROMPT = tuple(place % 7 for place in range(30))


@pytest.fixture(autouse=True)
def _steps_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "observe", lambda costs, num_rows, seconds: None)


@pytest.fixture
def nothing_is_worthwhile() -> Iterator[None]:
    with patch.object(Acceptance, "num_likely", return_value=0):
        yield


def test_right_drafts_are_drawn() -> None:
    layer = LayerRunner(LAYER, RIGHT)
    bench = Bench(INFO, DRAFTING, draft_runner=layer)
    for prompt in (PROMPT, (3,), (5, 6)):
        bench.add(prompt, replace(GREEDY, max_tokens=40))
    bench.run()
    bench.assert_answers()
    speculator = bench.scheduler.speculator
    assert speculator.num_accepted == speculator.num_drafted > 60
    assert layer.plans[0].num_tokens == len(PROMPT) - 1 + 1, (
        "rows of prompts are read at once, where what follows is known"
    )


def test_what_is_longer_than_the_layers_cache_is_not_read() -> None:
    longest = 16
    layer = LayerRunner(replace(LAYER, max_seq_len=longest), RIGHT)
    bench = Bench(INFO, DRAFTING, draft_runner=layer)
    for prompt in (PROMPT, (3,), (*PROMPT[:15], 1)):
        bench.add(prompt, replace(GREEDY, max_tokens=40))
    bench.run()
    bench.assert_answers()
    assert max(chunk.end for plan in layer.plans for chunk in plan.chunks) <= longest
    assert bench.scheduler.speculator.num_accepted > 0


@pytest.mark.usefixtures("nothing_is_worthwhile")
def test_rows_are_read_now_and_then_where_nothing_is_drafted() -> None:
    layer = LayerRunner(LAYER, RIGHT)
    bench = Bench(INFO, DRAFTING, draft_runner=layer)
    bench.add(PROMPT, replace(GREEDY, max_tokens=3 * MAX_PENDING))
    bench.run()
    bench.assert_answers()
    assert [plan.num_tokens for plan in layer.plans] == [len(PROMPT) - 1, MAX_PENDING, MAX_PENDING]


def test_what_the_engine_finds_in_its_cache_the_layer_finds_in_its_own() -> None:
    layer = LayerRunner(LAYER, RIGHT)
    bench = Bench(INFO, DRAFTING, draft_runner=layer)
    for _ in range(2):
        bench.add((*PROMPT, 1), GREEDY)
        bench.run()
    first, *_ = (chunk for plan in layer.plans for chunk in plan.chunks if chunk.sequence_id == 1)
    assert first.start == len(PROMPT) // 4 * 4
    bench.assert_answers()


def test_without_it_the_layer_begins_where_the_engine_does() -> None:
    """Its cache has room for one sequence only, which others have used meanwhile."""
    layer = LayerRunner(replace(LAYER, num_blocks=16), RIGHT)
    bench = Bench(INFO, DRAFTING, draft_runner=layer)
    for prompt in (PROMPT, (6, 6, 5) * 16, PROMPT):
        bench.add(prompt, GREEDY)
        bench.run()
    chunks = [chunk for plan in layer.plans for chunk in plan.chunks if chunk.sequence_id == 2]
    assert chunks[0].start == 0
    assert list(chunks[0].token_ids)[:1] == [PROMPT[29]], "28 tokens were known to the engine"
    speculator = bench.scheduler.speculator
    assert speculator.num_accepted == speculator.num_drafted > 0
    bench.assert_answers()


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_right_under_every_load(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike, or all but the first token; too few blocks here and there; drafts of others, too."""
    chance = random.Random(seed)

    def propose(drafter: LookupDrafter, sequence: Draftable, threshold: float) -> list[int]:
        return [chance.randrange(7) for _ in range(chance.choice([0, 0, 3]))][: chance.randrange(5)]

    monkeypatch.setattr(LookupDrafter, "propose", propose)
    monkeypatch.setattr(Acceptance, "num_worthwhile", lambda drafter, threshold: chance.randrange(5))
    info = replace(INFO, num_blocks=chance.choice([24, 40, 128]), num_states=chance.choice([0, 12]), block_bytes=1)
    layer = LayerRunner(
        replace(LAYER, num_blocks=chance.choice([12, 30, 128]), block_size=chance.choice([2, 4]), max_num_tokens=24),
        chance.choice([2, 3, 1000]),
    )
    policy = chance.choice(list(Policy))
    settings = SchedulerSettings(speculation=Speculation.LOOKUP | Speculation.DRAFT, policy=policy)
    bench = Bench(info, settings, draft_runner=layer)
    for _ in range(8):
        prompt = [chance.randrange(2), *PROMPT[: chance.choice([3, 8, 9, 24, 25])], *(chance.choices(range(7), k=3))]
        bench.add(prompt, replace(GREEDY, max_tokens=chance.randrange(1, 30)), num_sequences=chance.choice([1, 1, 2]))
        for _ in range(chance.randrange(6)):
            bench.step()
        if chance.random() < 0.2 and bench.scheduler.running:
            bench.scheduler.cancel(min(bench.scheduler.running))
    bench.run()


def test_rows_do_not_heap_up_when_the_layer_fails() -> None:
    layer = FakeRunner(LAYER, fail_at_step=0)
    engine = DraftEngine(layer, INFO)
    bench = Bench(INFO, DRAFTING, draft_runner=layer)
    bench.scheduler.speculator.model = engine.model
    bench.add(PROMPT, replace(GREEDY, max_tokens=3 * MAX_PENDING))
    with patch.object(PendingRows, "add", autospec=True, side_effect=PendingRows.add) as added:
        bench.run()
    bench.assert_answers()
    assert layer.num_steps == 0
    assert max(len(call.args[0]) for call in added.call_args_list) <= MAX_PENDING + 1


def test_pending_rows_forget_what_was_not_drawn() -> None:
    rows = np.arange(20, dtype=np.float32).reshape(10, 2)
    pending = PendingRows(3)
    pending.add(rows[:2], 1)
    assert not len(pending), "these were there before"
    pending.add(rows[3:6], 3)
    pending.add(rows[5:9], 5)
    assert np.array_equal(pending.first(6), rows[3:9])
    pending.cut(7)
    pending.read(2)
    pending.add(rows[7:], 7)
    assert (pending.begin, pending.end) == (5, 10)
    assert np.array_equal(pending.first(5), rows[5:])
    pending.cut(4)
    assert (pending.begin, pending.end) == (5, 5)
