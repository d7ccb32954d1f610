"""The types that every part of the request path shares: a request for tokens, and the events that answer it.

Values only: frozen, validated where they are created (`SamplingParams.problems`), and trusted afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmserve.tenant_counters import TenantCounters

MAX_SEED = 2**64 - 1
Logits: TypeAlias = NDArray[np.float32]  # of one token [vocabulary], or of several [tokens, vocabulary]


class FinishReason(Enum):
    """Why a sequence ended. Names are TensorRT-LLM's."""

    END_ID = "end_id"  # also if its guide allows no more tokens
    STOP_WORDS = "stop_words"
    LENGTH = "length"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


SAMPLING_DEFAULTS = "sampling"  # a checkpoint's defaults: a key of the model facts for clients
MAX_MODEL_LEN = "max_model_len"  # another such key: the most tokens of prompt and answer together
POOLING = "pooling"  # another such key: the output of an engine that does not generate tokens
EMBEDDINGS, SCORES = "embeddings", "scores"  # its values
TOKENIZER_FILES = (  # files that belong to a network, if its checkpoint has them
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "pair_template.txt",
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. A field's default means "switched off".

    Order of application, on raw logits: repetition, presence and frequency penalties; embedding bias;
    bans (bad words, `min_tokens`); the guide's mask; then greedy, or temperature, top-k, top-p, min-p and a draw.
    Greedy when `temperature == 0` or `top_k == 1`.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: every token
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (transformers' rule)
    presence_penalty: float = 0.0  # over output only (OpenAI's rule)
    frequency_penalty: float = 0.0  # over output only
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def problems(self) -> list[str]:
        """Returns everything that is wrong with these values, as text; empty if they are valid."""
        found = [
            f"{name} must be a finite number, got {value}"
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
            if not math.isfinite(value := getattr(self, name))
        ]
        rules = [
            (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (self.min_tokens >= 0, f"min_tokens must not be negative, got {self.min_tokens}"),
            (not self.temperature < 0, f"temperature must not be negative, got {self.temperature}"),
            (self.top_k >= 0, f"top_k must not be negative (0 switches it off), got {self.top_k}"),
            (not (self.top_p <= 0 or self.top_p > 1), f"top_p must be in (0, 1], got {self.top_p}"),
            (not (self.min_p < 0 or self.min_p > 1), f"min_p must be in [0, 1], got {self.min_p}"),
            (not self.repetition_penalty <= 0, f"repetition_penalty must be positive, got {self.repetition_penalty}"),
            (0 <= self.seed <= MAX_SEED, f"seed must be an unsigned 64-bit integer, got {self.seed}"),
        ]
        return found + [text for holds, text in rules if not holds]


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The `width` most likely answers, for engines that support beam search. None: the engine's own default."""

    width: int
    length_penalty: float | None = None
    early_stopping: int | None = None  # 1: stop when `width` answers have ended
    diversity_rate: float | None = None


class GuideState(Enum):
    """The state of an answer that follows a guide."""

    OPEN = "open"  # more tokens may follow
    COMPLETE = "complete"  # the answer is valid, and nothing may follow
    STUCK = "stuck"  # the answer is invalid, and nothing may follow: no token fits, or a limit is reached


class Matcher(Protocol):
    """Determines which tokens may follow those of one answer so far. Used by one thread at a time."""

    @property
    def state(self) -> GuideState:
        """The state according to the last mask."""
        ...

    def mask(self, end_ids: Sequence[int]) -> bytes:
        """Returns a bit for each token id, the lowest bits first, in words of 32. Allows `end_ids` if the answer may
        end here. The work is done in this call, in parallel to a step."""
        ...

    def advance(self, token: int) -> None:
        """Adds a token that the mask allows and that is not an end token; it is only processed later."""
        ...

    def is_complete(self) -> bool:
        """Returns whether nothing may follow the last token."""
        ...

    def fork(self) -> Matcher:
        """Returns an independent copy in the same state, for an answer that may continue differently."""
        ...

    def likely(self) -> Sequence[int]:
        """Returns tokens that will probably follow. Of a matcher and its forks, call it only on the one in use."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Returns how many of these tokens may follow, counted from the first."""
        ...


class Guide(Protocol):
    """The required form of answers, in terms of tokens. Shared by requests."""

    def start(self) -> Matcher:
        """Returns a matcher for a new answer."""
        ...


@runtime_checkable
class SourcedGuide(Guide, Protocol):
    """A guide that another process can compile, too."""

    @property
    def source(self) -> tuple[str, str]:
        """Its kind and its text, in the form that clients send."""
        ...


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of requests. Tenants that compete for an engine share it by their weights.

    Each limit applies to each engine; 0: no limit.
    """

    name: str = ""
    weight: float = 1.0  # positive
    max_answers: int = 0  # that may run at a time
    tokens_per_minute: int = 0  # of prompts and answers
    adapters: tuple[str, ...] | None = None  # names of adapters that its requests may select; None: all
    counters: TenantCounters | None = field(default=None, compare=False, repr=False)  # None: not counted


EVERYBODY = Tenant()


@dataclass(frozen=True, slots=True)
class Allowance:
    """A tenant's remaining limits in one engine at this moment. 0 if it has no such limit."""

    num_answers: int  # that it may start
    num_tokens: int  # of prompts and answers
    tokens_back_s: float  # until all tokens of a minute are available again


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt for `Engine.submit`. Token ids only: text never enters an engine.

    Log-probs are natural logarithms of the model's own distribution, independent of the sampling parameters. Results
    about the prompt come once, in the first event of sequence 0; they require that the prompt is computed, not found in
    the prefix cache.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    end_id: int | None = None  # None: never stops on an end token
    stop_ids: tuple[tuple[int, ...], ...] = ()  # any of these token sequences ends the answer
    bad_ids: tuple[tuple[int, ...], ...] = ()  # none of these token sequences may be completed
    embedding_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    num_sequences: int = 1  # n answers; sequence i draws from its own random stream
    guide: Guide | None = None  # every answer follows it
    beam: BeamSearch | None = None  # instead of sampling; the best answer is sequence 0
    return_log_probs: bool = False
    return_prompt_log_probs: bool = False
    num_top_log_probs: int = 0  # most likely tokens returned per new token, and per prompt token with prompt log-probs
    return_context_logits: bool = False  # of every token of the prompt
    return_generation_logits: bool = False  # each new token's logits before any parameter changed them
    priority: int = 0  # higher is scheduled first
    deadline: float | None = None  # time.monotonic() seconds after which no client waits
    tenant: Tenant = EVERYBODY
    speculation: bool = True  # whether tokens may be drafted; does not affect answers
    draft_ids: tuple[int, ...] = ()  # the client's prediction of the answer; does not affect answers
    pooled: bool = False  # no tokens: one event whose logits are the network's output for the whole prompt
    second_segment: int = 0  # position in the prompt at which a second text begins; 0: there is only one
    adapter: str = ""  # digest of the LoRA adapter to use

    @property
    def num_answers(self) -> int:
        """The number of sequences in the answer: `num_sequences`, or the beams."""
        return self.beam.width if self.beam else self.num_sequences

    @property
    def scores_prompt(self) -> bool:
        """Whether the request needs results about the prompt's own tokens."""
        return self.return_prompt_log_probs or self.return_context_logits

    def max_new_tokens(self, max_seq_len: int) -> int:
        """Returns the most tokens of each answer: the requested number, or the room after the prompt if less."""
        return 1 if self.pooled else min(self.sampling.max_tokens, max_seq_len - len(self.prompt_ids))

    def length_warning(self, max_seq_len: int) -> str:
        """Returns a warning if the requested answer is longer than the room for it; empty otherwise."""
        room = self.max_new_tokens(max_seq_len)
        if room == self.sampling.max_tokens:
            return ""
        return (
            f"max_tokens is {self.sampling.max_tokens}, and after a prompt of {len(self.prompt_ids)} tokens there is "
            f"room for {room}: this engine's max_seq_len is {max_seq_len}"
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and timestamps of one sequence (time.time_ns)."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache, not computed
    completion_tokens: int
    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    num_preemptions: int = 0  # how often it was preempted
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafted tokens that were accepted


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens at one position, the most likely first; of equal ones, the lower id comes first."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Requested results about a prompt. Nothing precedes the first token, so it has no log-prob."""

    log_probs: tuple[float, ...] = ()  # of the tokens after the first
    top: tuple[TopTokens, ...] = ()  # of the tokens after the first
    logits: tuple[Logits, ...] = ()  # of every token, in pieces [tokens, vocabulary]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one sequence of a request. The last event of a sequence has `finish_reason`; the first and the last
    have `usage`, as far as it is known then.

    The end token and the tokens of a matched stop word are not part of the answer and never appear in `token_ids`; so
    the last event may have none.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()  # one per token, natural log, of the model's own (unmodified) distribution
    cum_log_prob: float = 0.0  # sum over the sequence so far
    sequence_index: int = 0
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    top: tuple[TopTokens, ...] = ()  # one per token, if requested
    logits: tuple[Logits, ...] = ()  # one per token, if requested
    prompt: PromptScores | None = None  # if requested, in the first event of sequence 0 unless it ended before

    def with_tokens(self, tokens: Sequence[TokenEvent], begin: int = 0, end: int | None = None) -> TokenEvent:
        """Returns this event with the tokens `begin` to `end` of the events in `tokens`, and with their results."""
        return replace(
            self,
            token_ids=tuple([token for event in tokens for token in event.token_ids][begin:end]),
            log_probs=tuple([log_prob for event in tokens for log_prob in event.log_probs][begin:end]),
            top=tuple([top for event in tokens for top in event.top][begin:end]),
            logits=tuple([row for event in tokens for row in event.logits][begin:end]),
        )
