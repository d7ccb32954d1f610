"""The requests of a load: random words, or prompts from a file.

Each prompt is created anew, so that the server's prefix cache holds only what prompts are meant to share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.benchmark.lengths import Lengths
from llmserve.benchmark.records import LoadRequest, Prompt
from llmserve.errors import InvalidArgument, raise_problems

NOUNS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city name team minute idea body back parent face level office door health person art war
history party result change morning reason research girl guy moment air teacher force education"""
WORDS = tuple(NOUNS.split())
FILLER = "a"  # a word that is one token in almost every tokenizer
ROUNDS = 8  # attempts to get closer to the requested number of tokens
MAX_PROBLEMS = 5  # the most problems of a file of prompts that are reported


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes text with a given number of tokens: counted by `count`, or else estimated by the mean per word."""

    tokens_per_word: float
    count: Callable[[str], int] | None = None

    def text(self, num_tokens: int, generator: np.random.Generator) -> str:
        words = self._words(num_tokens, generator)
        if self.count is None:
            return " ".join(words)
        for _ in range(ROUNDS):
            missing = num_tokens - self.count(" ".join(words))
            if missing < self.tokens_per_word:
                break
            words += self._words(missing, generator)
        while len(words) > 1 and self.count(" ".join(words)) > num_tokens:
            words.pop()
        while self.count(" ".join([*words, FILLER])) <= num_tokens:
            words.append(FILLER)
        return " ".join(words)

    def _words(self, num_tokens: int, generator: np.random.Generator) -> list[str]:
        num_words = max(round(num_tokens / self.tokens_per_word), 1)
        return [WORDS[place] for place in generator.integers(len(WORDS), size=num_words)]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Prompts of a prefix, which is one of `num_prefixes` shared ones, and their own text."""

    writer: Writer
    input_tokens: Lengths
    output_tokens: Lengths
    prefix_tokens: int = 0
    num_prefixes: int = 1

    def requests(self, generator: np.random.Generator) -> Iterator[LoadRequest]:
        """Yields requests endlessly."""
        num_prefixes = self.num_prefixes if self.prefix_tokens else 0
        prefixes = [self.writer.text(self.prefix_tokens, generator) for _ in range(num_prefixes)]
        while True:
            text = self.writer.text(self.input_tokens.draw(generator), generator)
            prefix = prefixes[int(generator.integers(num_prefixes))] if prefixes else ""
            yield LoadRequest(f"{prefix} {text}" if prefix else text, self.output_tokens.draw(generator))


@dataclass(frozen=True, slots=True)
class Given:
    """Prompts from a file, in its order, repeated endlessly."""

    prompts: Sequence[tuple[Prompt, int | None]]  # with the maximum length of the answer, if the file has it
    output_tokens: Lengths

    def requests(self, generator: np.random.Generator) -> Iterator[LoadRequest]:
        """Yields requests endlessly."""
        while True:
            for prompt, max_tokens in self.prompts:
                yield LoadRequest(prompt, max_tokens or self.output_tokens.draw(generator))


def read_prompts(path: Path) -> list[tuple[Prompt, int | None]]:
    """Reads a file of prompts. A .jsonl file has an object per line, with `prompt` or `messages` and optionally
    `max_tokens`; any other file has a prompt per line. Raises `InvalidArgument` that lists the wrong lines."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--prompts {path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InvalidArgument(f"--prompts {path} has no prompts")
    if path.suffix != ".jsonl":
        return [(line, None) for _, line in numbered]
    found, problems = [], []
    for number, line in numbered:
        try:
            found.append(_parsed(json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    raise_problems(InvalidArgument, f"--prompts {path}", [*problems[:MAX_PROBLEMS], *more])
    return found


def _parsed(entry: Any) -> tuple[Prompt, int | None]:
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError("expected an object with either prompt or messages")
    if unknown := entry.keys() - {"prompt", "messages", "max_tokens"}:
        raise ValueError(f"does not know {', '.join(sorted(unknown))}")
    max_tokens = entry.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError("max_tokens must be a number from 1 on")
    if isinstance(prompt := entry.get("prompt", ""), str) and "prompt" in entry:
        return prompt, max_tokens
    messages = entry.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError("prompt must be a string, messages a list of objects with the texts role and content")
    return messages, max_tokens


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(value, str) for value in message.values())
    )
