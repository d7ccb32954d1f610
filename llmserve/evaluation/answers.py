"""The data types of an evaluation: samples, and answers to them from either side."""

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
    choices: tuple[str, ...] = ()  # one of them is the reference; empty: the answer is generated


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy output for one sample, without the end token; or the likeliest choice."""

    text: str
    num_prompt_tokens: int
    num_tokens: int  # log-likelihoods of all choices, if there are any
    seconds: float  # from the request to the last token
    token_ids: tuple[int, ...] | None = None  # None: only the text is known (through a server)
    decisions: tuple[Decision, ...] = ()  # a baseline's: of its tokens, and of the end token where that ended it
    prompt_digest: str = ""  # `ids_digest` of the prompt; empty: unknown (through a server)
    log_likelihoods: tuple[float, ...] = ()  # log-likelihood of each choice after the prompt, in nats
    rounding: tuple[float, ...] = ()  # for a baseline: each decision's divergence from the other reading (rounding.py)
    num_drafted: int = 0  # tokens drafted by speculation
    num_accepted: int = 0  # of these, accepted


@dataclass(frozen=True, slots=True)
class Performance:
    """Seconds per request, and output tokens per second of the whole run."""

    mean: float
    p50: float
    p95: float
    tokens_per_second: float
    num_drafted: int = 0  # tokens drafted by speculation; the number depends on the machine's load
    num_accepted: int = 0  # of these, accepted

    @classmethod
    def of(cls, answers: Sequence[Answer], wall_seconds: float) -> Performance:
        seconds = np.array([answer.seconds for answer in answers])
        p50, p95 = (float(np.percentile(seconds, q)) for q in (50, 95))
        num_tokens = sum(answer.num_tokens for answer in answers)
        return cls(
            float(seconds.mean()), p50, p95, num_tokens / wall_seconds if wall_seconds > 0 else 0.0,
            sum(answer.num_drafted for answer in answers), sum(answer.num_accepted for answer in answers),
        )  # fmt: skip
