"""Prompts as token ids, by the same stage that serves them: both sides of a comparison read the same ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmserve.core import TOKENIZER_FILES
from llmserve.engine.directory.artifact import GENERATION_CONFIG_FILE, hash_file
from llmserve.errors import InvalidArgument, PromptTooLong, raise_problems
from llmserve.evaluation.answers import Sample
from llmserve.stages.chat import Message
from llmserve.stages.preprocess import PreparedPrompt, Preprocessor, TextPrompt


@dataclass(frozen=True, slots=True)
class ChoicePrompt(PreparedPrompt):
    """A prompt that may go on in several ways."""

    choices: tuple[str, ...] = ()
    continued: tuple[tuple[int, ...], ...] = ()  # ids of the prompt with each of them behind it

    def parts(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of each choice: what stands before it, and its own ids."""
        begin = len(self.input_ids)
        return [(ids[:begin], ids[begin:]) for ids in self.continued]


class PromptEncoder:
    """Of a checkpoint or of an engine directory, with room for an answer of `max_tokens`."""

    def __init__(self, path: Path, max_tokens: int) -> None:
        self._preprocessor = Preprocessor.open(path)
        self._max_tokens = max_tokens

    def encode(self, prompt: str | tuple[Message, ...]) -> PreparedPrompt:
        if isinstance(prompt, str):
            return self._preprocessor.prepare(TextPrompt(text=prompt, max_tokens=self._max_tokens))
        return self._preprocessor.prepare(TextPrompt(messages=prompt, max_tokens=self._max_tokens))

    def count_ids(self, prompt: str | tuple[Message, ...]) -> int:
        """Of one that is too long to be tokenized, a smaller number, but more than a prompt may have."""
        try:
            return len(self.encode(prompt).input_ids)
        except PromptTooLong as error:
            return max(error.num_tokens, error.limit + 1)

    def encode_samples(self, samples: Sequence[Sample]) -> list[PreparedPrompt]:
        """A `ChoicePrompt` where a sample has choices."""
        return [self._encode_choices(sample) if sample.choices else self._encode_text(sample) for sample in samples]

    def _encode_text(self, sample: Sample) -> PreparedPrompt:
        try:
            prompt = self.encode(sample.prompt)
        except InvalidArgument as error:
            raise InvalidArgument(f"sample {sample.id}: {error}") from error
        if not prompt.input_ids:
            raise InvalidArgument(f"sample {sample.id}: its prompt has no tokens")
        return prompt

    def _encode_choices(self, sample: Sample) -> ChoicePrompt:
        """A text goes on in its own ids, as lm-evaluation-harness cuts it: what it has of ids with a choice behind it
        is the prompt, and spaces at its end belong to the choice. Behind messages, a choice has ids of its own."""
        if isinstance(sample.prompt, str):
            prompt = self.encode(sample.prompt.rstrip())
            whole = [self.encode(sample.prompt + choice).input_ids for choice in sample.choices]
        else:
            prompt = self.encode(sample.prompt)
            tokenizer = self._preprocessor.tokenizer
            whole = [(*prompt.input_ids, *tokenizer.encode(choice)) for choice in sample.choices]
        begin = len(prompt.input_ids)
        problems = ["its prompt has no tokens"] if not begin else [
            f"choice {choice!r} has no tokens of its own"
            for choice, ids in zip(sample.choices, whole, strict=True)
            if len(ids) <= begin
        ]  # fmt: skip
        raise_problems(InvalidArgument, f"sample {sample.id}", problems)
        return ChoicePrompt(
            prompt.input_ids,
            prompt.end_id,
            prompt.pad_id,
            prompt.stop_words,
            choices=sample.choices,
            continued=tuple(whole),
        )


def end_ids(prompt: PreparedPrompt) -> tuple[int, ...]:
    """Every id that ends an answer by itself."""
    return (prompt.end_id, *(word[0] for word in prompt.stop_words if len(word) == 1))


def ids_digest(prompt: PreparedPrompt) -> str:
    """Names a prompt by its ids and by the ids that end its answer, or its choices; 16 hexadecimal digits."""
    choices = prompt.continued if isinstance(prompt, ChoicePrompt) else ()
    parts = (prompt.input_ids, sorted(end_ids(prompt)), *choices)
    text = ";".join(",".join(map(str, ids)) for ids in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def text_digest(path: Path) -> str:
    """SHA-256 (hex) over a checkpoint's files between text and ids: vocabulary, special tokens, end and role ids."""
    names = sorted((*TOKENIZER_FILES, GENERATION_CONFIG_FILE))
    files = [f"{name} {hash_file(path / name)}" for name in names if (path / name).is_file()]
    return hashlib.sha256("\n".join(files).encode()).hexdigest()
