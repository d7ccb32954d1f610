"""One answer while it is generated: its known tokens, how many of them are computed, and their blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial

from llmserve.core import (
    FinishReason,
    GenerateRequest,
    GuideState,
    Logits,
    Matcher,
    PromptScores,
    Tenant,
    TokenEvent,
    TopTokens,
    Usage,
)
from llmserve.scheduler.blocks import ROOT_HASH, hash_block, root_hash
from llmserve.scheduler.constraints import DraftedGuide
from llmserve.scheduler.drafts.drafter import Drafter
from llmserve.scheduler.plan import NO_SCORES, UNSEEN, Chunk, ChunkScores, Constraint, SampleRequest
from llmserve.scheduler.words import BadWords, StopWords


@dataclass(slots=True, eq=False)
class Sequence:
    """`id` increases with arrival. After a sequence has been added, only the scheduler changes it."""

    id: int
    request: GenerateRequest
    max_tokens: int  # the request's, limited by `max_seq_len`
    stop_words: StopWords  # the end token is one of them
    bad_words: BadWords
    index: int = 0
    leader: Sequence | None = None  # the request's first sequence, which computes the prompt for all of them
    matcher: Matcher | None = None  # of the request's guide, advanced by the output
    cache_root: bytes = ROOT_HASH
    adapter: int = 0  # the adapter's slot in the runner
    arrival_ns: int = 0  # when the request arrived, before any queue

    token_ids: array[int] = field(init=False)  # prompt, then output; an array because it is fast to copy
    num_computed_tokens: int = 0
    block_table: array[int] = field(default_factory=lambda: array("i"))
    windowed: tuple[array[int], ...] = ()  # block tables of layers with a window, if they have their own
    num_given_back: int = 0  # released blocks at the beginning of each of these tables
    num_in_known_blocks: int = 0  # tokens in blocks that were known when it started, with or without a known state
    kept_state: tuple[int, int] = (0, 0)  # `Chunk.kept_state` of its next chunk
    states: tuple[int, int] = (0, 0)  # slots that its next chunk reads and writes, if the network has states
    drafted_state: int | None = None  # the slot that a chunk with drafts writes instead of the second
    num_again: int = 0  # accepted drafts whose state was lost; they are computed again
    finish_reason: FinishReason | None = None
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_cached_tokens: int = 0  # reused tokens when it first started
    num_preemptions: int = 0
    num_displaced: int = 0  # preemptions for another tenant
    num_emitted: int = 0
    cum_log_prob: float = 0.0
    log_probs: list[float] = field(default_factory=list)  # of the output, if requested; the next two, too
    top: list[TopTokens] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    num_prompt_scored: int = 0  # prompt tokens whose scores are complete
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top: list[TopTokens] = field(default_factory=list)
    prompt_logits: list[Logits] = field(default_factory=list)  # in pieces [tokens, vocabulary]
    num_drafted: int = 0
    num_accepted: int = 0
    drafters: tuple[Drafter, ...] = ()  # in order of preference
    drafted_by: Drafter | None = None  # drafter of the current step's draft
    drafted_guide: DraftedGuide | None = None  # constraints of the current step's draft
    _expects: bool = False  # the last token is UNSEEN
    _block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = array("i", self.request.prompt_ids)

    @property
    def tenant(self) -> Tenant:
        return self.request.tenant

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Number of known tokens that are not computed. Each step makes it zero, and sampling makes it one again."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is pending, and accepted drafts that must be computed again."""
        return self.num_pending == 1 + self.num_again

    @property
    def is_complete(self) -> bool:
        """Whether it has all its tokens, even if the last one has not been seen yet."""
        return self.num_output >= self.max_tokens

    @property
    def is_foreseeable(self) -> bool:
        """Whether its next step can be planned before its last token has been seen."""
        words = self.request.bad_ids
        return not (words or self.request.sampling.has_penalties or self.matcher is not None or self.scores_prompt)

    @property
    def num_draftable(self) -> int:
        """Number of tokens that may be drafted now."""
        return 0 if self._expects or self.scores_prompt else self.max_num_cached - self.num_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether scores of the prompt are missing. A request's first sequence computes them for all."""
        return self.request.scores_prompt and self.index == 0 and self.num_prompt_scored < self.num_prompt

    @property
    def max_num_found(self) -> int:
        """Number of tokens that may come from the cache. The others are computed, because their logits are needed."""
        return self.num_prompt_scored if self.scores_prompt else self.num_tokens - 1

    @property
    def max_num_cached(self) -> int:
        """The most tokens that it can have in the cache. The last sampled token is never computed."""
        return self.num_prompt + self.max_tokens - 1

    def block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks, whose tokens must all be known."""
        hashes = self._block_hashes
        while len(hashes) < num_blocks:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else self.cache_root
            hashes.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return hashes[:num_blocks]

    def drafted_chunk(self, drafted: Seq[int]) -> Chunk:
        """A chunk of the pending tokens and a draft."""
        start, ahead = self.num_computed_tokens, array("i", drafted)
        if self.matcher is not None:
            self.drafted_guide = DraftedGuide(self.matcher, self.stop_words.single_ids, drafted)
        sample = self._sample_request()
        *earlier, last = self._constraints(ahead)
        sample = replace(
            sample,
            position=sample.position + len(ahead),
            history=self.token_ids + ahead if sample.history else (),
            banned=last.banned,
            mask=last.mask,
            num_samples=1 + len(ahead),
            earlier=earlier,
        )
        states, kept_state = self.states, (0, 0)
        if self.drafted_state is not None:  # if a draft is wrong, the sequence returns to the state before the drafts
            states, kept_state = (self.states[0], self.drafted_state), (self.states[1], self.num_pending)
        return Chunk(
            sequence_id=self.id,
            token_ids=self.token_ids[start:] + ahead,
            start=start,
            block_table=self.block_table[:],
            windowed=self._windowed(),
            sample=sample,
            states=states,
            adapter=self.adapter,
            kept_state=kept_state,
            num_again=self.num_again,
        )

    def _windowed(self) -> tuple[array[int], ...]:
        return tuple(table[:] for table in self.windowed) if self.windowed else ()

    def _constraints(self, ahead: array[int]) -> Seq[Constraint]:
        """Constraints at each position of a draft and after it; only the last one if there are no constraints."""
        guide, count = self.drafted_guide, len(ahead)
        if guide is None and not self.request.bad_ids and self.num_output >= self.request.sampling.min_tokens:
            return (Constraint(),)
        num_decisive = min(self.bad_words.max_beginning, self.num_tokens)
        recent = self.token_ids[self.num_tokens - num_decisive :] + ahead
        banned = (self._banned_ids(recent[: num_decisive + place], place) for place in range(count + 1))
        masks = (None if guide is None else guide.mask(place) for place in range(count + 1))
        return list(map(Constraint, banned, masks))

    def chunk(self, num_tokens: int) -> Chunk:
        """The next `num_tokens` pending tokens, with a sample if these are all of them."""
        start = self.num_computed_tokens
        if self.scores_prompt:
            return self._scored_chunk(start, start + num_tokens)
        if self.request.pooled:
            return Chunk(
                sequence_id=self.id,
                token_ids=self.token_ids[start : start + num_tokens],
                start=start,
                block_table=self.block_table[:],
                windowed=self._windowed(),
                pooled=num_tokens == self.num_pending,
                second_segment=self.request.second_segment,
                states=self.states,
                adapter=self.adapter,
            )
        return Chunk(
            sequence_id=self.id,
            token_ids=self.token_ids[start : start + num_tokens],
            start=start,
            block_table=self.block_table[:],
            windowed=self._windowed(),
            sample=self._sample_request() if num_tokens == self.num_pending else None,
            states=self.states,
            adapter=self.adapter,
            kept_state=self.kept_state,
            num_again=min(self.num_again, num_tokens),
        )

    def _scored_chunk(self, start: int, end: int) -> Chunk:
        request = self.request
        log_probs = request.return_prompt_log_probs
        return Chunk(
            sequence_id=self.id,
            token_ids=self.token_ids[start:end],
            start=start,
            block_table=self.block_table[:],
            windowed=self._windowed(),
            sample=self._sample_request() if end == self.num_tokens else None,
            return_logits=request.return_context_logits,
            targets=self.token_ids[start + 1 : min(end + 1, self.num_prompt)] if log_probs else (),
            num_top=request.num_top_log_probs if log_probs else 0,
            states=self.states,
            adapter=self.adapter,
            kept_state=self.kept_state,
        )

    def _sample_request(self) -> SampleRequest:
        request = self.request
        needs_history = request.sampling.has_penalties
        return SampleRequest(
            params=request.sampling,
            stream=self.index,
            position=self.num_tokens,
            history=self.token_ids if needs_history else (),
            num_prompt=self.num_prompt if needs_history else 0,
            bias=request.embedding_bias,
            banned=self._banned_ids(self.token_ids),
            mask=None if self.matcher is None else partial(self.matcher.mask, self.stop_words.single_ids),
            log_prob=request.return_log_probs,
            num_top=request.num_top_log_probs,
            logits=request.return_generation_logits,
        )

    def _banned_ids(self, token_ids: array[int], num_ahead: int = 0) -> tuple[int, ...]:
        """Banned tokens after `token_ids`, the last `num_ahead` of which are drafted."""
        banned = self.bad_words.banned_after(token_ids)
        if self.num_output + num_ahead < self.request.sampling.min_tokens:
            banned.update(self.stop_words.single_ids)
        return tuple(sorted(banned)) if banned else ()

    def score_prompt(self, chunk: Chunk, scores: ChunkScores) -> None:
        """Add a chunk's scores of the prompt. After a preemption, scores of some tokens are already known."""
        end = min(chunk.start + len(chunk.token_ids), self.num_prompt)
        if not self.scores_prompt or end <= self.num_prompt_scored:
            return
        first = self.num_prompt_scored - chunk.start
        self.prompt_log_probs += scores.log_probs[first:]
        self.prompt_top += scores.top[first:]
        if self.request.return_context_logits and scores.logits is not None:
            self.prompt_logits.append(scores.logits[first : end - chunk.start])
        self.num_prompt_scored = end

    def expect(self) -> None:
        """Add a placeholder for the next token, which the running step samples."""
        self.token_ids.append(UNSEEN)
        self._expects = True

    def append(self, token: int, log_prob: float, now_ns: int, scores: ChunkScores = NO_SCORES) -> TokenEvent | None:
        """Add a sampled token. Returns the event to send, or None while all new tokens may be part of a stop word."""
        if self._expects:
            self.token_ids[-1] = token
            self._expects = False
        else:
            self.token_ids.append(token)
        if self.request.return_log_probs:
            self.log_probs.append(log_prob)
        if scores.sampled_top:
            self.top += scores.sampled_top
        if self.request.return_generation_logits and scores.logits is not None:
            self.logits.append(scores.logits[-1])
        self.first_token_ns = self.first_token_ns or now_ns
        self.last_token_ns = now_ns
        tail = self._stop_tail()
        num_matched = self.stop_words.num_matched(tail)
        if num_matched:
            is_end_id = num_matched == 1 and token == self.request.end_id
            return self._finish(FinishReason.END_ID if is_end_id else FinishReason.STOP_WORDS, num_matched)
        if self.matcher is not None and (end := self._guided_end(self.matcher, token)) is not None:
            return end
        if self.num_output == self.max_tokens:
            is_complete = self.matcher is not None and self.matcher.is_complete()
            return self._finish(FinishReason.END_ID if is_complete else FinishReason.LENGTH)
        num_ready = self.num_output - self.stop_words.num_begun(tail)
        return self._event(num_ready) if num_ready > self.num_emitted else None

    def pool(self, scores: ChunkScores, now_ns: int) -> TokenEvent:
        """Finish with the pooled output of the whole prompt."""
        assert scores.logits is not None
        self.first_token_ns = self.last_token_ns = now_ns
        return replace(self._finish(FinishReason.LENGTH), logits=(scores.logits[0],))

    def _guided_end(self, matcher: Matcher, token: int) -> TokenEvent | None:
        """The last event if the guide allowed only the end, regardless of `min_tokens`; otherwise advance the guide."""
        if matcher.state is GuideState.OPEN and token != self.request.end_id:
            matcher.advance(token)
            return None
        return self._finish(FinishReason.LENGTH if matcher.state is GuideState.STUCK else FinishReason.END_ID, 1)

    def time_out(self) -> TokenEvent:
        return self._finish(FinishReason.TIMED_OUT)

    def _stop_tail(self) -> tuple[int, ...]:
        """The end of the output that can contain a stop word. Stop words do not count in the first `min_tokens`."""
        first = self.num_prompt + self.request.sampling.min_tokens
        return tuple(self.token_ids[max(first, self.num_tokens - self.stop_words.max_length) :])

    def _finish(self, reason: FinishReason, num_dropped: int = 0) -> TokenEvent:
        self.finish_reason = reason
        return self._event(self.num_output - num_dropped)

    def _event(self, num_ready: int) -> TokenEvent:
        """An event with the output up to token `num_ready` that has not been sent yet."""
        first = self.num_emitted
        tells_usage = first == 0 or self.finish_reason is not None
        self.num_emitted = num_ready
        log_probs = tuple(self.log_probs[first:num_ready])
        self.cum_log_prob += sum(log_probs)
        return TokenEvent(
            token_ids=tuple(self.token_ids[self.num_prompt + first : self.num_prompt + num_ready]),
            log_probs=log_probs,
            cum_log_prob=self.cum_log_prob,
            sequence_index=self.index,
            finish_reason=self.finish_reason,
            usage=self._usage() if tells_usage else None,
            top=tuple(self.top[first:num_ready]),
            logits=tuple(self.logits[first:num_ready]),
            prompt=self._prompt_scores() if first == 0 and self.request.scores_prompt else None,
        )

    def _prompt_scores(self) -> PromptScores | None:
        if self.index != 0 or self.scores_prompt:
            return None
        return PromptScores(tuple(self.prompt_log_probs), tuple(self.prompt_top), tuple(self.prompt_logits))

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached_tokens,
            completion_tokens=self.num_emitted,
            arrival_ns=self.arrival_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            num_preemptions=self.num_preemptions,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
        )


def sequences_for(
    request: GenerateRequest, ids: Iterator[int], *, max_seq_len: int, arrival_ns: int, adapter: int = 0
) -> list[Sequence]:
    """The sequences of a valid request: one for each of its `num_sequences` answers. `adapter`: the adapter's slot in
    the runner."""
    stop_words = StopWords(request.stop_ids + (() if request.end_id is None else ((request.end_id,),)))
    bad_words = BadWords(request.bad_ids)
    max_tokens = request.max_new_tokens(max_seq_len)
    sequences: list[Sequence] = []
    for index in range(request.num_sequences):
        sequence = Sequence(next(ids), request, max_tokens, stop_words, bad_words, index=index, arrival_ns=arrival_ns)
        sequence.adapter, sequence.cache_root = adapter, root_hash(request.adapter)
        sequence.leader = sequences[0] if sequences else None
        sequence.matcher = request.guide.start() if request.guide else None
        sequences.append(sequence)
    return sequences
