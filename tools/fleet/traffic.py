"""Requests to a fleet: from a trace, or drawn from a public trace's statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK = 32  # tokens, the default size of KV blocks


@dataclass(frozen=True, slots=True)
class Kind:
    """Medians and spreads (of the logarithm) of lengths in tokens, and the burstiness of arrivals."""

    prompt: float
    prompt_spread: float
    answer: float
    answer_spread: float
    burstiness: float  # variation of the time between two requests; 1: a Poisson process


# Medians of two traces of Azure's service of 2023 (Patel et al., "Splitwise", ISCA 2024). Arrivals are a Gamma process,
# as in Wang et al. ("BurstGPT", 2024). Spreads and burstiness are assumptions.
KINDS: Mapping[str, Kind] = {
    "conversation": Kind(1020, 0.9, 129, 0.9, 2.0),
    "code": Kind(1500, 0.9, 13, 1.0, 2.0),
}


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    num_prompt_tokens: int
    num_answer_tokens: int
    blocks: Sequence[int]  # ids of the prompt's blocks; equal ids mean equal tokens after an equal beginning


def drawn(
    kind: Kind, rate: float, count: int, *, max_tokens: int, num_prefixes: int = 0, prefix_tokens: int = 0,
    seed: int = 0,
) -> list[Request]:  # fmt: skip
    """`rate` requests per second. Each prompt begins with one of `num_prefixes` prefixes; 0: nothing is shared."""
    chance = np.random.default_rng(seed)
    shape = 1 / kind.burstiness**2
    arrivals = np.cumsum(chance.gamma(shape, 1 / (rate * shape), count))
    answers = np.clip(chance.lognormal(np.log(kind.answer), kind.answer_spread, count), 1, max_tokens // 2)
    prompts = np.clip(chance.lognormal(np.log(kind.prompt), kind.prompt_spread, count), 1, max_tokens - answers - 1)
    shared = prefix_tokens // BLOCK if num_prefixes else 0
    chosen = chance.integers(max(num_prefixes, 1), size=count)
    requests, own = [], num_prefixes * shared
    for at_s, prompt, answer, prefix in zip(arrivals, prompts, answers, chosen, strict=True):
        whole = -(-int(prompt) // BLOCK)
        begins = min(shared, whole)
        blocks = [*range(prefix * shared, prefix * shared + begins), *range(own, own + whole - begins)]
        own += whole - begins
        requests.append(Request(float(at_s), int(prompt), int(answer), blocks))
    return requests


def read(path: Path) -> list[Request]:
    """Reads a trace in Mooncake's format, JSON lines."""
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            requests.append(
                Request(row["timestamp"] / 1e3, row["input_length"], row["output_length"], row.get("hash_ids", []))
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not a request of a Mooncake trace ({error!r})") from None
    if not requests:
        raise ValueError(f"{path} has no requests")
    return requests


def lines(requests: Sequence[Request]) -> Iterator[str]:
    """Yields lines in Mooncake's format."""
    for one in requests:
        yield json.dumps(
            {
                "timestamp": round(1e3 * one.at_s),
                "input_length": one.num_prompt_tokens,
                "output_length": one.num_answer_tokens,
                "hash_ids": list(map(int, one.blocks)),
            }
        )
