"""Drives a scheduler with a fake runner, one step at a time on a false clock, and checks the laws after every step."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import replace

from llmserve.core import FinishReason, GenerateRequest, GuideState, SamplingParams, TokenEvent
from llmserve.engine.base import PendingStep, Runner, RunnerInfo, StepResult
from llmserve.engine.fake import FakeRunner, fake_prompt_log_prob, fold
from llmserve.scheduler.blocks import hash_block
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.drafts.model import DraftModel, Drawn
from llmserve.scheduler.drafts.token_ids import TokenIds
from llmserve.scheduler.plan import StepPlan
from llmserve.scheduler.scheduler import Scheduler
from llmserve.scheduler.sequence import Sequence, sequences_for
from llmserve.scheduler.settings import SchedulerConfig, SchedulerSettings
from tests.engine.fake.pipelined import PipelinedFakeRunner
from tests.scheduler.layers import check_known, fake_hidden
from tests.scheduler.slots import Slots

INFO = RunnerInfo(vocab_size=7, block_size=4, num_blocks=32, max_num_tokens=16, max_batch_size=4, max_seq_len=64)
PLAIN = SchedulerSettings(speculation=Speculation.OFF)  # a token in each step
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


class Listener:
    """What it has heard can be found, by hash: what is before it, and the tokens."""

    def __init__(self) -> None:
        self.found: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}

    def stored(self, block_hash: bytes, parent: bytes, token_ids: Seq[int]) -> None:
        assert block_hash not in self.found, "stored twice"
        assert hash_block(parent, token_ids) == block_hash
        self.found[block_hash] = parent, tuple(token_ids)

    def removed(self, block_hash: bytes) -> None:
        del self.found[block_hash]


class Bench:
    """`answers[id]` collects the tokens told so far, `reasons[id]` how the sequence ended."""

    def __init__(
        self,
        info: RunnerInfo = INFO,
        settings: SchedulerSettings | None = None,
        *,
        runner: Runner | None = None,
        foresees: bool = False,
        scheduler_class: type[Scheduler] = Scheduler,
        draft_runner: Runner | None = None,
    ) -> None:
        self.info = info
        self.listener = Listener()
        self.now = 0.0
        self.pipeline = PipelinedFakeRunner(info) if foresees else None
        self.runner = runner or self.pipeline or FakeRunner(info)
        self._ahead: tuple[StepPlan, PendingStep] | None = None
        config = SchedulerConfig(
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_num_tokens=info.max_num_tokens,
            row_times=info.row_times,
            max_batch_size=info.max_batch_size,
            max_seq_len=info.max_seq_len,
            num_states=info.num_states,
            checkpoint_blocks=info.checkpoint_blocks,
            settings=replace(settings or PLAIN, block_listener=self.listener),
            needs_whole=info.needs_whole,
            windowed_layers=info.windowed_layers,
        )
        self.scheduler = scheduler_class(config, clock=lambda: self.now, wall_clock_ns=lambda: int(self.now * 1e9) + 1)
        self._hands_out = False
        if draft_runner is not None:
            draft_config = draft_runner.info.scheduler_config(SchedulerSettings())
            step = lambda plan: self._checked(draft_runner, plan)  # noqa: E731
            self._hands_out = draft_runner.info.hidden_width > 0
            token_ids = TokenIds(draft_runner.info.vocab_size, info.vocab_size)
            self.scheduler.speculator.model = DraftModel(
                draft_config, step, token_ids, prior_cost=0.0, reads_hidden=self._hands_out
            )
        self.ids = itertools.count()
        self.sequences: dict[int, Sequence] = {}
        self.answers: dict[int, list[int]] = defaultdict(list)
        self.reasons: dict[int, FinishReason] = {}
        self.events: dict[int, list[TokenEvent]] = defaultdict(list)
        self.num_steps = 0
        self.num_preemptions = 0

    def add(self, prompt: Seq[int], sampling: SamplingParams = GREEDY, **fields: object) -> list[int]:
        return self.submit(GenerateRequest("r", tuple(prompt), sampling, **fields))  # type: ignore[arg-type]

    def submit(self, request: GenerateRequest) -> list[int]:
        sequences = sequences_for(
            request, self.ids, max_seq_len=self.info.max_seq_len, arrival_ns=int(self.now * 1e9) + 1
        )
        for sequence in sequences:
            self.sequences[sequence.id] = sequence
            self.scheduler.add(sequence)
        return [sequence.id for sequence in sequences]

    def step(self) -> StepPlan | None:
        self.now += 1.0
        self._record(self.scheduler.expire())
        tables = {sequence.id: sequence.block_table for sequence in self.scheduler.running.values()}
        plan = self._ahead[0] if self._ahead else self.scheduler.schedule()
        self.num_preemptions += sum(self.sequences[i].block_table is not table for i, table in tables.items())
        if plan is not None:
            result = self._result_of(plan)
            self._record(self.scheduler.commit(plan, result.tokens, result.log_probs, result.scores))
            self.num_steps += 1
            if self._ahead and not self.scheduler.has_work:
                self._ahead[1].result()
                self._ahead = None
        else:
            assert not self.scheduler.has_work, "work waits, but nothing can run"
        self.check()
        return plan

    def _result_of(self, plan: StepPlan) -> StepResult:
        """As the engine's loop does it."""
        if self.pipeline is None:
            self._check_plan(plan)
            hidden = fake_hidden(plan, self.scheduler.running) if self._hands_out else None
            self.scheduler.speculator.keep(plan, hidden, self.scheduler.running)
            return self.runner.step(plan)
        if self._ahead is None:
            self._check_plan(plan)
        _, pending = self._ahead or (plan, self.pipeline.launch(plan))
        tables = {sequence.id: sequence.block_table for sequence in self.scheduler.running.values()}
        following = self.scheduler.foresee(plan)
        assert all(self.sequences[i].block_table is table for i, table in tables.items()), "somebody gave way"
        if following is not None:
            self._check_plan(following)
        self._ahead = None if following is None else (following, self.pipeline.launch(following))
        return pending.result()

    def _checked(self, draft_runner: Runner, plan: StepPlan) -> Drawn:
        model = self.scheduler.speculator.model
        assert model is not None
        for chunk in plan.chunks:
            assert len(chunk.block_table) * draft_runner.info.block_size >= chunk.end, "a draft has no block"
            assert all(map(model.pool.is_used, chunk.block_table)), "a draft's block belongs to nobody"
            assert all(len(table) * draft_runner.info.block_size >= chunk.end for table in chunk.windowed)
        assert len({chunk.sequence_id for chunk in plan.chunks}) == len(plan.chunks), "a sequence is drafted for twice"
        if self._hands_out:
            check_known(plan, self.scheduler.running)
        result = draft_runner.step(plan)
        return Drawn(result.tokens, result.log_probs, result.hidden)

    def run(self, max_steps: int = 10_000) -> None:
        """Until everything has ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"sequences starve: {self.scheduler.running}, {self.scheduler.waiting}")

    def check(self) -> None:
        pool, windows = self.scheduler.pool, self.scheduler.windows
        self.scheduler.check_integrity()
        assert pool.num_free + pool.num_used == pool.num_blocks
        assert pool.num_used == len({b for s in self.scheduler.running.values() for b in windows.owned(s)})
        assert self.scheduler.has_work or pool.num_used == 0, "an idle scheduler owns blocks"
        if (model := self.scheduler.speculator.model) is not None:
            num_used = model.pool.num_used + model.states.num_used
            assert self.scheduler.has_work or num_used == 0, "an idle scheduler owns blocks or states of drafts"
        if self._ahead is None:
            for one in self.scheduler.running.values():
                assert one.drafted_state is None, "a draft that has ended owns a state"
                num_known = self.scheduler.config.num_blocks_for(one.num_tokens)
                assert all(len(table) <= num_known for table in (one.block_table, *one.windowed)), (
                    "a rejected draft owns a block"
                )
                assert windows.num_needed(one) >= len(windows.owned(one)) - len(one.block_table), (
                    "a sequence has more than its window"
                )
        assert self.listener.found.keys() == pool.known_hashes(), "a listener knows something else"
        self._check_sharing()

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.info.max_num_tokens, "over the token budget"
        assert len(plan.chunks) <= self.info.max_batch_size, "too many chunks"
        assert len({chunk.sequence_id for chunk in plan.chunks}) == len(plan.chunks), "a sequence has two chunks"
        for chunk in plan.chunks:
            assert chunk.token_ids, "an empty chunk"
            owned = self.scheduler.running[chunk.sequence_id].block_table
            assert chunk.block_table == owned, "a planned sequence has lost its blocks"
            assert len(chunk.block_table) * self.info.block_size >= chunk.start + len(chunk.token_ids)
            assert len(chunk.windowed) == self.info.windowed_layers.num_tables
            for table in chunk.windowed:
                assert len(chunk.block_table) >= len(table) >= -(-chunk.end // self.info.block_size)

    def _check_sharing(self) -> None:
        """A block in two tables holds the same computed tokens, after the same beginning, in both."""
        owners: dict[int, list[tuple[Sequence, int]]] = defaultdict(list)  # with the block's end
        for sequence in self.scheduler.running.values():
            for end, block in enumerate(sequence.block_table, 1):
                owners[block].append((sequence, end * self.info.block_size))
        for block, (first, *others) in owners.items():
            for sequence, end in others:
                assert (end, sequence.token_ids[:end]) == (first[1], first[0].token_ids[:end]), (
                    f"block {block} is shared by different beginnings"
                )
                assert end <= sequence.num_computed_tokens

    def _record(self, updates: list[tuple[int, TokenEvent]]) -> None:
        for sequence_id, event in updates:
            assert sequence_id not in self.reasons, "an event after the last one"
            self.answers[sequence_id] += event.token_ids
            self.events[sequence_id].append(event)
            if event.finish_reason is not None:
                assert event.usage is not None
                self.reasons[sequence_id] = event.finish_reason
            else:
                assert event.token_ids, "an event that says nothing"

    def assert_answers(self) -> None:
        """Every finished sequence told exactly what it would have told alone, worked out without a scheduler."""
        for sequence_id, reason in self.reasons.items():
            sequence = self.sequences[sequence_id]
            answer, expected_reason = answer_alone(sequence.request, sequence.index, self.info)
            if reason is FinishReason.TIMED_OUT:
                assert self.answers[sequence_id] == full_output(sequence)
            else:
                assert (self.answers[sequence_id], reason) == (answer, expected_reason)
                self._assert_scores(sequence_id)
                self._assert_drafts(sequence_id)

    def _assert_drafts(self, sequence_id: int) -> None:
        usage = self.events[sequence_id][-1].usage
        assert usage is not None
        assert 0 <= usage.accepted_tokens <= usage.drafted_tokens
        if not (self.sequences[sequence_id].request.speculation and self.scheduler.config.settings.speculation):
            assert usage.drafted_tokens == 0

    def _assert_scores(self, sequence_id: int) -> None:
        """What was asked about prompt and tokens, likewise."""
        sequence, size = self.sequences[sequence_id], self.info.vocab_size
        request, (first, *others) = sequence.request, self.events[sequence_id]
        assert all(event.prompt is None for event in others)
        assert (first.prompt is not None) == (request.scores_prompt and sequence.index == 0)
        ids = request.prompt_ids
        if first.prompt is not None:
            wanted = [fake_prompt_log_prob(ids[:end], ids[end], size) for end in range(1, len(ids))]
            assert list(first.prompt.log_probs) == (wanted if request.return_prompt_log_probs else [])
            has_top = request.return_prompt_log_probs and request.num_top_log_probs
            assert [len(top.ids) for top in first.prompt.top] == [request.num_top_log_probs] * (
                len(wanted) * bool(has_top)
            )
            best = [int(row.argmax()) for piece in first.prompt.logits for row in piece]
            folds = [fold(ids[: end + 1]) % size for end in range(len(ids))]
            assert best == (folds if request.return_context_logits else [])
        events = self.events[sequence_id]
        answer = self.answers[sequence_id]
        num_top = request.num_top_log_probs
        assert [len(top.ids) for event in events for top in event.top] == [num_top] * (len(answer) * bool(num_top))
        best = [int(row.argmax()) for event in events for row in event.logits]
        folds = [fold([*ids, *answer[:end]]) % size for end in range(len(answer))]
        assert best == (folds if request.return_generation_logits else [])


def full_output(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt :].tolist()


def answer_alone(request: GenerateRequest, index: int, info: RunnerInfo) -> tuple[list[int], FinishReason]:
    """The answer in the plainest code: one token after the other, every rule as a scan."""
    params, guide = request.sampling, request.guide
    assert guide is None or isinstance(guide, Slots)
    words = [tuple(word) for word in request.stop_ids] + ([] if request.end_id is None else [(request.end_id,)])
    output: list[int] = []
    while True:
        known = list(request.prompt_ids) + output
        banned = {word[-1] for word in request.bad_ids if tuple(known[len(known) - len(word) + 1 :]) == word[:-1]}
        if len(output) < params.min_tokens:
            banned |= {word[0] for word in words if len(word) == 1}
        drawn = (fold(known) + (0 if params.is_greedy else params.seed + index)) % info.vocab_size
        allowed = [(drawn + step) % info.vocab_size for step in range(info.vocab_size)]
        if guide is not None:
            end_ids = [word[0] for word in words if len(word) == 1]
            allowed = [token for token in allowed if token in guide.allowed(len(output), end_ids)] or [drawn]
        output.append(next((token for token in allowed if token not in banned), allowed[0]))
        found = [
            word
            for word in words
            if tuple(output[-len(word) :]) == word and len(output) - len(word) >= params.min_tokens
        ]
        if found:
            longest = max(found, key=len)
            reason = FinishReason.END_ID if longest == (request.end_id,) else FinishReason.STOP_WORDS
            return output[: len(output) - len(longest)], reason
        if guide is not None:
            state = guide.state(len(output) - 1)
            if state is not GuideState.OPEN or output[-1] == request.end_id:
                return output[:-1], FinishReason.LENGTH if state is GuideState.STUCK else FinishReason.END_ID
            if len(output) == params.max_tokens and guide.state(len(output)) is GuideState.COMPLETE:
                return output, FinishReason.END_ID
        if len(output) == params.max_tokens or len(known) + 1 == info.max_seq_len:
            return output, FinishReason.LENGTH
