"""A smaller network guesses: one step of its engine drafts a token for every sequence that wants one.

Its cache is its own. Of a sequence it holds tokens that are known, and behind them drafts; the next draft keeps those
of them that were drawn, and writes over the others. So it is behind only where something else drafted meanwhile, and
after a prompt. What it misses is computed with the next draft, at most `CAUGHT_UP_AT_ONCE` tokens beside a step.

In a network with states, a sequence has two slots: for the state behind what is known, and for that behind drafts. The
second becomes the first if all drafts were drawn; else they are computed again. Prompts are not found in its cache.

A sequence for which there is no block, no state, no place in the step or no room before `max_seq_len` is not drafted
for; nor one with a token that the smaller network does not have. Drafts under a guide are drawn under its masks.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from llmserve.core import Matcher
from llmserve.scheduler.blocks import ROOT_HASH, BlockPool, hash_block
from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import Draftable
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import SchedulerConfig

NUM_STATES = 2  # of a sequence
CAUGHT_UP_AT_ONCE = 256  # tokens, in a step
FORGETTING = 0.9  # what the time of an older step weighs beside the next one
MAX_OUTLIER = 3.0  # times the usual: a step that took longer was interrupted

Step: TypeAlias = Callable[[StepPlan], Seq[int] | None]  # a token for each sample; None: it never drafts again


@dataclass(frozen=True, slots=True)
class TokenIds:
    """How many a model has, and the one that it drafts for: of one tokenizer, and padded as it may be."""

    of_model: int
    drafted_for: int

    @property
    def num_common(self) -> int:
        return min(self.of_model, self.drafted_for)

    def fitted(self, mask: Callable[[], bytes]) -> bytes:
        """A mask for the model."""
        num_bytes = -(-self.of_model // 32) * 4
        return mask()[:num_bytes].ljust(num_bytes, b"\0")


class ModelDrafter(Acceptance):
    """Of one sequence. It expects what the model's drafts were worth to others of late."""

    def __init__(self, others: Acceptance) -> None:
        super().__init__(others.num_rejected, others.num_accepted)
        self.drafted = array("i")  # and not proposed yet
        self._others = others

    def propose(self, sequence: Draftable) -> Seq[int]:
        drafted, self.drafted = self.drafted, array("i")
        return drafted

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        super().learn(num_drafted, num_accepted)
        self._others.learn(num_drafted, num_accepted)


class Wish(NamedTuple):
    """So many tokens, at most, are to be drafted for a sequence."""

    sequence: Sequence
    drafter: ModelDrafter
    num_tokens: int


@dataclass(slots=True)
class _Cached:
    """What the cache holds of a sequence."""

    block_table: array[int] = field(default_factory=lambda: array("i"))
    num_computed: int = 0  # known tokens
    ahead: array[int] = field(default_factory=lambda: array("i"))  # drafts, computed behind them
    states: tuple[int, int] = (0, 0)  # slots for the state behind known tokens, and for that behind drafts
    hashes: list[bytes] = field(default_factory=list)  # of full blocks of known tokens


class DraftModel:
    """Owns the blocks of its engine."""

    def __init__(
        self,
        config: SchedulerConfig,
        step: Step,
        token_ids: TokenIds,
        *,
        prior_cost: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`prior_cost`: of its step, as a part of one of the engine that it drafts for, until both were measured."""
        self._config = config
        self._step = step
        self._token_ids = token_ids
        self._prior_cost = prior_cost
        self._clock = clock
        self._seconds = 0.0  # of a step that drafts, of late; 0: not known yet
        self._acceptance = Acceptance(num_rejected=1.0)  # of all sequences
        self._cached: dict[int, _Cached] = {}  # by sequence id
        self._guided: dict[int, Matcher] = {}  # likewise: guides that have seen what is drafted
        self.pool = BlockPool(config.num_blocks)
        self.states = BlockPool(config.num_states)

    def drafter(self) -> ModelDrafter:
        return ModelDrafter(self._acceptance)

    def cost(self, num_sequences: int, base_seconds: float) -> float:
        """Of a drafted token, where a step drafts for so many, as a part of `base_seconds`; 0: that is not known."""
        is_known = self._seconds > 0 and base_seconds > 0
        return (self._seconds / base_seconds if is_known else self._prior_cost) / num_sequences

    def draft(self, wishes: Seq[Wish]) -> None:
        """Its drafters propose what comes of it."""
        chunks: list[Chunk] = []
        open_wishes: list[Wish] = []
        self._guided.clear()
        num_left = min(self._config.max_num_tokens, CAUGHT_UP_AT_ONCE)
        for wish in self._fitting(wishes):
            if len(chunks) < self._config.max_batch_size and (chunk := self._first_chunk(wish, num_left)) is not None:
                chunks.append(chunk)
                num_left -= len(chunk.token_ids)
                open_wishes += [wish] if chunk.sample else []
        tokens = self._tokens(chunks)
        if tokens is not None:
            self._advance(chunks, wishes)
        while tokens:
            chunks, open_wishes = self._following(open_wishes, tokens)
            tokens = self._tokens(chunks)

    def release(self, sequence: Sequence) -> None:
        """It has ended, or gives way."""
        if (cached := self._cached.pop(sequence.id, None)) is not None:
            self.pool.release(cached.block_table)
            self.states.release(cached.states if self._config.num_states else ())

    def check_integrity(self, running: Collection[int]) -> None:
        assert self._cached.keys() <= set(running), "a draft cache belongs to nobody"
        self.pool.check_integrity(cached.block_table for cached in self._cached.values())
        self.states.check_integrity(cached.states for cached in self._cached.values() if self._config.num_states)

    def _fitting(self, wishes: Seq[Wish]) -> list[Wish]:
        """Cut to the sequence's longest."""
        room = self._config.max_seq_len
        cut = (Wish(one.sequence, one.drafter, min(one.num_tokens, room - one.sequence.num_tokens)) for one in wishes)
        return [wish for wish in cut if wish.num_tokens > 0]

    def _first_chunk(self, wish: Wish, num_left: int) -> Chunk | None:
        """Known tokens that are not computed yet; with all of them comes the first sample. None: there is no room."""
        sequence, token_ids = wish.sequence, wish.sequence.token_ids
        cached = self._cached.get(sequence.id) or self._begin(sequence)
        if cached is None:
            return None
        self._settle(cached, sequence)
        start = cached.num_computed
        end = min(len(token_ids), start + num_left)
        is_known = max(token_ids[start:end], default=0) < self._token_ids.num_common
        if end == start or not is_known or not self._grow(cached, end + wish.num_tokens - 1):
            return None
        sample = self._sample(wish) if end == len(token_ids) else None
        own, _ = cached.states
        return Chunk(sequence.id, token_ids[start:end], start, cached.block_table[:], sample, states=(own, own))

    def _begin(self, sequence: Sequence) -> _Cached | None:
        """With what others have computed of its tokens. None: there is no state for it."""
        cached, size = _Cached(), self._config.block_size
        if self._config.num_states:
            if self.states.num_free < NUM_STATES:
                return None
            before, behind = self.states.allocate(NUM_STATES)
            cached.states = before, behind
        else:
            num_known = (sequence.num_tokens - 1) // size
            cached.block_table = array("i", self.pool.match(self._hashes(cached, sequence, num_known)))
            cached.num_computed = len(cached.block_table) * size
            self.pool.acquire(cached.block_table)
        self._cached[sequence.id] = cached
        return cached

    def _settle(self, cached: _Cached, sequence: Sequence) -> None:
        """What of its cache is right, now that more is known."""
        ahead, start, num_before = cached.ahead, cached.num_computed, sequence.num_tokens - 1
        cached.ahead = array("i")
        pairs = zip(ahead, sequence.token_ids[start:num_before], strict=False)
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._config.num_states:
            if num_right < len(ahead):
                return
            before, behind = cached.states
            cached.states = (behind, before) if ahead else (before, behind)
        cached.num_computed = min(start + num_right, num_before)

    def _grow(self, cached: _Cached, num_tokens: int) -> bool:
        """Blocks for so many tokens; False where there are not enough."""
        num_missing = max(0, self._config.num_blocks_for(num_tokens) - len(cached.block_table))
        if num_missing > self.pool.num_free:
            return False
        cached.block_table.extend(self.pool.allocate(num_missing))
        return True

    def _following(self, wishes: Seq[Wish], tokens: Seq[int]) -> tuple[list[Chunk], list[Wish]]:
        """Of each sequence that wants more than the token that it has just got."""
        chunks, open_wishes = [], []
        for wish, token in zip(wishes, tokens, strict=True):
            sequence, drafted = wish.sequence, wish.drafter.drafted
            if token >= self._token_ids.num_common:
                continue
            drafted.append(token)
            if len(drafted) == wish.num_tokens or token in sequence.stop_words.single_ids:
                continue
            if (matcher := self._guided.get(sequence.id, sequence.matcher)) is not None:
                self._guided[sequence.id] = matcher = matcher.fork()
                matcher.advance(token)
            cached = self._cached[sequence.id]
            cached.ahead.append(token)
            place = cached.num_computed + len(cached.ahead) - 1
            before, behind = cached.states
            chunk = Chunk(
                sequence.id, array("i", [token]), place, cached.block_table[:], self._sample(wish),
                states=(before if len(cached.ahead) == 1 else behind, behind),
            )  # fmt: skip
            chunks.append(chunk)
            open_wishes.append(wish)
        return chunks, open_wishes

    def _sample(self, wish: Wish) -> SampleRequest:
        """As the engine itself will draw: with the same draw, two networks that agree draw the same token."""
        sequence, request = wish.sequence, wish.sequence.request
        ahead = wish.drafter.drafted
        needs_history = request.sampling.has_penalties
        matcher, num_ids = self._guided.get(sequence.id, sequence.matcher), self._token_ids.num_common
        mask = None if matcher is None else partial(matcher.mask, sequence.stop_words.single_ids)
        return SampleRequest(
            params=request.sampling,
            stream=sequence.index,
            position=sequence.num_tokens + len(ahead),
            history=sequence.token_ids + ahead if needs_history else (),
            num_prompt=sequence.num_prompt if needs_history else 0,
            bias=[(token, bias) for token, bias in request.embedding_bias if token < num_ids],
            mask=None if mask is None else partial(self._token_ids.fitted, mask),
        )

    def _tokens(self, chunks: Seq[Chunk]) -> Seq[int] | None:
        if not chunks:
            return None
        plan = StepPlan(tuple(chunks))
        started = self._clock()
        tokens = self._step(plan)
        if plan.num_tokens <= 2 * len(chunks):  # no prompt is in it
            seconds = self._clock() - started
            usual = self._seconds or seconds
            self._seconds = FORGETTING * usual + (1 - FORGETTING) * min(seconds, MAX_OUTLIER * usual)
        return tokens

    def _advance(self, chunks: Seq[Chunk], wishes: Seq[Wish]) -> None:
        """They have been computed. Others may share the blocks that they fill."""
        sequences, size = {wish.sequence.id: wish.sequence for wish in wishes}, self._config.block_size
        for chunk in chunks:
            sequence, cached = sequences[chunk.sequence_id], self._cached[chunk.sequence_id]
            cached.num_computed = chunk.end
            if self._config.num_states:
                continue
            hashes = self._hashes(cached, sequence, chunk.end // size)
            for index in range(chunk.start // size, chunk.end // size):
                token_ids = sequence.token_ids[index * size : (index + 1) * size]
                parent = hashes[index - 1] if index else ROOT_HASH
                self.pool.register(cached.block_table[index], hashes[index], parent, token_ids)

    def _hashes(self, cached: _Cached, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Of its first blocks. An adapter is not in them: the model drafts without."""
        hashes, size = cached.hashes, self._config.block_size
        while len(hashes) < num_blocks:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(hash_block(parent, sequence.token_ids[start : start + size]))
        return hashes[:num_blocks]
