"""A runner whose answers can be computed by hand, and an engine over it. Public, for tests of code that uses engines.

`FakeRunner` stores token ids where a real runner stores keys and values. To sample, it reads the whole sequence back
THROUGH the chunk's block table and folds it:

    h = 0;  for every token t of the sequence:  h = (3 * h + t + 1) % 997;  the next token is  h % vocab_size

So a wrong block table, position, prefix hit or swapped sequence gives a wrong number. A runner with states also keeps
h there, and fails if a chunk's state is not that of the tokens before it. If layers with a window have their own
tables, it also stores ids there, and fails if a window is not that of the tokens before it. For example, with a
vocabulary of 997 or more, the prompt (1, 2, 3) is answered with 31, 125, 501, 11:

    token      1   2   3    31   125   501
    h          2   9   31  125   501    11     (the last: 3 * 501 + 501 + 1 = 2005 = 2 * 997 + 11)

It supports the sampling parameters that change which token is correct:

    not greedy      the token is moved on by seed + index of the sequence, so n answers differ
    bias            the token with the largest positive bias wins
    banned, mask    the token is moved on to the next one that is neither banned nor masked; the mask comes first
    log_prob        -(token + 1) / vocab_size, so that the most likely tokens are 0, 1, 2 and so on

    adapter         the token is moved on by a number that its digest gives (`adapter_shift`)

Rows written for one adapter are invalid for another, so a wrong prefix hit gives a wrong number here, too.

A prompt's log-prob tells what was read, too: that of `token` after the tokens before it is that of (h + token) %
vocab_size. Logits are 0, and 1 for the token that h says.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from llmserve.core import Logits, TopTokens
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import EngineInfo, RunnerInfo, StepResult
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.kv_files.block_files import BlockFiles
from llmserve.engine.settings import AdapterLimits
from llmserve.scheduler.plan import Chunk, ChunkScores, SampleRequest, StepPlan
from llmserve.scheduler.settings import SchedulerSettings

KERNELS = "fake"  # as `EngineInfo.kernels`
FAKE_RUNNER_INFO = RunnerInfo(
    vocab_size=1000, block_size=4, num_blocks=256, max_num_tokens=64, max_batch_size=32, max_seq_len=256
)
EMPTY = -1  # content of a cache row that was never written
FOREIGN = 2**20  # times an adapter's shift: what rows of it have beside the token


class FakePacked(NamedTuple):
    shift: int
    num_bytes: int


class FakeRunner:
    """`fail_at_step` makes that step (the first is 0) raise `RuntimeError`; each step takes at least `step_delay_s`."""

    def __init__(
        self, info: RunnerInfo = FAKE_RUNNER_INFO, *, step_delay_s: float = 0.0, fail_at_step: int | None = None
    ) -> None:
        self._info = info
        self._step_delay_s = step_delay_s
        self._fail_at_step = fail_at_step
        self._rows = [EMPTY] * (info.num_blocks * info.block_size)
        self._states = [EMPTY] * info.num_states
        self._shifts = {0: 0}  # of adapters, by slot
        self.num_steps = 0
        self.is_closed = False

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def step(self, plan: StepPlan) -> StepResult:
        assert plan.num_tokens <= self._info.max_num_tokens, "the plan is over the token budget"
        assert len(plan.chunks) <= self._info.max_batch_size, "the plan has too many chunks"
        if self.num_steps == self._fail_at_step:
            raise RuntimeError(f"step {self.num_steps} was told to fail")
        self.num_steps += 1
        time.sleep(self._step_delay_s)
        # Read what came before, then write, then read back: a block shared before it is computed is noticed, and so is
        # a block with two writers.
        known = [self._read(chunk, 0, chunk.start) for chunk in plan.chunks]
        for chunk in plan.chunks:
            assert len(chunk.windowed) == self._info.windowed_layers.num_tables
            for table in (chunk.block_table, *chunk.windowed):
                self._write(chunk, table)
        read = [
            before + self._read(chunk, chunk.start, chunk.start + len(chunk.token_ids))
            for before, chunk in zip(known, plan.chunks, strict=True)
        ]
        self._check_windows(plan, read)
        self._change_states(plan, read)
        vocab_size = self._info.vocab_size
        asked = [
            (ids[:end], sample, self._shifts[chunk.adapter])
            for ids, chunk in zip(read, plan.chunks, strict=True)
            for end, sample in enumerate(chunk.samples, len(ids) - chunk.num_samples + 1)
        ]
        tokens = [fake_sample(ids, sample, vocab_size, shift) for ids, sample, shift in asked]
        log_probs = [
            fake_log_prob(token, vocab_size) if sample.log_prob else 0.0
            for token, (_, sample, _) in zip(tokens, asked, strict=True)
        ]
        scores = {
            index: fake_scores(ids, chunk, vocab_size)
            for index, (ids, chunk) in enumerate(zip(read, plan.chunks, strict=True))
            if chunk.wants_scores
        }
        return StepResult(tokens, log_probs, scores)

    def _check_windows(self, plan: StepPlan, read: Sequence[Sequence[int]]) -> None:
        """Check the window of the first token of each chunk, which reaches back furthest, up to the chunk's end."""
        for chunk, ids in zip(plan.chunks, read, strict=True):
            first = self._info.windowed_layers.first_read(chunk.start)
            for table in chunk.windowed:
                assert self._read(chunk, first, chunk.end, table) == ids[first:], "the window of another sequence"

    def _change_states(self, plan: StepPlan, read: Sequence[Sequence[int]]) -> None:
        """A state is h of all tokens up to it; all states are read before any is written."""
        if not self._states:
            return
        before = [self._states[chunk.states[0]] if chunk.start else 0 for chunk in plan.chunks]
        written = [{chunk.states[1], *chunk.kept_state[: bool(chunk.kept_state[1])]} for chunk in plan.chunks]
        assert sum(map(len, written)) == len(set().union(*written)), "a state has two writers"
        for index, (h, chunk, ids) in enumerate(zip(before, plan.chunks, read, strict=True)):
            others = set().union(*written[:index], *written[index + 1 :])
            assert not chunk.start or chunk.states[0] not in others, "a state is read that another chunk writes"
            kept, num_tokens = chunk.kept_state
            assert num_tokens < len(chunk.token_ids)
            if num_tokens:
                assert kept != chunk.states[1], "a state is kept where the next one is"
                self._states[kept] = fold(chunk.token_ids[:num_tokens], h)
            self._states[chunk.states[1]] = fold(chunk.token_ids, h)
            assert self._states[chunk.states[1]] == fold(ids), "the state of another sequence"

    def read_block(self, block: int) -> bytes:
        """See `BlockRunner`."""
        size = self._info.block_size
        return array("q", self._rows[block * size : (block + 1) * size]).tobytes()

    def write_block(self, block: int, content: bytes) -> None:
        size = self._info.block_size
        self._rows[block * size : (block + 1) * size] = array("q", content)

    def read_state(self, state: int) -> bytes:
        return array("q", self._states[state : state + 1]).tobytes()

    def write_state(self, state: int, content: bytes) -> None:
        [self._states[state]] = array("q", content)

    def packed(self, adapter: SealedAdapter) -> FakePacked:
        """See `AdapterRunner`."""
        adapter.read()
        return FakePacked(adapter_shift(adapter.digest), adapter.manifest.num_bytes)

    def load_adapter(self, slot: int, packed: FakePacked) -> None:
        assert slot > 0
        assert slot not in self._shifts, "the slot is taken"
        self._shifts[slot] = packed.shift

    def unload_adapter(self, slot: int) -> None:
        del self._shifts[slot]

    def close(self) -> None:
        self.is_closed = True

    def _write(self, chunk: Chunk, table: Sequence[int]) -> None:
        size, foreign = self._info.block_size, FOREIGN * self._shifts[chunk.adapter]
        for position, token in enumerate(chunk.token_ids, chunk.start):
            self._rows[table[position // size] * size + position % size] = token + foreign

    def _read(self, chunk: Chunk, start: int, end: int, table: Sequence[int] = ()) -> list[int]:
        """Read from its first table, or from another."""
        size, rows, table = self._info.block_size, [], table or chunk.block_table
        for number in range(start // size, -(-end // size)):
            first = table[number] * size
            rows += self._rows[first : first + size]
        foreign = FOREIGN * self._shifts[chunk.adapter]
        return [row - foreign for row in rows[start % size : start % size + end - start]]


def fold(token_ids: Iterable[int], h: int = 0) -> int:
    """The module docstring's h, starting from its value before these tokens."""
    for token in token_ids:
        h = (3 * h + token + 1) % 997
    return h


def adapter_shift(digest: str) -> int:
    return 1 + int(digest[:4], 16) % 96


def fake_sample(token_ids: Sequence[int], sample: SampleRequest, vocab_size: int, shift: int = 0) -> int:
    """The token after `token_ids`; `shift` is an adapter's."""
    shift += 0 if sample.params.is_greedy else sample.params.seed + sample.stream
    token = (fold(token_ids) + shift) % vocab_size
    best_id, best_bias = max(sample.bias, key=lambda item: item[1], default=(token, 0.0))
    if best_bias > 0:
        token = best_id
    mask = None if sample.mask is None else sample.mask()
    following = [(token + step) % vocab_size for step in range(vocab_size)] if mask or sample.banned else [token]
    allowed = [each for each in following if mask is None or mask[each // 8] >> each % 8 & 1]
    return next((each for each in allowed if each not in sample.banned), allowed[0] if allowed else token)


def fake_answer(
    prompt_ids: Sequence[int], num_tokens: int, vocab_size: int = FAKE_RUNNER_INFO.vocab_size, *, adapter: str = ""
) -> list[int]:
    """The first `num_tokens` tokens of the greedy answer, computed without a scheduler, cache or runner."""
    shift = adapter_shift(adapter) if adapter else 0
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append((fold(token_ids) + shift) % vocab_size)
    return token_ids[len(prompt_ids) :]


def fake_log_prob(token: int, vocab_size: int = FAKE_RUNNER_INFO.vocab_size) -> float:
    return -(token + 1) / vocab_size


def fake_top(count: int, vocab_size: int = FAKE_RUNNER_INFO.vocab_size) -> TopTokens:
    return TopTokens(tuple(range(count)), tuple(fake_log_prob(token, vocab_size) for token in range(count)))


def fake_prompt_log_prob(before: Sequence[int], token: int, vocab_size: int = FAKE_RUNNER_INFO.vocab_size) -> float:
    """The log-prob of `token` after the tokens `before`."""
    return fake_log_prob((fold(before) + token) % vocab_size, vocab_size)


def fake_logits(token_ids: Sequence[int], num_rows: int, vocab_size: int) -> Logits:
    """Logits after each of the last `num_rows` tokens."""
    rows = np.zeros((num_rows, vocab_size), np.float32)
    for row in range(num_rows):
        rows[row, fold(token_ids[: len(token_ids) - num_rows + row + 1]) % vocab_size] = 1.0
    return rows


def fake_scores(token_ids: Sequence[int], chunk: Chunk, vocab_size: int) -> ChunkScores:
    """Results that `chunk`, the last part of `token_ids`, requests."""
    sample = chunk.sample
    return ChunkScores(
        log_probs=tuple(
            fake_prompt_log_prob(token_ids[: chunk.start + place + 1], target, vocab_size)
            for place, target in enumerate(chunk.targets)
        ),
        top=(fake_top(chunk.num_top, vocab_size),) * len(chunk.targets) if chunk.num_top else (),
        sampled_top=(fake_top(sample.num_top, vocab_size),) * chunk.num_samples if sample and sample.num_top else (),
        logits=fake_logits(token_ids, chunk.num_logits, vocab_size) if chunk.num_logits else None,
    )


def fake_engine(
    runner_info: RunnerInfo = FAKE_RUNNER_INFO,
    settings: SchedulerSettings | None = None,
    *,
    step_delay_s: float = 0.0,
    fail_at_step: int | None = None,
    files: BlockFiles | None = None,
    adapter_limits: AdapterLimits | None = None,
) -> InflightEngine:
    """A real `InflightEngine` over a `FakeRunner`."""
    info = EngineInfo(
        name="fake", target="fake", architecture="FakeForCausalLM", dtype="int", digest="0" * 64, kernels=KERNELS,
        vocab_size=runner_info.vocab_size, max_seq_len=runner_info.max_seq_len,
        max_batch_size=runner_info.max_batch_size, max_num_tokens=runner_info.max_num_tokens,
    )  # fmt: skip
    runner = FakeRunner(runner_info, step_delay_s=step_delay_s, fail_at_step=fail_at_step)
    return InflightEngine(runner, info, settings, files=files, adapter_limits=adapter_limits)
