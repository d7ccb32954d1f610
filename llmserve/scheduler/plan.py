"""What the scheduler hands to a runner: one step, as data.

A step is a list of chunks; a chunk is a run of consecutive tokens of one sequence. Prefill, chunked prefill and decode
are the same thing with different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmserve.core import Logits, SamplingParams, TopTokens

UNSEEN = -1  # the last token of a chunk: the step before chooses it, and nobody has seen it yet


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """How to turn the logits after a chunk's last token into a token. Stateless: everything is in here.

    The random draw depends on `(params.seed, stream, position)` only, so it is the same in every batch.
    """

    params: SamplingParams
    stream: int  # index of the sequence within its request (n answers, n streams)
    position: int  # number of tokens in the sequence before the sampled one
    history: Sequence[int] = ()  # prompt then output ids, as long as the step runs; empty unless a penalty needs them
    num_prompt: int = 0  # how many of `history` are prompt
    bias: Sequence[tuple[int, float]] = ()  # (token id, added to its logit)
    banned: Sequence[int] = ()  # token ids that may not be drawn now
    mask: Callable[[], bytes] | None = None  # makes a bit for each token id that may be drawn: `Matcher.mask`
    log_prob: bool = False
    num_top: int = 0  # most likely tokens to tell beside the sampled one
    logits: bool = False  # also return the logits


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

    @property
    def num_logits(self) -> int:
        """Tokens whose logits come back, counted from the end."""
        if self.return_logits:
            return len(self.token_ids)
        return int(self.sample is not None and self.sample.logits)

    @property
    def wants_scores(self) -> bool:
        sample = self.sample
        return (
            bool(self.targets) or self.return_logits or (sample is not None and (sample.num_top > 0 or sample.logits))
        )


@dataclass(frozen=True, slots=True)
class ChunkScores:
    """What a chunk asked for beyond a token and its log-prob. Logits are of all its tokens, or of the sampled one."""

    log_probs: Sequence[float] = ()  # of the targets
    top: Sequence[TopTokens] = ()  # likewise
    sampled_top: TopTokens | None = None
    logits: Logits | None = None


NO_SCORES = ChunkScores()


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)
