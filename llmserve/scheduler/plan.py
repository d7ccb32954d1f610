"""The plan of one step, which the scheduler passes to a runner.

A step is a list of chunks; a chunk is a run of consecutive tokens of one sequence. Prefill, chunked prefill and decode
are the same thing with different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from llmserve.core import Logits, SamplingParams, TopTokens
from llmserve.errors import Unsupported, raise_problems

# [tokens, width]: inputs of a network's head. The same type as `Logits`, which are rows of floats, too.
HiddenRows: TypeAlias = Logits
UNSEEN = -1  # the last token of a chunk, if the previous step has not returned it yet


@dataclass(frozen=True, slots=True)
class Constraint:
    """The allowed tokens at one position."""

    banned: Sequence[int] = ()
    mask: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """How to sample a token after each of a chunk's last `num_samples` tokens. It contains all that sampling needs.

    The fields describe the last sample. An earlier sample is drawn as if the chunk ended at its token: `position` and
    `history` end there, and `earlier` has its allowed tokens. The random draw depends on
    `(params.seed, stream, position)` only. So n samples of a chunk equal those of n steps of one token each, whatever
    else is in the batch.
    """

    params: SamplingParams
    stream: int  # index of the sequence within its request (n answers, n streams)
    position: int  # number of tokens in the sequence before the sampled one
    history: Sequence[int] = ()  # prompt ids, then output ids, valid during the step; empty without penalties
    num_prompt: int = 0  # how many of `history` are prompt
    bias: Sequence[tuple[int, float]] = ()  # (token id, added to its logit)
    banned: Sequence[int] = ()  # token ids that are not allowed
    # Returns a bit per token id, 1: allowed (`Matcher.mask`). The masks of a chunk are called in order.
    mask: Callable[[], bytes] | None = None
    log_prob: bool = False
    num_top: int = 0  # number of most likely tokens to return with the sampled one
    logits: bool = False  # also return the logits
    num_samples: int = 1  # one after each of the chunk's last tokens
    earlier: Sequence[Constraint] = ()  # for the samples before the last, in order; empty: no constraints

    def before(self, num_tokens: int) -> SampleRequest:
        """The sample that is drawn `num_tokens` tokens before the last one."""
        history = self.history[: len(self.history) - num_tokens]
        num_prompt, position = min(self.num_prompt, len(history)), self.position - num_tokens
        last = Constraint(self.banned, self.mask)
        held = last if not num_tokens else self.earlier[-num_tokens] if self.earlier else Constraint()
        return replace(
            self, position=position, history=history, num_prompt=num_prompt, banned=held.banned, mask=held.mask,
            num_samples=1, earlier=(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """`token_ids` at positions `start .. start+len-1` of one sequence, cached in the blocks of `block_table`.

    Position p lives in block `block_table[p // block_size]`, row `p % block_size`. Everything before `start` is
    already in the cache.
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleRequest | None = None  # None: the prompt continues in a later step
    return_logits: bool = False  # also return logits of every token of this chunk
    targets: Sequence[int] = ()  # the tokens after the chunk's first tokens, whose log-probs to return
    num_top: int = 0  # number of most likely tokens to return for each target
    # If the network has states: slots of the state before `start` and after the last token. The first one is not read
    # at the start of a sequence.
    states: tuple[int, int] = (0, 0)
    # Slot for the state after the first n tokens, and n; n = 0: none. May be the slot that the chunk reads.
    kept_state: tuple[int, int] = (0, 0)
    pooled: bool = False  # return the pooled output of the whole sequence, which ends here, as logits
    second_segment: int = 0  # position of the first token of a second text; 0: there is one text
    adapter: int = 0  # slot of the adapter; 0: none
    num_again: int = 0  # number of first tokens computed again: accepted drafts whose state was lost
    # Block tables of layers with a window, if they have their own; they cover the chunk's end. Entries before the
    # window of its first token are not read.
    windowed: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        """Raises `Unsupported` for samples that no runner can draw. This is the only check."""
        sample = self.sample
        if sample is not None and sample.num_samples != 1:
            place = f"sequence {self.sequence_id}, chunk from position {self.start} on"
            raise_problems(Unsupported, place, list(_sample_problems(sample, len(self.token_ids))))

    @property
    def num_samples(self) -> int:
        return 0 if self.sample is None else self.sample.num_samples

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def is_context(self) -> bool:
        """Whether it computes prompt tokens, or tokens of a preempted sequence."""
        return self.start == 0 or len(self.token_ids) > self.num_again + self.num_samples

    @property
    def drafted(self) -> Sequence[int]:
        """The draft at its end. A drafted token is accepted if the sample before it equals it."""
        return self.token_ids[len(self.token_ids) - self.num_samples + 1 :] if self.num_samples > 1 else ()

    @property
    def samples(self) -> Sequence[SampleRequest]:
        """Its samples, in order."""
        if self.sample is None:
            return ()
        if self.sample.num_samples == 1:
            return (self.sample,)
        return [self.sample.before(num_tokens) for num_tokens in reversed(range(self.sample.num_samples))]

    @property
    def num_logits(self) -> int:
        """Number of tokens, counted from the end, whose logits are returned."""
        if self.return_logits:
            return len(self.token_ids)
        if self.pooled:
            return 1
        return self.num_samples if self.sample is not None and self.sample.logits else 0

    @property
    def wants_scores(self) -> bool:
        sample = self.sample
        return (
            bool(self.targets)
            or self.return_logits
            or self.pooled
            or (sample is not None and (sample.num_top > 0 or sample.logits))
        )


def _sample_problems(sample: SampleRequest, num_tokens: int) -> Iterator[str]:
    """Problems of a sample request, for a chunk of `num_tokens` tokens."""
    if not 1 <= sample.num_samples <= num_tokens:
        yield f"num_samples must be from 1 to {num_tokens}, the number of its tokens, got {sample.num_samples}"
    if sample.earlier and len(sample.earlier) != sample.num_samples - 1:
        yield f"there are {sample.num_samples - 1} samples before the last, and constraints of {len(sample.earlier)}"
    if sample.mask is not None and any(held.mask is None for held in sample.earlier or (Constraint(),)):
        yield "a guide has a mask for each sample, and some have none"


@dataclass(frozen=True, slots=True)
class ChunkScores:
    """Results of a chunk other than samples and their log-probs. Logits are for all its tokens, or for the samples."""

    log_probs: Sequence[float] = ()  # for each target
    top: Sequence[TopTokens] = ()  # for each target
    sampled_top: Sequence[TopTokens] = ()  # for each sample
    logits: Logits | None = None

    def of_sample(self, index: int) -> ChunkScores:
        """The scores of one of several samples."""
        logits = None if self.logits is None else self.logits[index : index + 1]
        return ChunkScores(sampled_top=self.sampled_top[index : index + 1], logits=logits)


NO_SCORES = ChunkScores()


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]
    hidden: HiddenRows | None = None  # hidden rows of another network, for all tokens in order, if this one reads them

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)
