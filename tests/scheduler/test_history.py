"""What earlier answers draft, for whom, and how much of them is remembered."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from llmserve.core import GenerateRequest, SamplingParams, Tenant
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.drafts.history import MAX_OF_ANSWER, History, owner_of
from llmserve.scheduler.drafts.own_text import GRAM, NOTHING, Found
from llmserve.scheduler.sequence import Sequence as Answer
from llmserve.scheduler.sequence import sequences_for
from llmserve.scheduler.settings import SchedulerSettings
from tests.scheduler.harness import GREEDY, INFO, Bench

HISTORY = SchedulerSettings(speculation=Speculation.HISTORY)
LONG = replace(GREEDY, max_tokens=24)
PROMPT = (1, 2, 3)
OTHER = Tenant("other")


def answer_of(*tokens: int, adapter: str = "", tenant: str = "", prompt: Sequence[int] = PROMPT) -> Answer:
    request = GenerateRequest("r", tuple(prompt), SamplingParams(), adapter=adapter, tenant=Tenant(tenant))
    [sequence] = sequences_for(request, iter([0]), max_seq_len=1 << 20, arrival_ns=0)
    sequence.token_ids.extend(tokens)
    return sequence


def test_what_followed_in_an_earlier_answer_is_found() -> None:
    history, answer = History(64), answer_of(4, 5, 6, 7, 8)
    history.add(answer)

    def find(*tokens: int) -> Found:
        return history.find(owner_of(answer), array("i", tokens))

    assert find(9, 4, 5, 6) == (3, [[7, 8]])
    assert find(4, 5, 6, 7) == (4, [[8]])
    assert find(0, 5, 6) == (2, [[7, 8]])
    assert find(6, 7, 8) == find(0, 6) == find(1, 2, 3) == find(3, 4) == NOTHING  # nothing of the prompt is there
    history.add(answer_of(0, 5, 6, 7, 9))
    assert find(0, 0, 5, 6, 7) == (4, [[9]])
    assert find(1, 5, 6, 7) == (3, [[9], [8]])


def test_tenants_and_adapters_do_not_share() -> None:
    history = History(64)
    owners = [answer_of(4, 5, 6, 7, adapter=adapter, tenant=tenant) for adapter in ("", "a") for tenant in ("", "t")]
    history.add(owners[0])
    found = [history.find(owner_of(owner), array("i", [4, 5, 6])) != NOTHING for owner in owners]
    assert found == [True, False, False, False]
    assert len(set(map(owner_of, owners))) == 4


def test_a_long_answer_is_remembered_by_its_end() -> None:
    history, answer = History(), answer_of(*range(MAX_OF_ANSWER + 10))
    history.add(answer)
    assert history.find(owner_of(answer), array("i", [0, 1, 2])) == NOTHING
    assert history.find(owner_of(answer), array("i", [10, 11, 12])).followed[0][0] == 13


answers = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=30)), max_size=30)


@given(answers, st.integers(8, 40))
def test_memory_is_bounded_and_what_is_found_was_answered_to_the_same_tenant(
    told: list[tuple[str, list[int]]], num_tokens: int
) -> None:
    history = History(num_tokens)
    for number, (tenant, tokens) in enumerate(told):
        history.add(answer_of(*tokens, tenant=tenant))
        assert {len(one) for one in vars(history).values() if isinstance(one, array)} == {num_tokens}
        for other, newest in told[: number + 2]:
            most, followed = history.find(owner_of(answer_of(tenant=other)), array("i", newest))
            assert most == 0 or most >= GRAM
            own = ["".join(map(str, tokens)) for tenant, tokens in told[: number + 1] if tenant == other]
            for after in followed:
                text = "".join(map(str, [*newest[-most:], *after]))
                assert any(text in one for one in own)


def num_drafted(bench: Bench, **fields: object) -> int:
    """For one more answer to the prompt."""
    [sequence_id] = bench.add(PROMPT, LONG, **fields)
    bench.run()
    bench.assert_answers()
    return bench.sequences[sequence_id].num_drafted


def test_an_answer_is_drafted_from_an_earlier_one_in_fewer_steps() -> None:
    bench = Bench(INFO, HISTORY)
    assert num_drafted(bench) == 0
    first = bench.num_steps
    assert num_drafted(bench) > 0
    assert bench.num_steps - first < first / 2


def test_who_shares_no_blocks_shares_no_answers() -> None:
    bench = Bench(INFO, HISTORY)
    assert num_drafted(bench) == num_drafted(bench, tenant=OTHER) == num_drafted(bench, adapter="a") == 0
    assert num_drafted(bench) * num_drafted(bench, tenant=OTHER) * num_drafted(bench, adapter="a") > 0
    unshared = Bench(INFO, replace(HISTORY, enable_block_reuse=False))
    assert num_drafted(unshared) == num_drafted(unshared) == 0


def test_only_complete_answers_that_may_be_drafted_are_remembered() -> None:
    bench = Bench(INFO, HISTORY)
    assert num_drafted(bench, speculation=False) == 0
    assert num_drafted(bench, deadline=bench.now + 12) == 0
    [cancelled] = bench.add(PROMPT, LONG)
    for _ in range(12):
        bench.step()
    bench.scheduler.cancel(cancelled)
    assert num_drafted(bench) == 0, "of none of these"
    assert num_drafted(bench) > 0
