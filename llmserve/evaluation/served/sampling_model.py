"""The definition of `SamplingParams`, written again in plain numpy: the distribution, and the draw from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmserve.scheduler.plan import SampleRequest

WORD = 2**32
ROUNDING = 1e-5


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox 4x32 with ten rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3)."""
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (b // WORD ^ counter[1] ^ key[0], b % WORD, a // WORD ^ counter[3] ^ key[1], a % WORD)
        key = ((key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD)
    return counter


def uniform(seed: int, position: int, stream: int) -> float:
    words = philox((position % WORD, position // WORD, stream, 0), (seed % WORD, seed // WORD))
    return float((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def adjusted_logits(logits: NDArray[np.float32], request: SampleRequest) -> NDArray[np.float32]:
    """Penalties, bias and bans; float32, like the engine."""
    x = logits.astype(np.float32).copy()
    params = request.params
    for token in set(request.history):
        penalty = np.float32(params.repetition_penalty)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token, count in Counter(request.history[request.num_prompt :]).items():
        x[token] -= np.float32(params.presence_penalty) + np.float32(count) * np.float32(params.frequency_penalty)
    for token, bias in request.bias:
        x[token] += np.float32(bias)
    x[list(request.banned)] = -np.inf
    if request.mask is not None:
        allowed = np.unpackbits(np.frombuffer(request.mask(), np.uint8), bitorder="little")[: len(x)]
        x[allowed == 0] = -np.inf
    return x


def distribution(logits: NDArray[np.float32], request: SampleRequest) -> NDArray[np.float64]:
    """Probability of every token: temperature, then top-k, top-p and min-p, each applied to the previous one's rest."""
    x = adjusted_logits(logits, request).astype(np.float64)
    params = request.params
    if params.is_greedy:
        one_hot: NDArray[np.float64] = (np.arange(len(x)) == np.argmax(x)).astype(np.float64)
        return one_hot
    x = x / params.temperature
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if params.top_p < 1:
        order = np.lexsort((np.arange(len(p)), -p))
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    normalized: NDArray[np.float64] = p / p.sum()
    return normalized


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x = x - x.max()
    result: NDArray[np.float64] = x - np.log(np.exp(x).sum())
    return result


@dataclass(frozen=True, slots=True)
class Draw:
    """The draw from a distribution: a position between 0 and 1 among the remaining tokens, laid end to end in order of
    ids, or as sorted by top-p."""

    order: NDArray[np.intp]  # of all tokens
    ends: NDArray[np.float64]  # where each of `order` ends
    place: float

    @classmethod
    def of(cls, logits: NDArray[np.float32], request: SampleRequest) -> Draw:
        p, params = distribution(logits, request), request.params
        order = np.lexsort((np.arange(len(p)), -p)) if params.top_p < 1 else np.arange(len(p))
        return cls(order, np.cumsum(p[order]), uniform(params.seed, request.position, request.stream))

    @property
    def token(self) -> int:
        at = int(np.searchsorted(self.ends, self.place, side="right"))
        return int(self.order[min(at, len(self.order) - 1)])

    def allows(self, token: int) -> bool:
        """Whether `token` is the one that was drawn, within the rounding of the engine's float sums."""
        at = int(np.flatnonzero(self.order == token)[0])
        begin = float(self.ends[at - 1]) if at else 0.0
        end = float(self.ends[at])
        return begin < end and begin - ROUNDING <= self.place <= end + ROUNDING
