"""How far the engine's tokens agree with the baseline's; far more sensitive than ROUGE.

If the baseline's two best tokens were nearly equal at the first difference of a greedy answer, the cause is rounding.
If they were far apart (more than ROUNDING_MARGIN for a 16-bit engine), it is a bug, or quantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.judging.statistics import first_divergence

ROUNDING_MARGIN = 0.1  # nats: two candidates closer than this may swap in 16 bits


@dataclass(frozen=True, slots=True)
class Divergence:
    sample_id: str
    position: int  # position of the first different output token
    margin: float  # the baseline's margin there, in nats


@dataclass(frozen=True, slots=True)
class Parity:
    num_samples: int
    num_equal: int  # same token ids; through a server, same text
    divergences: tuple[Divergence, ...]  # known if token ids are

    @property
    def exact_match_rate(self) -> float:
        return self.num_equal / self.num_samples

    @property
    def largest_margin(self) -> float | None:
        return max((divergence.margin for divergence in self.divergences), default=None)


def compare_tokens(samples: Sequence[Sample], baseline: Sequence[Answer], engine: Sequence[Answer]) -> Parity:
    pairs = list(zip(samples, baseline, engine, strict=True))
    divergences = [found for sample, expected, actual in pairs if (found := _divergence(sample, expected, actual))]
    num_equal = sum(_is_equal(expected, actual) for _, expected, actual in pairs)
    return Parity(len(pairs), num_equal, tuple(divergences))


def _is_equal(expected: Answer, actual: Answer) -> bool:
    if expected.token_ids is None or actual.token_ids is None:
        return expected.text == actual.text
    return expected.token_ids == actual.token_ids


def _divergence(sample: Sample, expected: Answer, actual: Answer) -> Divergence | None:
    if expected.token_ids is None or actual.token_ids is None:
        return None
    position = first_divergence(expected.token_ids, actual.token_ids)
    if position is None:
        return None
    # after the baseline's last decision (a length limit), there is no margin
    margin = expected.decisions[position].margin if position < len(expected.decisions) else 0.0
    return Divergence(sample.id, position, margin)
