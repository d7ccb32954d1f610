"""Converts prompts to token ids with the stage that serves them, so both sides of a comparison read the same ids."""

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
    """A prompt with several continuations."""

    choices: tuple[str, ...] = ()
    continued: tuple[tuple[int, ...], ...] = ()  # ids of the prompt followed by each of them

    def parts(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each choice: the ids before it, and its own ids."""
        begin = len(self.input_ids)
        return [(ids[:begin], ids[begin:]) for ids in self.continued]


class PromptEncoder:
    """For a checkpoint or an engine directory; leaves room for an answer of `max_tokens`."""

    def __init__(self, path: Path, max_tokens: int) -> None:
        self._preprocessor = Preprocessor.open(path)
        self._max_tokens = max_tokens

    def encode(self, prompt: str | tuple[Message, ...]) -> PreparedPrompt:
        if isinstance(prompt, str):
            return self._preprocessor.prepare(TextPrompt(text=prompt, max_tokens=self._max_tokens))
        return self._preprocessor.prepare(TextPrompt(messages=prompt, max_tokens=self._max_tokens))

    def count_ids(self, prompt: str | tuple[Message, ...]) -> int:
        """For a prompt that is too long to be tokenized, a lower bound that still exceeds the limit."""
        try:
            return len(self.encode(prompt).input_ids)
        except PromptTooLong as error:
            return max(error.num_tokens, error.limit + 1)

    def encode_samples(self, samples: Sequence[Sample]) -> list[PreparedPrompt]:
        """Returns a `ChoicePrompt` for a sample with choices."""
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
        """Split a text as lm-evaluation-harness does: prompt and choice are tokenized together, and spaces at the end
        of the prompt belong to the choice. After messages, a choice is tokenized separately."""
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
    """Every id that ends an answer."""
    return (prompt.end_id, *(word[0] for word in prompt.stop_words if len(word) == 1))


def ids_digest(prompt: PreparedPrompt) -> str:
    """Identifies a prompt by its ids, the ids that end its answer, and its choices; 16 hexadecimal digits."""
    choices = prompt.continued if isinstance(prompt, ChoicePrompt) else ()
    parts = (prompt.input_ids, sorted(end_ids(prompt)), *choices)
    text = ";".join(",".join(map(str, ids)) for ids in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def text_digest(path: Path) -> str:
    """SHA-256 (hex) over a checkpoint's text files: vocabulary, special tokens, end ids and role ids."""
    names = sorted((*TOKENIZER_FILES, GENERATION_CONFIG_FILE))
    files = [f"{name} {hash_file(path / name)}" for name in names if (path / name).is_file()]
    return hashlib.sha256("\n".join(files).encode()).hexdigest()
