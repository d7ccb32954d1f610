"""One behaviour of the scheduler each, on loads small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmserve.core import FinishReason, SamplingParams
from llmserve.errors import InvalidArgument, ResourceExhausted
from llmserve.scheduler.plan import StepPlan
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tests.scheduler.harness import GREEDY, INFO, Bench

MAX_UTILIZATION = SchedulerSettings(policy=Policy.MAX_UTILIZATION)
NO_REUSE = SchedulerSettings(enable_block_reuse=False)


def shape(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(sequence, start, tokens) of every chunk."""
    assert plan is not None
    return [(chunk.sequence_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]


def tokens(max_tokens: int) -> SamplingParams:
    return replace(GREEDY, max_tokens=max_tokens)


def test_nothing_to_do() -> None:
    bench = Bench()
    assert bench.scheduler.schedule() is None
    assert not bench.scheduler.has_work


def test_a_long_prompt_is_computed_in_chunks_and_sampled_after_the_last() -> None:
    bench = Bench(replace(INFO, max_num_tokens=8))
    bench.add(range(7), tokens(1))
    [long] = bench.add([1] * 18, tokens(2))
    assert shape(bench.step()) == [(0, 0, 7), (1, 0, 1)]
    plans = [bench.step() for _ in range(4)]
    assert [shape(plan) for plan in plans] == [[(1, 1, 8)], [(1, 9, 8)], [(1, 17, 1)], [(1, 18, 1)]]
    assert [plan.chunks[0].sample is not None for plan in plans if plan] == [False, False, True, True]
    assert bench.reasons[long] is FinishReason.LENGTH
    bench.assert_answers()


def test_decoding_goes_before_prompts() -> None:
    bench = Bench(replace(INFO, max_num_tokens=4))
    bench.add([1], tokens(8))
    bench.step()
    bench.add([2] * 10, tokens(1))
    assert shape(bench.step()) == [(0, 1, 1), (1, 0, 3)]
    assert shape(bench.step()) == [(0, 2, 1), (1, 3, 3)]
    bench.run()
    bench.assert_answers()


def test_decoding_goes_before_prompts_of_a_higher_priority() -> None:
    bench = Bench(replace(INFO, max_num_tokens=4))
    bench.add([1], tokens(8))
    bench.step()
    bench.add([2] * 10, tokens(1), priority=1)
    assert [shape(bench.step()) for _ in range(2)] == [[(0, 1, 1), (1, 0, 3)], [(0, 2, 1), (1, 3, 3)]]


def test_sequences_join_and_leave_at_every_step() -> None:
    bench = Bench(replace(INFO, max_batch_size=2))
    bench.add([1], tokens(2))
    bench.add([2], tokens(3))
    bench.add([3], tokens(1))
    assert shape(bench.step()) == [(0, 0, 1), (1, 0, 1)]
    assert shape(bench.step()) == [(0, 1, 1), (1, 1, 1)]
    assert shape(bench.step()) == [(1, 2, 1), (2, 0, 1)]
    assert not bench.scheduler.has_work


def test_no_more_sequences_run_than_the_budget_has_tokens() -> None:
    bench = Bench(replace(INFO, max_num_tokens=2, max_batch_size=4))
    for _ in range(4):
        bench.add([1], tokens(4))
    bench.step()
    assert len(bench.scheduler.running) == 2
    bench.run()
    bench.assert_answers()


def test_a_higher_priority_starts_first_and_equals_start_in_order() -> None:
    bench = Bench(replace(INFO, max_batch_size=1))
    for priority in (0, 0, 5, -1, 5):
        bench.add([1], tokens(1), priority=priority)
    assert [shape(bench.step())[0][0] for _ in range(5)] == [2, 4, 0, 1, 3]


def test_a_large_prompt_is_not_overtaken_by_small_ones() -> None:
    bench = Bench(replace(INFO, num_blocks=8), NO_REUSE)
    bench.add([1] * 12, tokens(8))  # 5 blocks
    bench.step()
    [large] = bench.add([2] * 20, tokens(4))  # 6 blocks
    [small] = bench.add([3], tokens(1))
    bench.run()
    assert bench.sequences[large].first_scheduled_ns <= bench.sequences[small].first_scheduled_ns
    bench.assert_answers()


def test_guaranteed_no_evict_reserves_the_whole_answer() -> None:
    bench = Bench(replace(INFO, num_blocks=6), NO_REUSE)
    bench.add([1], tokens(16))  # 16 tokens cached: 4 blocks
    bench.add([2], tokens(9))  # 3 blocks: must wait
    bench.step()
    assert len(bench.scheduler.running) == 1
    assert bench.scheduler.pool.num_free == 5
    bench.run()
    assert bench.num_preemptions == 0
    bench.assert_answers()


@pytest.mark.parametrize("policy", Policy)
def test_an_answer_may_fill_the_whole_pool(policy: Policy) -> None:
    bench = Bench(replace(INFO, num_blocks=4), SchedulerSettings(policy=policy))
    bench.add([1, 2], tokens(15))  # the last token is not cached: 16 are
    bench.run()
    bench.assert_answers()


def test_max_utilization_starts_what_fits_and_preempts_the_last_in_place() -> None:
    bench = Bench(replace(INFO, num_blocks=6), replace(MAX_UTILIZATION, enable_block_reuse=False))
    [first] = bench.add([1], tokens(16))
    [second] = bench.add([2], tokens(16))
    bench.step()
    assert len(bench.scheduler.running) == 2
    preempted = []
    while bench.scheduler.has_work:
        bench.step()
        preempted += [s.id for s in bench.scheduler.waiting]
    assert bench.num_preemptions > 0
    assert bench.scheduler.num_preemptions == bench.num_preemptions
    assert set(preempted) == {second}
    assert bench.sequences[first].last_token_ns < bench.sequences[second].last_token_ns
    bench.assert_answers()


def test_preemption_takes_the_lowest_priority_though_it_came_first() -> None:
    bench = Bench(replace(INFO, num_blocks=6), MAX_UTILIZATION)
    [low] = bench.add([1], tokens(16), priority=0)
    bench.step()
    bench.add([2], tokens(16), priority=1)
    paused: set[int] = set()
    while bench.scheduler.has_work:
        bench.step()
        paused |= {s.id for s in bench.scheduler.waiting}
    assert paused == {low}
    bench.assert_answers()


def test_a_preempted_sequence_is_paused_and_told_nothing_twice() -> None:
    bench = Bench(replace(INFO, num_blocks=5), MAX_UTILIZATION)
    ids = bench.add([1], tokens(16)) + bench.add([2], tokens(16))
    while not bench.scheduler.num_paused:
        bench.step()
    num_told = len(bench.answers[ids[1]])
    assert num_told > 0
    bench.run()
    assert len(bench.answers[ids[1]]) == 16
    bench.assert_answers()


def test_a_known_prefix_is_not_computed_again() -> None:
    bench = Bench()
    bench.add([1] * 12, tokens(1))
    bench.run()
    [second] = bench.add([1] * 11 + [2], tokens(1))
    assert shape(bench.step()) == [(second, 8, 4)]
    usage = bench.events[second][-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (12, 8)
    bench.assert_answers()


def test_a_prefix_hit_leaves_a_token_to_compute() -> None:
    bench = Bench()
    bench.add([1] * 8, tokens(1))
    bench.run()
    [second] = bench.add([1] * 8, tokens(1))
    assert shape(bench.step()) == [(second, 4, 4)]
    bench.assert_answers()


def test_the_answer_is_a_prefix_too() -> None:
    bench = Bench()
    [first] = bench.add([1] * 4, tokens(5))
    bench.run()
    [second] = bench.add([1] * 4 + bench.answers[first] + [0], tokens(1))
    assert shape(bench.step()) == [(second, 8, 2)]
    bench.assert_answers()


def test_reuse_can_be_switched_off() -> None:
    bench = Bench(settings=NO_REUSE)
    for _ in range(2):
        [last] = bench.add([1] * 9, tokens(1))
        assert shape(bench.step()) == [(last, 0, 9)]


def test_another_cache_root_shares_nothing() -> None:
    bench = Bench()
    bench.add([1] * 9, tokens(1))
    bench.run()
    [second] = bench.add([1] * 9, tokens(1))
    bench.sequences[second].cache_root = b"another adapter"
    assert shape(bench.step()) == [(second, 0, 9)]


def test_n_answers_compute_the_prompt_once() -> None:
    bench = Bench(replace(INFO, max_num_tokens=8))
    ids = bench.add([1] * 13, replace(GREEDY, temperature=1.0, max_tokens=4), num_sequences=3)
    assert shape(bench.step()) == [(0, 0, 8)]
    assert shape(bench.step()) == [(0, 8, 5)]
    assert shape(bench.step()) == [(0, 13, 1), (1, 12, 1), (2, 12, 1)]
    bench.run()
    assert len({tuple(bench.answers[i]) for i in ids}) == 3
    assert [bench.events[i][-1].sequence_index for i in ids] == [0, 1, 2]
    bench.assert_answers()


def test_siblings_go_on_when_the_first_is_cancelled() -> None:
    bench = Bench(replace(INFO, max_num_tokens=8))
    first, second = bench.add([1] * 13, num_sequences=2)
    bench.step()
    bench.scheduler.cancel(first)
    bench.run(20)
    assert set(bench.reasons) == {second}
    bench.assert_answers()


def test_cancelling_frees_the_blocks_at_once() -> None:
    bench = Bench()
    running, waiting = [bench.add([i] * 9)[0] for i in range(1, 3)]
    plan = bench.scheduler.schedule()
    assert plan is not None
    used = bench.scheduler.pool.num_used
    bench.scheduler.cancel(running)
    assert bench.scheduler.pool.num_used < used
    bench.scheduler.cancel(waiting)
    bench.check()
    assert bench.scheduler.commit(plan, [1], [0.0]) == []  # the second prompt goes on later
    assert not bench.scheduler.has_work
    assert bench.scheduler.pool.num_used == 0


def test_cancelling_what_has_ended_or_never_was_does_nothing() -> None:
    bench = Bench()
    [done] = bench.add([1], tokens(1))
    bench.run()
    bench.scheduler.cancel(done)
    bench.scheduler.cancel(99)
    bench.check()


def test_deadlines_of_sequences_that_have_ended_are_forgotten() -> None:
    bench = Bench(INFO)
    [waiting] = bench.add([2], deadline=2.0)
    for _ in range(1000):
        [ended] = bench.add([1], deadline=1e9)
        bench.scheduler.cancel(ended)
    assert len(bench.scheduler._deadlines) < 100
    for _ in range(3):
        bench.step()
    assert bench.reasons[waiting] is FinishReason.TIMED_OUT


def test_a_deadline_ends_waiting_and_running_sequences() -> None:
    bench = Bench(replace(INFO, max_batch_size=1))
    [running] = bench.add([1], deadline=3.0)
    [waiting] = bench.add([2], deadline=2.0)
    [patient] = bench.add([3], tokens(1), deadline=50.0)
    for _ in range(3):
        bench.step()
    assert bench.reasons == {
        running: FinishReason.TIMED_OUT,
        waiting: FinishReason.TIMED_OUT,
        patient: FinishReason.LENGTH,
    }
    assert len(bench.answers[running]) == 2
    assert bench.answers[waiting] == []
    assert bench.scheduler.pool.num_used == 0


def room(bench: Bench, num_arriving: int = 1) -> None:
    waiting, running = bench.scheduler.waiting, bench.scheduler.running
    bench.scheduler.config.check_room(num_arriving, num_waiting=len(waiting), num_running=len(running))


def test_the_queue_refuses_when_it_is_full() -> None:
    bench = Bench(replace(INFO, max_batch_size=2), SchedulerSettings(max_queue_size=1))
    for _ in range(3):  # two may start at once, one waits
        room(bench)
        bench.add([1])
    with pytest.raises(ResourceExhausted, match="max_queue_size is 1"):
        room(bench)
    bench.step()
    with pytest.raises(ResourceExhausted):
        room(bench)
    bench.run()
    room(bench, 3)
    with pytest.raises(ResourceExhausted):
        room(bench, 4)


def test_the_queue_knows_that_the_budget_limits_the_batch() -> None:
    bench = Bench(replace(INFO, max_num_tokens=2, max_batch_size=4), SchedulerSettings(max_queue_size=1))
    room(bench, 3)
    with pytest.raises(ResourceExhausted):
        room(bench, 4)


def test_a_queue_without_limit() -> None:
    bench = Bench(settings=SchedulerSettings(max_queue_size=0))
    room(bench, 1_000_000)
    bench.scheduler.config.check_fits(1_000_000)


def test_settings_name_every_problem() -> None:
    with pytest.raises(InvalidArgument, match=r"(?s)max_queue_size.*priority_step"):
        SchedulerSettings(max_queue_size=-1, priority_step=0)


def test_a_result_of_the_wrong_length_is_noticed() -> None:
    bench = Bench()
    bench.add([1])
    plan = bench.scheduler.schedule()
    assert plan is not None
    with pytest.raises(AssertionError, match="other samples"):
        bench.scheduler.commit(plan, [1, 2], [0.0, 0.0])


# A network with states, each as large as three blocks: so one is kept behind every third block.
STATES = replace(INFO, num_states=8, state_bytes=3, block_bytes=1)


def test_states_are_kept_before_the_end_of_chunks_and_behind_them() -> None:
    """Every third block of four tokens, and at the last whole block before the last token."""
    bench = Bench(replace(STATES, max_num_tokens=64))
    bench.add([1] * 42, tokens(1))
    plans = [bench.step() for _ in range(3)]
    assert [shape(plan) for plan in plans] == [[(0, 0, 24)], [(0, 24, 16)], [(0, 40, 2)]]
    assert [chunk.kept_state[1] for plan in plans if plan for chunk in plan.chunks] == [12, 12, 0]
    [again] = bench.add([1] * 42, tokens(1))
    bench.run()
    bench.assert_answers()
    assert bench.sequences[again].num_cached_tokens == 40


def test_a_prefix_is_found_up_to_a_state() -> None:
    bench = Bench(STATES)
    bench.add([1] * 30, tokens(1))
    bench.run()
    [same] = bench.add([1] * 30, tokens(1))
    [longer] = bench.add([1] * 40, tokens(1))
    [other] = bench.add([1] * 23 + [2] * 7, tokens(1))
    [shorter] = bench.add([1] * 11, tokens(1))
    bench.run()
    bench.assert_answers()
    assert [bench.sequences[i].num_cached_tokens for i in (same, longer, other, shorter)] == [28, 28, 12, 0]


def test_a_state_is_kept_where_prompts_part() -> None:
    """The second prompt with a beginning finds its blocks, and leaves a state behind them for the third."""
    bench = Bench(replace(STATES, state_bytes=50))
    cached = []
    for token in (2, 3, 4):
        [one] = bench.add([1] * 21 + [token] * 9, tokens(1))
        bench.run()
        cached.append(bench.sequences[one].num_cached_tokens)
    bench.assert_answers()
    assert cached == [0, 0, 20]


def test_an_answer_leaves_states_for_the_next_question() -> None:
    bench = Bench(STATES)
    [first] = bench.add([1] * 10, tokens(16))
    bench.run()
    [second] = bench.add([1] * 10 + bench.answers[first] + [3, 4], tokens(4))
    bench.run()
    bench.assert_answers()
    assert bench.sequences[second].num_cached_tokens == 24


def test_states_are_given_away_when_sequences_need_them() -> None:
    """The one that was used last is the last to go."""
    bench = Bench(replace(STATES, num_states=3, max_batch_size=2))
    for token in (1, 2):
        bench.add([token] * 9, tokens(1))
        bench.run()
    for token in (1, 3):
        bench.add([token] * 9, tokens(1))
        bench.run()
    found = [bench.add([token] * 9, tokens(1))[0] for token in (1, 2)]
    bench.run()
    bench.assert_answers()
    assert [bench.sequences[i].num_cached_tokens for i in found] == [8, 0]


def test_n_answers_start_from_the_state_of_the_first() -> None:
    bench = Bench(STATES)
    ids = bench.add([1] * 30, tokens(5), num_sequences=3)
    bench.run()
    bench.assert_answers()
    assert [bench.sequences[i].num_cached_tokens for i in ids] == [0, 28, 28]


def test_no_more_sequences_run_than_there_are_states() -> None:
    bench = Bench(replace(STATES, num_states=1))
    for token in (1, 2, 3):
        bench.add([token] * 9, tokens(3))
    assert shape(bench.step()) == [(0, 0, 9)]
    bench.run()
    bench.assert_answers()


def test_without_reuse_no_state_is_kept() -> None:
    bench = Bench(STATES, NO_REUSE)
    bench.add([1] * 15, tokens(1))
    assert shape(bench.step()) == [(0, 0, 15)]
    [again] = bench.add([1] * 15, tokens(1))
    bench.run()
    assert bench.sequences[again].num_cached_tokens == 0


def test_a_state_of_another_sequence_is_noticed() -> None:
    bench = Bench(STATES)
    bench.add([1] * 20, tokens(1))
    bench.step()
    [sequence] = bench.scheduler.running.values()
    sequence.states = (sequence.states[1], 7)
    with pytest.raises(AssertionError, match="the state of another sequence"):
        bench.step()
