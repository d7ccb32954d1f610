"""What the scheduler hands to a runner: one step, as data.

A step is a list of chunks; a chunk is a run of consecutive tokens of one sequence. Prefill, chunked prefill and decode
are the same thing with different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from llmserve.core import Logits, SamplingParams, TopTokens
from llmserve.errors import Unsupported, raise_problems

# [tokens, width]: what a network's head reads of each, or would. `Logits` are such rows of numbers, too.
HiddenRows: TypeAlias = Logits
UNSEEN = -1  # the last token of a chunk: the step before chooses it, and nobody has seen it yet


@dataclass(frozen=True, slots=True)
class Constraint:
    """What may be drawn at one place."""

    banned: Sequence[int] = ()
    mask: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """How to turn the logits after each of a chunk's last `num_samples` tokens into a token. Stateless: everything is
    in here.

    The fields describe the last sample. An earlier sample is drawn as if the chunk ended at its token: its `position`
    counts the tokens up to there, its `history`, which penalties count, ends there, and `earlier` says what may be
    drawn there. The random draw depends on `(params.seed, stream, position)` only. So n samples of a chunk equal those
    of n steps of one token each, whatever else is in the batch.
    """

    params: SamplingParams
    stream: int  # index of the sequence within its request (n answers, n streams)
    position: int  # number of tokens in the sequence before the sampled one
    history: Sequence[int] = ()  # prompt then output ids, as long as the step runs; empty unless a penalty needs them
    num_prompt: int = 0  # how many of `history` are prompt
    bias: Sequence[tuple[int, float]] = ()  # (token id, added to its logit)
    banned: Sequence[int] = ()  # token ids that may not be drawn now
    # makes a bit for each token id that may be drawn: `Matcher.mask`. Those of a chunk are called in order
    mask: Callable[[], bytes] | None = None
    log_prob: bool = False
    num_top: int = 0  # most likely tokens to tell beside the sampled one
    logits: bool = False  # also return the logits
    num_samples: int = 1  # tokens, counted from the chunk's end, after each of which one is drawn
    earlier: Sequence[Constraint] = ()  # of the samples before the last, in order; empty: anything may be drawn there

    def before(self, num_tokens: int) -> SampleRequest:
        """The one sample whose token stands so many tokens earlier in the chunk."""
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
    sample: SampleRequest | None = None  # None: the prompt goes on in a later step
    return_logits: bool = False  # also return logits of every token of this chunk
    targets: Sequence[int] = ()  # what follows each of the first tokens of this chunk; their log-probs are wanted
    num_top: int = 0  # most likely tokens to tell at each target
    # Slots of its sequence's state before `start` and after the last token, where the network has states. The first one
    # is not read at the start of a sequence.
    states: tuple[int, int] = (0, 0)
    # A slot for the state after so many of its tokens, not all; 0: none is wanted. Perhaps the slot that it reads.
    kept_state: tuple[int, int] = (0, 0)
    pooled: bool = False  # what the network makes of the whole sequence, which ends here, comes back as logits
    second_segment: int = 0  # position from which on tokens belong to a second text; 0: there is one
    adapter: int = 0  # slot of the adapter that computes it with the network; 0: none
    num_again: int = 0  # of its first tokens: computed before, as drafts that were drawn
    # Likewise of layers with a window, where these have tables of their own: as long as the chunk's end needs. Entries
    # before the window of its first token mean nothing.
    windowed: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        """Raises `Unsupported` for samples that no runner can draw: checked here only."""
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
        """Whether it computes tokens of a prompt, or of what was preempted."""
        return self.start == 0 or len(self.token_ids) > self.num_again + self.num_samples

    @property
    def drafted(self) -> Sequence[int]:
        """The tokens at its end that nobody has drawn yet: each is one if the sample before it says so."""
        return self.token_ids[len(self.token_ids) - self.num_samples + 1 :] if self.num_samples > 1 else ()

    @property
    def samples(self) -> Sequence[SampleRequest]:
        """One for each token that is drawn, in order."""
        if self.sample is None:
            return ()
        if self.sample.num_samples == 1:
            return (self.sample,)
        return [self.sample.before(num_tokens) for num_tokens in reversed(range(self.sample.num_samples))]

    @property
    def num_logits(self) -> int:
        """Tokens whose logits come back, counted from the end."""
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
    """Of several samples, or none, for a chunk of so many tokens."""
    if not 1 <= sample.num_samples <= num_tokens:
        yield f"num_samples must be from 1 to {num_tokens}, the number of its tokens, got {sample.num_samples}"
    if sample.earlier and len(sample.earlier) != sample.num_samples - 1:
        yield f"there are {sample.num_samples - 1} samples before the last, and constraints of {len(sample.earlier)}"
    if sample.mask is not None and any(held.mask is None for held in sample.earlier or (Constraint(),)):
        yield "a guide has a mask for each sample, and some have none"


@dataclass(frozen=True, slots=True)
class ChunkScores:
    """What a chunk asked for beyond samples and their log-probs. Logits are of all its tokens, or of the samples."""

    log_probs: Sequence[float] = ()  # of the targets
    top: Sequence[TopTokens] = ()  # likewise
    sampled_top: Sequence[TopTokens] = ()  # of the samples
    logits: Logits | None = None

    def of_sample(self, index: int) -> ChunkScores:
        """Of one of several samples."""
        logits = None if self.logits is None else self.logits[index : index + 1]
        return ChunkScores(sampled_top=self.sampled_top[index : index + 1], logits=logits)


NO_SCORES = ChunkScores()


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]
    hidden: HiddenRows | None = None  # of another network, for all tokens in order, where this one reads them

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)
