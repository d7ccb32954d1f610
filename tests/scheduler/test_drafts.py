"""What is drafted, and when a draft is worth its rows."""

from __future__ import annotations

import itertools
import random
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from llmserve.core import GenerateRequest, Matcher
from llmserve.engine.fake import FakeRunner
from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.client import ClientDrafter
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Draftable, Drafter, Speculation
from llmserve.scheduler.drafts.grammar import GrammarDrafter, grammar_prior
from llmserve.scheduler.drafts.lookup import LookupDrafter
from llmserve.scheduler.drafts.own_text import GRAM, INDEXED_AT_ONCE, MAX_PLACES, Found, OwnText
from llmserve.scheduler.settings import SchedulerSettings
from llmserve.scheduler.step_costs import CAUTION, LOOKS_EVERY, LookBalance, StepCosts
from tests.scheduler.harness import GREEDY, INFO, Bench, answer_alone
from tests.scheduler.slots import Slot, Slots

CHEAP, DEAR = 0.1, 0.7  # probabilities above which a drafted token is worth its row


@dataclass
class Answer:
    """In the making."""

    token_ids: array[int]
    matcher: Matcher | None = None


def drafted(drafter: Drafter, *tokens: int, matcher: Matcher | None = None, threshold: float = 0.0) -> list[int]:
    return list(drafter.propose(Answer(array("i", tokens), matcher), threshold))


def looked_up(*tokens: int) -> list[int]:
    return drafted(LookupDrafter(OwnText().find), *tokens)


def test_what_followed_last_time_is_drafted() -> None:
    found = looked_up(1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 1, 2, 3)
    assert found == [6, 7, 8, 1, 2, 3] * 2 + [6, 7, 8]  # the last time, not the first; then it goes on repeating itself
    assert looked_up(1, 2, 3, 4, 2, 3) == [4, 2, 3] * 5
    assert looked_up(1, 2, 1)[:1] == [2]
    assert looked_up(1, 2) == []


def test_what_followed_a_longer_match_is_drafted() -> None:
    assert looked_up(9, 1, 2, 3, 4, 5, 1, 2, 3, 6, 9, 1, 2, 3)[:2] == [4, 5]  # though 6 came later
    assert looked_up(9, 0, 3, 4, 8, 0, 3, 6, 9, 0, 3)[:1] == [4]
    assert looked_up(0, 3, 4, 3, 6, 0, 3)[:1] == [4]


def test_shorter_matches_than_wanted_are_not_used() -> None:
    assert drafted(LookupDrafter(OwnText().find, least_matched=2), 1, 2, 1) == []
    assert drafted(LookupDrafter(OwnText().find, least_matched=2), 1, 2, 3, 1, 2)[:1] == [3]


def test_beside_a_draft_model_matches_of_one_token_are_not_used() -> None:
    for draft_runner, wanted in ((None, [True]), (FakeRunner(INFO), [False])):
        bench = Bench(settings=SchedulerSettings(speculation=Speculation.LOOKUP), draft_runner=draft_runner)
        [sequence_id] = bench.add((1, 2, 1), GREEDY)
        drafters = [one for one in bench.sequences[sequence_id].drafters if isinstance(one, LookupDrafter)]
        assert [one.propose(Answer(array("i", (1, 2, 1))), 0.0) != [] for one in drafters] == wanted


def test_the_same_places_vote_on_each_token() -> None:
    assert looked_up(0, 3, 4, 5, 0, 3, 4, 6, 0, 3, 7, 0, 3)[:2] == [4, 6]  # 4 more often than 7; behind it, the newest


def test_only_so_many_places_are_looked_at() -> None:
    def looked_up_behind(num_places: int, *newest: int) -> int:
        return looked_up(*newest, 4, *[5, 3, 6] * num_places, *newest)[0]

    assert looked_up_behind(MAX_PLACES, 0, 3) == 4, "two tokens lead there"
    assert looked_up(9, 0, 3, 4, *[5, 0, 3, 6] * MAX_PLACES, 9, 0, 3)[0] == 6


def test_the_longest_match_of_all_sources_is_drafted() -> None:
    def drafted_of(*lengths: int) -> int:
        found = [Found(length, [[10 * length + number]]) for number, length in enumerate(lengths)]
        return drafted(LookupDrafter(*(lambda token_ids, one=one: one for one in found)), 1)[0]

    assert drafted_of(3, 4) == 41
    assert drafted_of(4, 3) == 40
    assert drafted_of(3, 3) == 30


def test_a_longer_match_drafts_more_and_a_wrong_draft_less_of_its_length() -> None:
    matched = 0

    def num_drafted(drafter: LookupDrafter, num_matched: int) -> int:
        nonlocal matched
        matched = num_matched
        return len(drafted(drafter, 1, threshold=0.1))

    drafter = LookupDrafter(lambda token_ids: Found(matched, [[1] * MAX_DRAFTED]))
    lengths = [num_drafted(drafter, num_matched) for num_matched in (1, 3, 6, 12)]
    assert lengths == sorted(lengths)
    assert 0 < lengths[0] < lengths[-1]
    for _ in range(20):
        num_drafted(drafter, 1)
        drafter.learn(1, 0)
    assert num_drafted(drafter, 1) == 0
    assert num_drafted(drafter, 12) == lengths[-1], "of it nothing has been said"
    for _ in range(100):
        num_drafted(drafter, 1)
    assert num_drafted(drafter, 1) > 0, "it is tried again"


def test_what_a_guide_forces_is_drafted() -> None:
    def forced(*tokens: int, matcher: Matcher | None = None) -> list[int]:
        return drafted(GrammarDrafter(grammar_prior()), *tokens, matcher=matcher, threshold=CHEAP)

    either, seven = Slot(frozenset({1, 2})), Slot(frozenset({7}))
    matcher = Slots((seven, either, *[seven] * 20)).start()
    assert forced(5, matcher=matcher) == [7]
    matcher.advance(7)
    assert forced(5, 7, matcher=matcher) == []
    matcher.advance(1)
    assert forced(5, 7, 1, matcher=matcher) == [7] * MAX_DRAFTED
    assert forced(5) == []


def test_what_the_client_sends_is_drafted_where_the_answer_stands_in_it() -> None:
    drafter = ClientDrafter([1, 2, 3, 4, 5, 6], num_prompt=2)
    prompt = (9, 9)
    assert drafted(drafter, *prompt) == [1, 2, 3, 4, 5, 6]
    assert drafted(drafter, *prompt, 1, 2) == [3, 4, 5, 6]
    assert drafted(drafter, *prompt, 1, 2, 7) == []  # it says something else
    assert drafted(drafter, *prompt, 1, 2, 7, 2, 3, 4) == [5, 6]  # and comes back
    assert drafted(drafter, *prompt, 1, 2, 7, 2, 3, 4, 5, 6) == []
    assert drafted(ClientDrafter([1] * 40, num_prompt=2), *prompt, 1) == [1] * MAX_DRAFTED


def test_a_guide_is_trusted_until_it_was_wrong() -> None:
    drafter = GrammarDrafter(grammar_prior())
    assert drafter.num_worthwhile(CHEAP) == MAX_DRAFTED
    for _ in range(9):
        drafter.learn(3, 3)
        assert drafter.num_worthwhile(CHEAP) == MAX_DRAFTED
    assert drafter.num_worthwhile(DEAR) == MAX_DRAFTED
    drafter.learn(3, 0)  # a bad word
    assert drafter.num_worthwhile(DEAR) < MAX_DRAFTED


def test_what_a_guide_forces_is_drafted_the_less_the_dearer_rows_are_and_the_more_often_it_was_wrong() -> None:
    """In a full batch all answers begin at once, and each would draft as many wrong tokens as it may."""
    others = grammar_prior()
    first = GrammarDrafter(others)
    assert 0 < first.num_likely(DEAR) < first.num_likely(CHEAP) == MAX_DRAFTED
    for _ in range(100):
        first.learn(5, 0)
    assert first.num_likely(CHEAP) == GrammarDrafter(others).num_likely(DEAR) == 0
    assert GrammarDrafter(others).num_likely(CHEAP) > 0  # its guide may be another
    assert GrammarDrafter(grammar_prior()).num_likely(DEAR) > 0


def test_a_drafter_that_is_wrong_drafts_less_and_tries_again() -> None:
    acceptance = Acceptance(num_rejected=1.0)
    lengths = []
    for _ in range(6):
        lengths.append(acceptance.num_worthwhile(0.03))
        if lengths[-1]:
            acceptance.learn(lengths[-1], 0)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0]
    acceptance.learn(15, 15)
    assert acceptance.num_worthwhile(0.03) > lengths[0]


def test_rows_that_cost_more_have_to_be_likelier() -> None:
    costs = StepCosts()
    assert costs.threshold(1) < costs.threshold(32)
    for _ in range(50):
        for num_rows in (1, 4, 16, 200):
            costs.observe(num_rows, 1.0 + 0.1 * num_rows)  # long steps are no interruptions
    for num_sequences in (1, 8):  # a row's time, over a sequence's part of the step
        wanted = CAUTION * 0.1 * num_sequences / (1 + 0.1 * num_sequences)
        assert costs.threshold(num_sequences) == pytest.approx(wanted, rel=1e-3)
    before = costs.threshold(1)
    costs.observe(1, 100.0)  # the machine was busy
    assert costs.threshold(1) == pytest.approx(before, abs=0.1)


def test_no_draft_pays_where_a_row_costs_as_much_as_a_sequence() -> None:
    """Not even a certain one: the step is limited by its products."""
    times = ((1, 3.2), (2, 3.8), (16, 7.4), (32, 14.1))
    costs = StepCosts(times=times)
    assert costs.threshold(1) < 0.2
    assert costs.threshold(16) == 1
    assert Acceptance(num_rejected=0.1, num_accepted=100.0).num_likely(costs.threshold(16)) == 0
    for num_rows in (1, 16, 32) * 30:  # that other work takes ten times as long
        costs.observe(num_rows, 50.0 + dict(times)[num_rows])
    assert costs.threshold(16) < 0.3


def test_one_interrupted_step_does_not_stop_drafts() -> None:
    costs = StepCosts(times=((1, 2.9), (4, 3.7), (8, 5.0), (16, 7.1)))
    for _ in range(5):
        costs.observe(4, 5.0)
    before = costs.threshold(4)
    costs.observe(7, 25.0)  # the first one with drafts
    for _ in range(20):
        assert costs.threshold(4) < before + 0.2
        costs.observe(4, 5.0)


@pytest.mark.parametrize("num_sequences", [1, 4, 8])
def test_on_a_busy_machine_rows_cost_about_the_same_part_of_a_step(num_sequences: int) -> None:
    times = ((1, 2.9), (4, 3.7), (8, 5.0), (16, 7.1), (32, 13.2))
    errors = []
    for seed in range(20):
        chance, idle, busy = random.Random(seed), StepCosts(times=times), StepCosts(times=times)
        for _ in range(60):
            num_rows = num_sequences + chance.choice((0, 0, 0, 0, 0, 1, 2, 3))
            seconds = 1.0 + num_rows / 10
            idle.observe(num_rows, seconds)
            busy.observe(num_rows, seconds * (1 + chance.choice((0, 1)) * chance.expovariate(1.0)))
        errors.append(abs(busy.threshold(num_sequences) - idle.threshold(num_sequences)))
    assert statistics.median(errors) < 0.1


def test_drafting_a_token_is_part_of_its_cost() -> None:
    costs = StepCosts()
    assert costs.threshold(4) < costs.threshold(4, 0.1) < costs.threshold(4, 0.5) < 1


def test_what_rows_cost_is_not_forgotten_where_all_steps_are_alike() -> None:
    costs = StepCosts()
    for num_rows in (1, 8, 16) * 20:
        costs.observe(num_rows, 1.0 + 0.05 * num_rows)
    measured = costs.threshold(16)
    for _ in range(200):
        costs.observe(16, 1.8)
    assert costs.threshold(16) == pytest.approx(measured, abs=0.1)
    for _ in range(4000):
        costs.observe(16, 1.8)
    assert costs.threshold(16) == pytest.approx(StepCosts().threshold(16), abs=0.01)


def test_looking_that_saves_nothing_becomes_rare() -> None:
    balance = LookBalance()

    def looks(saved: float, num_steps: int = 10 * LOOKS_EVERY) -> int:
        """In how many of the next steps."""
        count = 0
        for _ in range(num_steps):
            if balance.is_due():
                count += 1
                balance.add(saved)
        return count

    assert looks(-0.01, 50) == 50, "at first it is cheap enough to go on"
    assert looks(-0.01, 8) < 8
    assert looks(-0.01) == 10
    assert looks(1 / 16 - 0.01) > 10 * LOOKS_EVERY - LOOKS_EVERY, "a token or two, and it is worth it again"
    assert looks(-0.01, 100) == 100, "what was gained lately is not forgotten at once"


@pytest.mark.parametrize(("seconds", "num_looks"), [(1e-9, 7), (1e6, 40)])
def test_drafts_are_looked_for_less_where_looking_takes_longer_than_it_saves(
    seconds: float, num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing repeats itself here."""
    looks: list[float] = []

    def propose(drafter: LookupDrafter, sequence: Draftable, threshold: float) -> list[int]:
        looks.append(threshold)
        return []

    monkeypatch.setattr(LookupDrafter, "propose", propose)
    bench = Bench(settings=SchedulerSettings(speculation=Speculation.LOOKUP))
    bench.add((1, 2, 3), replace(GREEDY, max_tokens=42))
    for _ in range(41):
        plan = bench.step()
        assert plan is not None
        bench.scheduler.speculator.observe(plan, seconds)
    assert len(looks) == num_looks


def test_drafts_are_not_even_looked_for_where_none_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row costs as much as a sequence, and the text repeats itself."""
    monkeypatch.setattr(LookupDrafter, "propose", lambda *arguments: pytest.fail("looked for a draft"))
    info = replace(INFO, row_times=((0, 0.0), (1, 1.0)))
    bench = Bench(info=info, settings=SchedulerSettings(speculation=Speculation.LOOKUP))
    bench.add((1, 2, 1, 2, 1, 2), GREEDY)
    for _ in range(4):
        bench.step()
    while bench.scheduler.has_work:
        bench.step()
    bench.step()  # without rows


def test_what_a_client_predicts_is_looked_at_whatever_looking_was_worth_before() -> None:
    bench = Bench(settings=SchedulerSettings(speculation=Speculation.LOOKUP))
    bench.add((1, 2, 3), replace(GREEDY, max_tokens=42))
    for _ in range(20):
        plan = bench.step()
        assert plan is not None
        bench.scheduler.speculator.observe(plan, 1e-9)
    bench.add((4, 5), GREEDY, draft_ids=(0, 7, 8))  # it begins with 0
    bench.step()  # its prompt
    plan = bench.step()
    assert plan is not None
    assert len(plan.chunks) == 2
    assert plan.chunks[1].drafted


def test_what_a_client_predicts_is_tried_whatever_rows_seem_to_cost() -> None:
    """They may cost less than was measured on a busy machine, and a certain draft loses nothing: a few tokens."""
    info = replace(INFO, row_times=((0, 0.0), (1, 1.0)), max_seq_len=64)
    sampling = replace(GREEDY, max_tokens=40)
    answer, _ = answer_alone(GenerateRequest("r", (1, 2, 3), sampling), 0, info)

    def num_drafted(predicted: Sequence[int]) -> list[int]:
        bench = Bench(info=info, settings=SchedulerSettings(speculation=Speculation.LOOKUP))
        bench.add((1, 2, 3), sampling, draft_ids=predicted)
        plans = [plan for plan in iter(bench.step, None) if plan.chunks]
        return [len(plan.chunks[0].drafted) for plan in plans][1:]

    assert num_drafted(answer)[:5] == [1, 1, 2, 4, 7], "more after each that came true"
    wrong = num_drafted([7, *answer[:1], 7, 7, 7])
    assert sum(wrong) <= 1, "none after one that was wrong"


def test_drafts_that_come_true_are_looked_for_though_looking_takes_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("llmserve.scheduler.speculation.time.perf_counter", lambda: float(next(clock)))
    info, prompt = replace(INFO, max_seq_len=64), (1, 2, 3)
    request = GenerateRequest("r", prompt, replace(GREEDY, max_tokens=40))
    answer, _ = answer_alone(request, 0, info)

    def propose(drafter: LookupDrafter, sequence: Draftable, threshold: float) -> list[int]:
        place = len(sequence.token_ids) - len(prompt)
        return answer[place : place + 1]

    monkeypatch.setattr(LookupDrafter, "propose", propose)
    bench = Bench(info, settings=SchedulerSettings(speculation=Speculation.LOOKUP))
    bench.submit(request)
    while bench.scheduler.has_work:
        plan = bench.step()
        assert plan is not None
        bench.scheduler.speculator.observe(plan, 2.0)
    assert bench.num_steps == 21, "two tokens in each step but the first and the last"


def test_a_long_prompt_is_read_over_several_steps() -> None:
    tokens = [*range(3 * INDEXED_AT_ONCE), 0, 1, 2]
    text = OwnText()
    assert drafted(LookupDrafter(text.find), *tokens)[:2] == [3, 4]
    assert text.num_indexed == INDEXED_AT_ONCE + GRAM - 1


def test_drafters_are_named_as_operators_write_them() -> None:
    assert Speculation.read(" Lookup,grammar") is Speculation.LOOKUP | Speculation.GRAMMAR
    assert Speculation.read("draft,history,lookup,grammar") is Speculation.ALL
    assert Speculation.read("off") is Speculation.OFF
    assert Speculation.OFF.words() == "off"
    assert Speculation.ALL.words() == "lookup,grammar,history,draft"
    for text in ("", "on", "lookup,", "off,lookup"):
        with pytest.raises(ValueError, match=r"expected off, or names of drafters .*: lookup,grammar,history,draft"):
            Speculation.read(text)
