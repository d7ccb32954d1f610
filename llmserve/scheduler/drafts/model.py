"""Drafts of a smaller network: each step of its engine drafts one token for every sequence that wants one.

It has its own KV cache, which contains a sequence's known tokens and drafts after them. The next draft keeps accepted
drafts and overwrites the others. So the cache is incomplete only after a prompt, or if another drafter was used.
Missing tokens are computed with the next draft, at most `CAUGHT_UP_AT_ONCE` tokens per step.

In a network with states, a sequence has two slots: for the state after known tokens, and for the state after drafts. If
all drafts are accepted, the slots are swapped; otherwise accepted drafts are computed again. Prompts are not reused.

A draft layer (multi-token prediction) reads token n + 1 and the hidden row of token n, which the engine's head has
read. So its cache begins at the second token, or later if the engine has reused a prefix and the model could not. Rows
of a prompt are read at once, others with the next draft. After known tokens it reads its own rows, so that part of its
cache is never kept.

A sequence gets no draft if there is no block, no state, no place in the step or no room before `max_seq_len`, or if it
has a token that is not in the smaller network's vocabulary. With a guide, drafts are sampled under its masks.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import numpy as np

from llmserve.core import Matcher
from llmserve.scheduler.blocks import ROOT_HASH, BlockPool, hash_block
from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.cached import Cached
from llmserve.scheduler.drafts.confidence import Confidence
from llmserve.scheduler.drafts.model_drafter import ModelDrafter, Wish
from llmserve.scheduler.drafts.pending import MAX_PENDING, PendingRows
from llmserve.scheduler.drafts.token_ids import TokenIds
from llmserve.scheduler.plan import Chunk, HiddenRows, SampleRequest, StepPlan
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import SchedulerConfig
from llmserve.scheduler.step_costs import MAX_ERROR
from llmserve.scheduler.windows import WindowedBlocks

NUM_STATES = 2  # per sequence
CAUGHT_UP_AT_ONCE = 256  # tokens per step
FORGETTING = 0.9  # weight of a step's time, relative to the next one
PRIOR_REJECTED, PRIOR_ACCEPTED = 1.0, 3.0  # drafts and tokens, before the first one is verified


class Drawn(NamedTuple):
    tokens: Seq[int]  # one per sample
    log_probs: Seq[float]  # one per sample
    hidden: HiddenRows | None = None  # one row per token of the step, if the model reads hidden rows


Step: TypeAlias = Callable[[StepPlan], Drawn | None]  # None: the model failed and drafts no more


class DraftModel:
    """Drafts with a smaller engine, and owns that engine's blocks and states."""

    def __init__(
        self,
        config: SchedulerConfig,
        step: Step,
        token_ids: TokenIds,
        *,
        prior_cost: float,
        reads_hidden: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`prior_cost`: time of its step, as a fraction of the main engine's, until both have been measured."""
        self._config = config
        self._step = step
        self._token_ids = token_ids
        self._prior_cost = prior_cost
        self._reads_hidden = reads_hidden
        self._clock = clock
        self._seconds = 0.0  # recent time of a drafting step, with its planning; 0: unknown
        self._began = 0.0  # when its planning began
        self._acceptance = Acceptance(PRIOR_REJECTED, PRIOR_ACCEPTED)  # of all sequences
        self._confidence = Confidence()  # of all sequences
        self._cached: dict[int, Cached] = {}  # by sequence id
        self._guided: dict[int, Matcher] = {}  # by sequence id: guides advanced by the drafts
        self.pool = BlockPool(config.num_blocks)
        self.windows = WindowedBlocks(config, self.pool)
        self.states = BlockPool(config.num_states)

    def drafter(self) -> ModelDrafter:
        return ModelDrafter(self._acceptance, self._confidence)

    def rest(self) -> None:
        """Call it if no sequence is worth a draft, so that new sequences try again some time."""
        if self._acceptance.num_rejected > PRIOR_REJECTED:
            self._acceptance.recover()

    def cost(self, num_sequences: int, step_seconds: float) -> float:
        """Cost of a drafted token, if a step drafts for `num_sequences`, as a part of `step_seconds` (0: unknown)."""
        is_known = self._seconds > 0 and step_seconds > 0
        return (self._seconds / step_seconds if is_known else self._prior_cost) / num_sequences

    def draft(self, wishes: Seq[Wish], threshold_of: Callable[[int], float]) -> None:
        """Fill the wishes' drafters. `threshold_of`: the least probability, by the number of sequences in a step."""
        self._began = self._clock()
        chunks: list[Chunk] = []
        open_wishes: list[Wish] = []
        self._guided.clear()
        num_left = min(self._config.max_num_tokens, CAUGHT_UP_AT_ONCE)
        for wish in self._fitting(wishes):
            if len(chunks) < self._config.max_batch_size and (chunk := self._first_chunk(wish, num_left)) is not None:
                chunks.append(chunk)
                num_left -= len(chunk.token_ids)
                wish.drafter.begin()
                open_wishes += [wish] if chunk.sample else []
        drawn = self._drawn(chunks, self._rows_of(chunks))
        if drawn is not None:
            self._advance(chunks, (wish.sequence for wish in wishes))
        while drawn and drawn.tokens:
            last = np.cumsum([len(chunk.token_ids) for chunk in chunks]) - 1
            sampled = [index for index, chunk in enumerate(chunks) if chunk.sample]
            chunks, open_wishes, places = self._following(open_wishes, drawn, threshold_of)
            rows = None if drawn.hidden is None else drawn.hidden[last[sampled][places]]
            drawn = self._drawn(chunks, rows)

    def keep(self, plan: StepPlan, hidden: HiddenRows, running: Mapping[int, Sequence]) -> None:
        """Keep the hidden rows of a step of the main engine. Call it before the step is committed."""
        end, behind = 0, []
        for chunk in plan.chunks:
            begin, end = end, end + len(chunk.token_ids)
            sequence = running.get(chunk.sequence_id)
            if sequence is None or not any(isinstance(drafter, ModelDrafter) for drafter in sequence.drafters):
                continue
            if sequence.num_tokens >= self._config.max_seq_len:  # it gets no more drafts
                self.release(sequence)
                continue
            cached = self._cached.get(sequence.id)
            if cached is None or cached.rows is None:
                cached = self._begin_behind(sequence, chunk.start)
            assert cached.rows is not None
            cached.rows.cut(sequence.num_tokens - 1)
            cached.rows.add(hidden[begin:end], chunk.start)
            if chunk.is_context or len(cached.rows) > MAX_PENDING:
                behind.append(sequence)
        self._catch_up(behind)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended or was preempted."""
        if (cached := self._cached.pop(sequence.id, None)) is not None:
            self.pool.release(cached.block_table)
            self.windows.release(cached)
            self.states.release(cached.states if self._config.num_states else ())

    def check_integrity(self, running: Collection[int]) -> None:
        assert self._cached.keys() <= set(running), "a draft cache belongs to nobody"
        self.windows.check_integrity(self._cached.values())
        self.pool.check_integrity(map(self.windows.owned, self._cached.values()))
        self.states.check_integrity(cached.states for cached in self._cached.values() if self._config.num_states)

    def _fitting(self, wishes: Seq[Wish]) -> list[Wish]:
        """The wishes, limited by `max_seq_len`."""
        room = self._config.max_seq_len
        cut = (Wish(one.sequence, one.drafter, min(one.num_tokens, room - one.sequence.num_tokens)) for one in wishes)
        return [wish for wish in cut if wish.num_tokens > 0]

    def _first_chunk(self, wish: Wish, num_left: int) -> Chunk | None:
        """A chunk of known tokens that are not computed yet, with a sample if these are all. None: there is no room."""
        sequence = wish.sequence
        cached = self._cached.get(sequence.id) or (None if self._reads_hidden else self._begin(sequence))
        if cached is None:
            return None
        self._settle(cached, sequence)
        chunk = self._known_chunk(cached, sequence, num_left, wish.num_tokens - 1)
        if chunk is None or chunk.end < sequence.num_tokens - cached.num_skipped:
            return chunk
        return replace(chunk, sample=self._sample(wish))

    def _known_chunk(self, cached: Cached, sequence: Sequence, num_left: int, num_more: int) -> Chunk | None:
        """`num_more`: number of additional tokens to allocate blocks for."""
        start, skipped = cached.num_computed_tokens, cached.num_skipped
        end = min(cached.num_known(sequence), start + num_left)
        token_ids = sequence.token_ids[skipped + start : skipped + end]
        is_known = max(token_ids, default=0) < self._token_ids.num_common
        if end <= start or not is_known or not self._grow(cached, end + num_more):
            return None
        own, _ = cached.states
        return Chunk(
            sequence.id, token_ids, start, cached.block_table[:], states=(own, own), windowed=cached.copied_windowed()
        )

    def _begin_behind(self, sequence: Sequence, start: int) -> Cached:
        """Start a cache for rows from `start` on: after reused blocks of the tokens before, or without these tokens."""
        self.release(sequence)
        cached = self._begin(sequence)
        assert cached is not None, "a layer for drafts has no states"
        if cached.num_computed_tokens < start:
            self.release(sequence)
            self._cached[sequence.id] = cached = Cached(sequence.max_num_cached, start + 1)
            self.windows.start(cached, ())
        cached.rows = PendingRows(max(start, cached.num_computed_tokens))
        return cached

    def _catch_up(self, sequences: list[Sequence]) -> None:
        """Let the model read pending rows of known tokens."""
        while sequences:
            num_left, behind = self._config.max_num_tokens, []
            chunks: list[Chunk] = []
            for sequence in sequences:
                cached = self._cached[sequence.id]
                cached.ahead = array("i")
                if not num_left or len(chunks) == self._config.max_batch_size:
                    behind.append(sequence)
                elif (chunk := self._known_chunk(cached, sequence, num_left, 0)) is not None:
                    chunks.append(chunk)
                    num_left -= len(chunk.token_ids)
                    behind += [sequence] if chunk.end < cached.num_known(sequence) else []
                elif len(cached.rows or ()) > MAX_PENDING:  # there are no blocks for it
                    self.release(sequence)
            if not chunks:
                return
            if self._step(StepPlan(tuple(chunks), self._rows_of(chunks))) is None:
                for sequence in sequences:  # otherwise their rows would accumulate
                    self.release(sequence)
                return
            self._advance(chunks, sequences)
            sequences = behind

    def _rows_of(self, chunks: Seq[Chunk]) -> HiddenRows | None:
        """The pending rows of these chunks' tokens."""
        rows = ((chunk, self._cached[chunk.sequence_id].rows) for chunk in chunks)
        found = [pending.first(len(chunk.token_ids)) for chunk, pending in rows if pending is not None]
        return np.concatenate(found) if found else None

    def _begin(self, sequence: Sequence) -> Cached | None:
        """Start a cache with the blocks that can be reused. None: no state slot is free."""
        cached, size = Cached(sequence.max_num_cached, int(self._reads_hidden)), self._config.block_size
        hashes: Seq[bytes] = ()
        if self._config.num_states:
            if self.states.num_free < NUM_STATES:
                return None
            before, behind = self.states.allocate(NUM_STATES)
            cached.states = before, behind
        else:
            hashes = self._hashes(cached, sequence, (sequence.num_tokens - 1) // size)
            blocks = self.pool.match(hashes)
            hashes = hashes[: self.windows.longest(hashes[: len(blocks)])]
            cached.block_table = array("i", blocks[: len(hashes)])
            cached.num_computed_tokens = len(hashes) * size
            self.pool.acquire(cached.block_table)
        self.windows.start(cached, hashes)
        self._cached[sequence.id] = cached
        return cached

    def _settle(self, cached: Cached, sequence: Sequence) -> None:
        """Keep the accepted drafts in its cache, and drop the others."""
        ahead, start, num_before = cached.ahead, cached.num_computed_tokens, sequence.num_tokens - 1
        cached.ahead = array("i")
        if cached.rows is not None:
            return
        pairs = zip(ahead, sequence.token_ids[start:num_before], strict=False)
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._config.num_states:
            if num_right < len(ahead):
                return
            before, behind = cached.states
            cached.states = (behind, before) if ahead else (before, behind)
        cached.num_computed_tokens = min(start + num_right, num_before)
        self.windows.advance(cached)

    def _grow(self, cached: Cached, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` tokens. False if there are not enough."""
        num_blocks = self._config.num_blocks_for(num_tokens)
        num_missing = max(0, num_blocks - len(cached.block_table))
        if num_missing + self.windows.num_missing(cached, num_blocks) > self.pool.num_free:
            return False
        cached.block_table.extend(self.pool.allocate(num_missing))
        self.windows.prepare(cached, num_tokens - cached.num_computed_tokens)
        return True

    def _following(
        self, wishes: Seq[Wish], drawn: Drawn, threshold_of: Callable[[int], float]
    ) -> tuple[list[Chunk], list[Wish], list[int]]:
        """Chunks for the sequences that want another token after the one just drawn; their wishes and indexes."""
        places = []
        tokens = self._token_ids.drafted(drawn.tokens)
        for index, (wish, token, log_prob) in enumerate(zip(wishes, tokens, drawn.log_probs, strict=True)):
            if token < self._token_ids.num_common:
                wish.drafter.add(token, log_prob)
                if len(wish.drafter.drafted) < wish.num_tokens and token not in wish.sequence.stop_words.single_ids:
                    places.append(index)
        for _ in range(2):  # the fewer sequences are left, the more the step costs each
            threshold = threshold_of(len(places))
            places = [index for index in places if wishes[index].drafter.goes_on(threshold)]
        chunks, open_wishes = [], [wishes[index] for index in places]
        for wish in open_wishes:
            sequence, token = wish.sequence, wish.drafter.drafted[-1]
            if (matcher := self._guided.get(sequence.id, sequence.matcher)) is not None:
                self._guided[sequence.id] = matcher = matcher.fork()
                matcher.advance(token)
            cached = self._cached[sequence.id]
            cached.ahead.append(token)
            place = cached.num_computed_tokens + len(cached.ahead) - 1
            before, behind = cached.states
            chunk = Chunk(
                sequence.id, array("i", [token]), place, cached.block_table[:], self._sample(wish),
                states=(before if len(cached.ahead) == 1 else behind, behind), windowed=cached.copied_windowed(),
            )  # fmt: skip
            chunks.append(chunk)
        return chunks, open_wishes, places

    def _sample(self, wish: Wish) -> SampleRequest:
        """Sample like the main engine: with equal random numbers, networks that agree sample the same token."""
        sequence, request, ids = wish.sequence, wish.sequence.request, self._token_ids
        ahead, num_prompt = wish.drafter.drafted, sequence.num_prompt
        matcher = self._guided.get(sequence.id, sequence.matcher)
        mask = None if matcher is None else partial(matcher.mask, sequence.stop_words.single_ids)
        prompt, output = array("i"), array("i")
        if request.sampling.has_penalties:
            prompt = ids.chosen(sequence.token_ids[:num_prompt])
            output = ids.chosen(sequence.token_ids[num_prompt:] + ahead)
        return SampleRequest(
            params=request.sampling,
            stream=sequence.index,
            position=sequence.num_tokens + len(ahead),
            history=prompt + output,
            num_prompt=len(prompt),
            bias=ids.biased(request.embedding_bias),
            mask=None if mask is None else partial(ids.fitted, mask),
            log_prob=True,
        )

    def _drawn(self, chunks: Seq[Chunk], hidden: HiddenRows | None) -> Drawn | None:
        if not chunks:
            return None
        plan = StepPlan(tuple(chunks), hidden)
        drawn = self._step(plan)
        seconds, self._began = (now := self._clock()) - self._began, now
        if plan.num_tokens <= 2 * len(chunks):  # without a prompt
            usual = self._seconds or seconds
            self._seconds = FORGETTING * usual + (1 - FORGETTING) * min(seconds, (1 + MAX_ERROR) * usual)
        return drawn

    def _advance(self, chunks: Seq[Chunk], of: Iterable[Sequence]) -> None:
        """Record that chunks are computed. Blocks that they fill can be reused if the cache has all tokens before."""
        sequences = {sequence.id: sequence for sequence in of}
        for chunk in chunks:
            sequence, cached = sequences[chunk.sequence_id], self._cached[chunk.sequence_id]
            cached.num_computed_tokens = chunk.end
            if cached.rows is not None:
                cached.rows.read(len(chunk.token_ids))
            if not (self._config.num_states or cached.num_skipped > self._reads_hidden):
                self._register(chunk, sequence, cached)
            self.windows.advance(cached)

    def _register(self, chunk: Chunk, sequence: Sequence, cached: Cached) -> None:
        size = self._config.block_size
        hashes = self._hashes(cached, sequence, chunk.end // size)
        for index in range(chunk.start // size, chunk.end // size):
            parent = hashes[index - 1] if index else self._root_hash(sequence)
            self.pool.register(cached.block_table[index], hashes[index], parent, self._block(sequence, index))
            self.windows.register(cached, index, hashes[index])

    def _hashes(self, cached: Cached, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Hashes of its first `num_blocks` blocks."""
        hashes = cached.hashes
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else self._root_hash(sequence)
            hashes.append(hash_block(parent, self._block(sequence, len(hashes))))
        return hashes[:num_blocks]

    def _root_hash(self, sequence: Sequence) -> bytes:
        """Models draft without adapters. But the rows that they read depend on the adapter and on the first token."""
        return hash_block(sequence.cache_root, sequence.token_ids[:1]) if self._reads_hidden else ROOT_HASH

    def _block(self, sequence: Sequence, index: int) -> array[int]:
        """The tokens of block `index`."""
        size = self._config.block_size
        begin = index * size + self._reads_hidden
        return sequence.token_ids[begin : begin + size]
