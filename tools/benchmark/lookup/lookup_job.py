"""A job for a peer: the same prompts with and without prompt lookup, in turn. The result is a line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

Q8_0 = ".q8_0.gguf"  # suffix of the peers' own file
# generates a number of tokens for a prompt; returns the seconds from the first token to the last
Answer: TypeAlias = Callable[[Sequence[int], int], float]


@dataclass(frozen=True, slots=True)
class LookupJob:
    gguf: str
    prompts: list[list[int]]
    num_tokens: int
    rounds: int
    threads: int

    @classmethod
    def read(cls) -> LookupJob:
        return cls(**json.load(sys.stdin))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def run(self, plain: Answer, lookup: Answer) -> None:
        """Prints tokens per second without and with it, from the first token on, as medians over the rounds."""
        seconds: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(self.rounds):
            for mode, answer in (("without", plain), ("with", lookup)):
                seconds[mode].append(sum(answer(prompt, self.num_tokens) for prompt in self.prompts))
        total = len(self.prompts) * self.num_tokens
        print(json.dumps({mode: total / statistics.median(found) for mode, found in seconds.items()}))
