"""The nouns of an evaluation: a sample that is asked, and an answer to it, whoever gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmserve.evaluation.decisions import Decision
from llmserve.stages.chat import Message


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of a suite's data. `prompt` is text, or chat messages."""

    id: str
    prompt: str | tuple[Message, ...]
    reference: str
    choices: tuple[str, ...] = ()  # one of them is the reference; none: the answer is written


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy output for one sample; the end token is not part of it. Or the choice that is likeliest."""

    text: str
    num_prompt_tokens: int
    num_tokens: int  # of all choices, where there are some
    seconds: float  # from the request to the last token
    token_ids: tuple[int, ...] | None = None  # None: only the text is known (through a server)
    decisions: tuple[Decision, ...] = ()  # a baseline's: of its tokens, and of the end token where that ended it
    prompt_digest: str = ""  # `ids_digest` of the prompt; empty: not known (through a server)
    log_likelihoods: tuple[float, ...] = ()  # of each choice behind the prompt, in nats
    rounding: tuple[float, ...] = ()  # a baseline's: each decision's divergence from the other reading (rounding.py)
    num_drafted: int = 0  # tokens, by speculation
    num_accepted: int = 0  # of these, drawn


@dataclass(frozen=True, slots=True)
class Performance:
    """Seconds per request, and output tokens per second of the whole run."""

    mean: float
    p50: float
    p95: float
    tokens_per_second: float
    num_drafted: int = 0  # tokens, by speculation: how many depends on what else the machine does
    num_accepted: int = 0  # of these, drawn

    @classmethod
    def of(cls, answers: Sequence[Answer], wall_seconds: float) -> Performance:
        seconds = np.array([answer.seconds for answer in answers])
        p50, p95 = (float(np.percentile(seconds, q)) for q in (50, 95))
        num_tokens = sum(answer.num_tokens for answer in answers)
        return cls(
            float(seconds.mean()), p50, p95, num_tokens / wall_seconds if wall_seconds > 0 else 0.0,
            sum(answer.num_drafted for answer in answers), sum(answer.num_accepted for answer in answers),
        )  # fmt: skip
